"""Measures the latency and the rate of a mesh axis, and how much slower a message becomes after a
pause. All process groups of the axis send at the same time.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from detonation.cluster.network.profile import (
    SILENT_BYTES,
    SILENT_S,
    AxisProfile,
    LinkSample,
    Operation,
    Sample,
)
from detonation.core.link import Axis, ElasticCommunicator, Link, mismatch_on_all

Start = Callable[[int], Callable[[], object]]
"""Starts an exchange of the given number of bytes, and returns a function that waits for its
end.
"""
_SIZES = 2**10, 2**24
"""Sizes in bytes of the smallest and the largest message that is measured."""
_HINTS = 1.1
"""If a message takes more than this multiple of the smallest message's time, the following sizes
grow by smaller factors.
"""
_SHOWS = 1.5
"""A message that takes more than this multiple of the smallest message's time is large enough to
show the rate of the link.
"""
_REPEATS = 5
_FEWEST = 2
_PAIR_SIZES = (1024, 2**18)
_PAIR_REPEATS = 3
_NEAR_S = 1e-3
"""Largest latency, in seconds, of nodes that are close to each other. A pause is assumed to slow no
message between such nodes.
"""


class Everyone:
    """All ranks that measure together, with collective methods to compare their results. These are
    the ranks of the default process group, or the present ranks of the replicas along an elastic
    `axis`.

    Args:
        device: Device of tensors that the groups can send.
        shards: With an elastic axis, the axes inside this replica. Ranks are ordered by replica
            and then by shard.
    """

    def __init__(
        self, device: torch.device, axis: Axis | None = None, shards: Sequence[Axis] = ()
    ) -> None:
        self.device = device
        self._axis = axis
        self._shards = [Link(shard) for shard in shards]
        self._elastic = isinstance(axis, ElasticCommunicator)

    @cached_property
    def _links(self) -> list[Link]:
        """Returns the links over which all ranks exchange values: one link of all ranks or, with an
        elastic axis, the links inside a replica, and then the link between replicas.
        """
        if self._elastic and self._axis is not None:
            return [*self._shards, Link(self._axis)]
        return [Link(init_device_mesh(self.device.type, (dist.get_world_size(),)))]

    @property
    def size(self) -> int:
        if self._elastic:
            return math.prod(link.replicas for link in self._links)
        return dist.get_world_size()

    def barrier(self) -> None:
        """Waits for all ranks. On an elastic axis each pair of replicas exchanges a message
        directly, so that all ranks continue at about the same time.
        """
        *shards, between = self._links
        for link in shards:
            link.send_to_all(None, self.device)
        if self._elastic:
            between.all_to_all(torch.zeros(between.replicas, 1, dtype=torch.uint8))()
        else:
            dist.barrier()

    def over(
        self, times: Sequence[float], reduced: Callable[[Sequence[float]], float] = max
    ) -> list[float]:
        """Reduces each of `times` over all ranks with the function `reduced`, by default the
        maximum.
        """
        return [reduced(each) for each in zip(*self.send_to_all(times), strict=True)]

    def send_to_all(self, value: Any) -> list[Any]:
        """Returns the JSON `value` of each rank, in rank order. For a lost rank, the list holds the
        value of another rank.
        """
        found = [value]
        for link in self._links:
            found = [each for theirs in link.send_to_all(found, self.device) for each in theirs]
        return found

    def require_same(self, description: Mapping[str, str], notes: Mapping[str, str]) -> None:
        """Raises `Mismatch` on all ranks if the ranks have different descriptions."""
        *shards, between = self._links
        for link in (between, *shards):
            with mismatch_on_all(shards, self.device):
                link.require_same(description, self.device, notes)


def probe_axis(
    axis: Axis, device: torch.device, budget_s: float = 6.0, everyone: Everyone | None = None
) -> AxisProfile:
    """Measures `axis` with messages on `device`. Collective over `everyone`, all ranks by default.

    All groups of the axis send at the same time, and each rank sends and receives simultaneously,
    as in training. The measurement takes about `budget_s` seconds and skips message sizes that do
    not fit into this time. A link with a long latency takes more time: its rate shows only in large
    messages, so the sizes grow until at least one operation shows the rate.
    """
    everyone = everyone or Everyone(device, axis)
    per_node = everyone.size // axis.size()
    operations = dict[str, Operation]()
    link = Link(axis)
    silence = 0.0
    if axis.size() > 1:
        zeros = partial(torch.zeros, dtype=torch.uint8, device=device)
        starts: dict[str, Start] = {
            "all-reduce": lambda n: link.all_reduce(zeros(n // 4, dtype=torch.float32)),
            "all-gather": lambda n: link.all_gather(zeros(n)),
            "all-to-all": lambda n: link.all_to_all(zeros(axis.size(), n // axis.size())),
        }
        share_s = budget_s / (len(starts) + 1)
        for name, start in starts.items():
            samples = _samples(link, start, everyone, share_s, bool(operations))
            operations[name] = fit_line(samples)
        operations = of_one_link(operations)
        if max(operation.latency_s for operation in operations.values()) > _NEAR_S:
            silence = _silence(starts["all-gather"], everyone)
    # on a throttled link all pairs of replicas have the same speed, so pairs are not measured
    pairs: Sequence[LinkSample] = ()
    if axis.size() > 2 and isinstance(axis, DeviceMesh):
        pairs = _pairs(axis, everyone)
    return AxisProfile(axis.size(), per_node, operations, pairs, silence)


def fit_line(samples: Sequence[Sample]) -> Operation:
    """Fits the line seconds = latency + 8 * bytes / rate to `samples`. The fit minimises the
    squared relative errors, with a latency >= 0.
    """
    x = torch.tensor([s.bytes_sent for s in samples], dtype=torch.float64)
    y = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    latency = 0.0
    slope = 0.0
    scale = y
    # divide each error by the fitted time: division by `y` would overweight short outliers
    for _ in range(4):
        weighted = torch.stack([1 / scale, x / scale], dim=1)
        found = torch.linalg.lstsq(weighted, (y / scale).view(-1, 1))
        latency, slope = found.solution.view(-1).tolist()
        if latency < 0 or slope <= 0:
            latency = max(0.0, float(y.min())) * (slope <= 0)
            slope = float((y / x).min())
        scale = latency + slope * x
    off = ((latency + slope * x) / y - 1).abs().max()
    return Operation(latency, 8 / slope, float(off), list(samples))


def of_one_link(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    """Improves the fitted lines (see `fit_line`) of operations that were measured only with small
    messages.

    The *leader* is the operation that was measured with the largest message of all. If the largest
    message of another operation has at most a quarter of this size, its line is fitted again, with
    one assumed sample. In this sample, a message of the leader's largest size takes the other
    operation's own latency plus the leader's transfer time.
    """
    furthest = max(operations.values(), key=lambda line: line.samples[-1].bytes_sent)
    largest = furthest.samples[-1].bytes_sent
    found = dict(operations)
    for name, line in operations.items():
        if 4 * line.samples[-1].bytes_sent <= largest:
            beyond = Sample(
                largest, line.latency_s + furthest.seconds(largest) - furthest.latency_s, 0.0
            )
            found[name] = replace(fit_line([*line.samples, beyond]), samples=line.samples)
    return found


def _samples(
    link: Link, start: Start, everyone: Everyone, budget_s: float, shown: bool
) -> list[Sample]:
    """Measures messages of growing size. Stops when `budget_s` is used up and a message was large
    enough to show the link's rate.

    All ranks agree on the last size, so that all measure the same sizes.
    """
    samples: list[Sample] = []
    size, largest = _SIZES
    start(size)()  # the first exchange opens connections, so it is not measured
    began = time.perf_counter()
    repeats = _REPEATS
    further = 16
    while size <= largest:
        if len(samples) > 1:
            left_s = budget_s - everyone.over([time.perf_counter() - began])[0]
            repeats = int(left_s / fit_line(samples).seconds(further * samples[-1].bytes_sent))
            # exceed the budget until a message is large enough to show the link's rate
            if shown and repeats < _FEWEST:
                break
            repeats = min(max(repeats, _FEWEST), _REPEATS)
        start(size)()  # this exchange is not measured: it widens TCP's congestion window
        sent_before = link.bytes_sent
        times = _timed(start, size, everyone, repeats)
        sent = (link.bytes_sent - sent_before) // repeats
        low, median, high = statistics.quantiles(times, n=4)
        spread = (high - low) / median
        # use the mean, not the median, because training also waits for delayed and resent packets
        samples.append(Sample(sent, statistics.fmean(times), spread, median, max(times)))
        longer = samples[-1].seconds / samples[0].seconds
        shown = shown or longer > _SHOWS
        further = 16
        if longer > _HINTS:
            further = 4
        size *= further
    return samples


def _timed(
    start: Start, size: int, everyone: Everyone, repeats: int, silent_s: float = 0.0
) -> list[float]:
    """Returns the seconds of each of `repeats` exchanges after a pause of `silent_s` seconds,
    averaged over ranks. Collective.

    A rank that starts the exchange late waits less. So only the average over ranks is the time that
    an exchange adds to a step.
    """
    times = []
    for _ in range(repeats):
        time.sleep(silent_s)
        everyone.barrier()
        began = time.perf_counter()
        start(size)()
        if everyone.device.type == "cuda":  # NCCL does not block the host, so wait for the GPU
            torch.cuda.synchronize(everyone.device)
        times.append(time.perf_counter() - began)
    return everyone.over(times, statistics.fmean)


def _silence(start: Start, everyone: Everyone) -> float:
    """Returns the additional seconds that a message of `SILENT_BYTES` bytes takes after a pause of
    `SILENT_S` seconds.

    Collective.
    """
    busy, silent = (
        statistics.median(_timed(start, SILENT_BYTES, everyone, _PAIR_REPEATS, silent_s))
        for silent_s in (0.0, SILENT_S)
    )
    return max(0.0, silent - busy)


def _pairs(axis: DeviceMesh, everyone: Everyone) -> list[LinkSample]:
    """Measures the link of each pair of replicas on the axis with a short and a long message. Both
    replicas of a pair send at the same time.

    The pairs are measured in the rounds of `_rounds`. In a round, a replica exchanges with at most
    one other replica.
    """
    replica = axis.get_local_rank()
    size = axis.size()
    ranks = dist.get_process_group_ranks(axis.get_group())
    samples: list[LinkSample] = []
    for pairs in _rounds(size):
        other = peer = None
        for pair in pairs:
            if replica in pair:
                other = sum(pair) - replica
                peer = ranks[other]
        # times of short, then of long messages; the lower-numbered replica of each pair stores them
        times = [0.0] * (2 * size)
        for i, nbytes in enumerate(_PAIR_SIZES):
            seconds = statistics.median(
                _both_ways(peer, nbytes, axis, everyone) for _ in range(_PAIR_REPEATS)
            )
            if other is not None:
                times[i * size + min(replica, other)] = seconds
        agreed = everyone.over(times)
        short = agreed[:size]
        long = agreed[size:]
        for a, b in pairs:
            # the difference of almost equal times is noise: use at least a tenth of the longer time
            seconds = max(long[a] - short[a], 0.1 * long[a])
            rate = 8 * (_PAIR_SIZES[1] - _PAIR_SIZES[0]) / seconds
            samples.append(LinkSample(a, b, short[a], rate))
    return sorted(samples, key=lambda pair: (pair.first, pair.second))


def _rounds(size: int) -> list[list[tuple[int, int]]]:
    """Divides all pairs of `size` replicas into rounds. Each replica is in at most one pair of a
    round (the circle method).

    >>> _rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    circle: list[int | None] = list(range(size))
    if size % 2:
        circle.append(None)
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        rounds.append(sorted((min(pair), max(pair)) for pair in both))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _both_ways(peer: int | None, nbytes: int, axis: DeviceMesh, everyone: Everyone) -> float:
    """Returns the seconds for sending `nbytes` bytes to `peer` while as many bytes arrive from
    `peer`. A rank without a peer only enters the barrier.
    """
    device = torch.device(axis.device_type)
    if dist.get_backend(axis.get_group()) == "gloo":  # gloo sends from host memory only
        device = torch.device("cpu")
    outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    incoming = torch.empty(nbytes, dtype=torch.uint8, device=device)
    everyone.barrier()
    began = time.perf_counter()
    if peer is not None:
        group = axis.get_group()
        operations = [
            dist.P2POp(dist.isend, outgoing, peer, group),
            dist.P2POp(dist.irecv, incoming, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - began
