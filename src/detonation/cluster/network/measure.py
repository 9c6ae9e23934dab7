"""Probe: latency and bandwidth of a mesh axis, measured with the operations that training uses, as it uses them."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.cluster.network.profile import Axis, Operation, Pair, Sample
from detonation.core.link.communicator import Axis as Joined
from detonation.core.link.link import Link

_SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
_REPEATS = 5
_PAIR_SIZES = (1024, 2**18)
_PAIR_REPEATS = 3


def probe_axis(axis: Joined, device: torch.device, budget_s: float = 6.0) -> Axis:
    """What `axis` does with messages of `device`, in about `budget_s` seconds. Collective over all ranks.

    All groups of the axis talk at the same time, and each rank sends and receives at once, as in training. A size is
    left out where the time would not do for it; two at least are measured. Where latency is long it takes longer, three
    times at most, until sizes are large enough to tell of the rate.
    """
    per_node = dist.get_world_size() // axis.size()
    operations, link = {}, Link(axis)
    if axis.size() > 1:
        starts: dict[str, Callable[[int], Callable[[], object]]] = {
            "all-reduce": lambda n: link.reduce(torch.zeros(n // 4, device=device)),
            "all-gather": lambda n: link.gather([torch.zeros(n, dtype=torch.uint8, device=device)]),
            "all-to-all": lambda n: link.swap(
                [[torch.zeros(n // axis.size(), dtype=torch.uint8, device=device)]] * axis.size()
            ),
        }
        for name, start in starts.items():
            operations[name] = fit(_samples(link, start, budget_s / (len(starts) + 1)))
    # an emulated link is the same between all
    pairs = _pairs(axis) if axis.size() > 2 and isinstance(axis, DeviceMesh) else ()
    return Axis(axis.size(), per_node, operations, pairs)


def fit(samples: Sequence[Sample]) -> Operation:
    """The line seconds = latency + 8 * bytes / rate with the smallest relative squared error, latency at least 0."""
    x = torch.tensor([s.bytes_sent for s in samples], dtype=torch.float64)
    y = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    weighted = torch.stack([1 / y, x / y], dim=1)  # relative: small messages must not be drowned by large ones
    solution = torch.linalg.lstsq(weighted, torch.ones(len(y), 1, dtype=torch.float64)).solution.view(-1)
    latency, slope = (float(v) for v in solution)
    if latency < 0 or slope <= 0:
        latency, slope = max(0.0, float(y.min())) * (slope <= 0), float((y / x).min())
    off = ((latency + slope * x) / y - 1).abs().max()
    return Operation(latency, 8 / slope, float(off), list(samples))


def _samples(link: Link, start: Callable[[int], Callable[[], object]], budget_s: float) -> list[Sample]:
    """Rising sizes until the time is used up; every rank agrees on when that is, and on how long each took."""
    samples: list[Sample] = []
    start(_SIZES[0])()  # the first one opens connections
    began = time.perf_counter()
    for size in _SIZES:
        if len(samples) >= 2:
            elapsed = float(slowest(torch.tensor([time.perf_counter() - began], dtype=torch.float64)))
            # a message that takes hardly longer than the shortest says nothing of the rate: better late than wrong
            patience = 1 if samples[-1].seconds > 1.5 * samples[0].seconds else 3
            if elapsed + _REPEATS * fit(samples).seconds(4 * samples[-1].bytes_sent) > patience * budget_s:
                break
        times, counted = [], link.bytes_sent
        for _ in range(_REPEATS):
            dist.barrier()
            at = time.perf_counter()
            start(size)()
            times.append(time.perf_counter() - at)
        sent = (link.bytes_sent - counted) // _REPEATS
        agreed = slowest(torch.tensor(times, dtype=torch.float64)).tolist()
        low, median, high = statistics.quantiles(agreed, n=4)
        samples.append(Sample(sent, median, (high - low) / median))
    return samples


def slowest(times: Tensor) -> Tensor:
    """The longest of all ranks for each of `times`."""
    worst = times.to("cuda") if dist.get_backend() == "nccl" else times.clone()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.cpu()


def _pairs(axis: DeviceMesh) -> list[Pair]:
    """Every two places of the axis, measured with a short and a long message each way at once.

    In rounds in which each place talks to one other, as in a tournament: as many rounds as places.
    """
    place, size, ranks = axis.get_local_rank(), axis.size(), dist.get_process_group_ranks(axis.get_group())
    found: list[Pair] = []
    for games in _rounds(size):
        other = next((b if a == place else a for a, b in games if place in (a, b)), None)
        peer = None if other is None else ranks[other]
        times = torch.zeros(2, size, dtype=torch.float64)  # short and long, by the lower place of the pair
        for i, nbytes in enumerate(_PAIR_SIZES):
            seconds = statistics.median(_both_ways(peer, nbytes, axis) for _ in range(_PAIR_REPEATS))
            if other is not None:
                times[i, min(place, other)] = seconds
        short, long = slowest(times)
        for a, b in games:
            # of two times that differ by less than they vary, the difference says nothing
            seconds = max(float(long[a] - short[a]), 0.1 * float(long[a]))
            rate = 8 * (_PAIR_SIZES[1] - _PAIR_SIZES[0]) / seconds
            found.append(Pair(a, b, float(short[a]), rate))
    return sorted(found, key=lambda pair: (pair.first, pair.second))


def _rounds(size: int) -> list[list[tuple[int, int]]]:
    """All pairs of `size` places in rounds that use each place at most once (the circle method).

    >>> _rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        games = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in games if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _both_ways(peer: int | None, nbytes: int, axis: DeviceMesh) -> float:
    """Seconds to send `nbytes` to `peer` and receive as many from it at the same time; everyone else waits."""
    device = torch.device(axis.device_type)
    out, back = (
        torch.zeros(nbytes, dtype=torch.uint8, device=device),
        torch.empty(nbytes, dtype=torch.uint8, device=device),
    )
    dist.barrier()
    began = time.perf_counter()
    if peer is not None:
        group = axis.get_group()
        operations = [dist.P2POp(dist.isend, out, peer, group), dist.P2POp(dist.irecv, back, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - began
