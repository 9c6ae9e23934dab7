"""Measures latency and bandwidth of a mesh axis, with the collectives of training and under the same load."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from detonation.cluster.network.profile import AxisProfile, Operation, Sample
from detonation.core.link.communicator import Axis
from detonation.core.link.link import Link

_SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
_REPEATS = 5


def probe_axis(axis: Axis, device: torch.device, budget_s: float = 6.0) -> AxisProfile:
    """Measures `axis` with messages of `device` in about `budget_s` seconds. Collective over all ranks.

    All groups of the axis send at the same time, and each rank sends and receives at once, as in training. Sizes for
    which the time is too short are left out, but at least two are measured. Over a long latency it takes up to three
    times as long, until the sizes are large enough to show the rate.
    """
    per_node = dist.get_world_size() // axis.size()
    operations, link = {}, Link(axis)
    if axis.size() > 1:
        starts: dict[str, Callable[[int], Callable[[], object]]] = {
            "all-reduce": lambda n: link.all_reduce(torch.zeros(n // 4, device=device)),
            "all-gather": lambda n: link.all_gather(torch.zeros(n, dtype=torch.uint8, device=device)),
            "all-to-all": lambda n: link.all_to_all(
                torch.zeros(axis.size(), n // axis.size(), dtype=torch.uint8, device=device)
            ),
        }
        for name, start in starts.items():
            operations[name] = fit_line(_samples(link, start, device, budget_s / (len(starts) + 1)))
    return AxisProfile(axis.size(), per_node, operations)


def fit_line(samples: Sequence[Sample]) -> Operation:
    """Fits seconds = latency + 8 * bytes / rate with the smallest relative squared error and latency >= 0."""
    x = torch.tensor([s.bytes_sent for s in samples], dtype=torch.float64)
    y = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    weighted = torch.stack([1 / y, x / y], dim=1)  # relative, or large messages would outweigh small messages
    solution = torch.linalg.lstsq(weighted, torch.ones(len(y), 1, dtype=torch.float64)).solution.view(-1)
    latency, slope = (float(v) for v in solution)
    if latency < 0 or slope <= 0:
        latency, slope = max(0.0, float(y.min())) * (slope <= 0), float((y / x).min())
    off = ((latency + slope * x) / y - 1).abs().max()
    return Operation(latency, 8 / slope, float(off), list(samples))


def _samples(
    link: Link, start: Callable[[int], Callable[[], object]], device: torch.device, budget_s: float
) -> list[Sample]:
    """Times rising sizes until the budget is used up; all ranks agree on the times, and so on the last size."""
    samples: list[Sample] = []
    start(_SIZES[0])()  # the first exchange opens connections
    began = time.perf_counter()
    for size in _SIZES:
        if len(samples) >= 2:
            elapsed = float(slowest(torch.tensor([time.perf_counter() - began], dtype=torch.float64)))
            # a message that takes hardly longer than the shortest does not show the rate: better late than wrong
            patience = 1 if samples[-1].seconds > 1.5 * samples[0].seconds else 3
            if elapsed + _REPEATS * fit_line(samples).seconds(4 * samples[-1].bytes_sent) > patience * budget_s:
                break
        times, sent_before = [], link.bytes_sent
        for _ in range(_REPEATS):
            dist.barrier()
            began_at = time.perf_counter()
            start(size)()
            if device.type == "cuda":  # NCCL's wait does not block the host
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began_at)
        sent = (link.bytes_sent - sent_before) // _REPEATS
        agreed = slowest(torch.tensor(times, dtype=torch.float64)).tolist()
        low, median, high = statistics.quantiles(agreed, n=4)
        samples.append(Sample(sent, median, (high - low) / median))
    return samples


def slowest(times: Tensor) -> Tensor:
    """The elementwise maximum of `times` over all ranks. Collective."""
    worst = times.to("cuda") if dist.get_backend() == "nccl" else times.clone()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.cpu()
