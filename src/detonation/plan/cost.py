"""Cost: what a training step takes, sends and keeps under a scheme, predicted from sizes and from what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from detonation.cluster.network.profile import Operation, Profile, Step
from detonation.core.flat.layout import Layout
from detonation.core.link.link_speed import Pace, hops
from detonation.core.schemes import traffic
from detonation.core.schemes.buckets import cut
from detonation.core.schemes.scheme import Scheme
from detonation.plan.spelling import spelled

BACKWARD = 2 / 3
"""The part of forward and backward during which gradients become ready, one after another."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Network:
    """What joins `replicas` nodes of `shards` ranks: the time of each operation, as one rank sees it when all talk."""

    replicas: int
    shards: int
    operations: Mapping[str, Operation]

    @classmethod
    def of_pace(cls, pace: Pace, replicas: int, shards: int) -> "Network":
        """Nodes joined by links of one pace, which their ranks share."""
        rate = pace.rate_bits_per_s / shards
        chains = {
            "all-reduce": hops("all-reduce", replicas),
            "all-gather": hops("all-gather", replicas),
            "all-to-all": 1,
        }
        return cls(replicas, shards, {name: Operation(n * pace.latency_s, rate, 0.0) for name, n in chains.items()})

    @classmethod
    def of_profile(cls, profile: Profile) -> "Network":
        """Nodes as they were measured."""
        return cls(profile.replicas, profile.shards, profile.axes["replicate"].operations)

    @property
    def rate_bits_per_s(self) -> float:
        """What a node can send, by the slowest of the operations that most schemes use."""
        used = [o.rate_bits_per_s for name, o in self.operations.items() if name != "all-to-all"]
        return self.shards * min(used, default=float("inf"))

    def faster(self, times: float) -> "Network":
        """The same with `times` the rate."""
        operations = {
            name: replace(operation, rate_bits_per_s=times * operation.rate_bits_per_s)
            for name, operation in self.operations.items()
        }
        return replace(self, operations=operations)

    def seconds(self, kind: traffic.Kind, nbytes: float) -> float:
        """How long an exchange takes in which each rank sends `nbytes`."""
        if self.replicas == 1:
            return 0.0
        if kind == "owner":
            return self.operations["all-to-all"].seconds(nbytes / 2) + self.operations["all-gather"].seconds(nbytes / 2)
        return self.operations[kind].seconds(nbytes)


@dataclass(frozen=True)
class Work:
    """A step of training without the network.

    shards: the local shapes of the parameters on each rank of a node. compute_s: forward and backward. steps: what the
    optimizer's step takes under a scheme as it is `spelled`, or else under one of its name; of one that is not there
    nothing is known, and 0 assumed. overlap: whether gradients leave while backward still runs.
    """

    shards: Sequence[Shapes]
    compute_s: float
    steps: Mapping[str, Step] = field(default_factory=dict)
    overlap: bool = True


@dataclass(frozen=True)
class Cost:
    """Of one step, on average over a round.

    compute_s: forward and backward; step_s: the optimizer's own work; exposed_s: waiting for the network.
    bytes_sent: by a node, all its ranks together. memory_bytes: what replication keeps on the rank that keeps most.
    """

    scheme: Scheme
    compute_s: float
    step_s: float
    exposed_s: float
    bytes_sent: float
    memory_bytes: int

    @cached_property
    def total_s(self) -> float:
        return self.compute_s + self.step_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """The part of the step in which nobody waits for the network."""
        return 1 - self.exposed_s / self.total_s

    @property
    def bytes_a_day(self) -> float:
        """What a node sends in a day of training."""
        return self.bytes_sent * 86400 / self.total_s


def cost(scheme: Scheme, work: Work, network: Network) -> Cost:
    """What `scheme` costs. Raises `LargerThanDense` where it would send more than full synchronisation."""
    if scheme.signal == "nothing":
        return Cost(scheme, work.compute_s, _own(scheme, work), 0.0, 0.0, 0)
    whole = [scheme.codec.layout(shapes) for shapes in work.shards]
    largest = max(whole, key=lambda layout: layout.rows)
    traffic.check(scheme, largest, network.replicas)
    sent = sum(_round_bytes(scheme, layout, work, network.replicas) for layout in whole) / scheme.round.every
    step_s = _own(scheme, work)
    exposed = _exposed(scheme, largest, work, step_s, network) / scheme.round.every
    return Cost(scheme, work.compute_s, step_s, exposed, sent, _memory(scheme, largest, network.replicas))


def _round_bytes(scheme: Scheme, layout: Layout, work: Work, replicas: int) -> int:
    if work.overlap and scheme.worth_overlapping:
        return traffic.overlapped_bytes(scheme, layout, replicas)
    fragments = [layout.fragment(i, scheme.fragments) for i in range(scheme.fragments)]
    return sum(traffic.message_bytes(scheme, fragment, replicas) for fragment in fragments)


def _own(scheme: Scheme, work: Work) -> float:
    """The optimizer's own work in a step, on average: with a message where there is one."""
    step = work.steps.get(spelled(scheme), work.steps.get(scheme.name))
    if step is None:
        return 0.0
    sending = min(1.0, scheme.fragments / scheme.round.every)
    return step.exchange_s * sending + step.local_s * (1 - sending)


def _exposed(scheme: Scheme, layout: Layout, work: Work, step_s: float, network: Network) -> float:
    """Seconds of a round in which a rank waits for messages."""
    waits = 0.0
    for i in range(scheme.fragments):
        fragment = layout.fragment(i, scheme.fragments)
        kind = traffic.kind(scheme, fragment.rows, network.replicas)
        nbytes = traffic.message_bytes(scheme, fragment, network.replicas)
        if scheme.round.delay:
            waits += _late(scheme, network.seconds(kind, nbytes), network.seconds(kind, 0), work.compute_s + step_s)
        elif work.overlap and scheme.worth_overlapping:
            latency = network.seconds(kind, 0)
            rows = [bucket.layout.rows for bucket in reversed(cut(fragment, scheme, network.replicas))]
            sent = [traffic.exchanged(kind, scheme.codec, count, network.replicas) for count in rows]
            parts = [(n / sum(rows), network.seconds(kind, b) - latency) for n, b in zip(rows, sent, strict=True)]
            waits += latency + _behind(parts, work.compute_s)
        else:
            waits += network.seconds(kind, nbytes)
    return waits


def _late(scheme: Scheme, whole_s: float, latency_s: float, local_s: float) -> float:
    """How long a message is waited for that has `delay` steps of `local_s` to arrive, and follows on the one before."""
    between = scheme.round.every / scheme.fragments * local_s
    return max(0.0, whole_s - scheme.round.delay * local_s, whole_s - latency_s - between)


def _behind(parts: Sequence[tuple[float, float]], compute_s: float) -> float:
    """How long after a backward pass the last of `parts` has left, each as soon as its gradients are made.

    parts: in the order in which they leave, the part of all gradients that each tells, and the seconds that it takes.

    >>> _behind([(1, 2.0)], 3.0), _behind([(0.5, 1.0)] * 2, 3.0), _behind([(0.25, 0.1)] * 4, 3.0)
    (2.0, 1.0, 0.1)
    """
    left = done = 0.0
    for part, seconds in parts:
        done += part
        left = max(left, compute_s * (1 - BACKWARD * (1 - done))) + seconds
    return round(left - compute_s, 12)


def _memory(scheme: Scheme, layout: Layout, replicas: int) -> int:
    """Bytes that replication keeps between steps, and the messages of one."""
    flat = 4 * layout.rows * layout.chunk
    kept = flat if scheme.feedback else 0
    if scheme.outer is not None:
        kept += flat * (1 + (scheme.outer.momentum > 0) + (scheme.round.delay > 0))
    else:
        kept += flat * scheme.round.delay * (1 + scheme.lookahead) + flat * scheme.lookahead
    kind = traffic.kind(scheme, layout.rows, replicas)
    if kind == "owner":
        kept += flat // replicas
    messages = scheme.codec.nbytes(layout.rows) * (replicas if kind == "all-gather" else 2)
    return kept + messages
