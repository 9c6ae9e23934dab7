"""Predicted cost of one training step under a scheme, from sizes and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2, prod

from detonation.cluster.network.profile import SILENT_BYTES, SILENT_S, AxisProfile, Operation, Step
from detonation.core.flat.layout import Layout
from detonation.core.schemes import traffic
from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import GradientScheme, ParameterScheme, Scheme
from detonation.link_speed import LinkSpeed, hops

BACKWARD = 2 / 3
"""Share of forward and backward during which gradients become ready, one after another."""

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter shapes by name."""

_WINDOW, _TIMER_S = 14480, 0.2
"""Of TCP: the bytes that it sends at once after a long silence, and what its timer adds to a round
trip."""
_NOISE_S = 5e-3
"""What is expected to be shorter cannot be measured beside it."""


@dataclass(frozen=True)
class Network:
    """The network between `replicas` nodes of `shards` ranks.

    Args:
        operations: Time of each collective as one rank sees it while all ranks send: "all-reduce",
            "all-gather", "all-to-all".
        restart: The part of `restart_s` by which an exchange after a silence is longer; 0 where
            silence costs nothing.
    """

    replicas: int
    shards: int
    operations: Mapping[str, Operation]
    restart: float = 0.0

    @classmethod
    def of_axis(cls, measured: AxisProfile, shards: int) -> "Network":
        """The network that a probe has measured along the axis between nodes of `shards` ranks."""
        plain = cls(measured.size, shards, measured.operations)
        if not measured.silence_s:
            return plain
        expected = plain.restart_s((measured.size - 1) * SILENT_BYTES, SILENT_S)
        return replace(
            plain, restart=min(1.0, measured.silence_s / expected) if expected > _NOISE_S else 1.0
        )

    @classmethod
    def of_link_speed(cls, speed: LinkSpeed, replicas: int, shards: int) -> "Network":
        """A network whose nodes all have links of one speed; the ranks of a node share its link."""
        rate = speed.rate_bits_per_s / shards
        chains = {kind: hops(kind, replicas) for kind in ("all-reduce", "all-gather")} | {
            "all-to-all": 1
        }
        return cls(
            replicas,
            shards,
            {name: Operation(n * speed.latency_s, rate, 0.0) for name, n in chains.items()},
        )

    @property
    def rate_bits_per_s(self) -> float:
        """Rate per node of the slower of all-reduce and all-gather."""
        rates = [o.rate_bits_per_s for name, o in self.operations.items() if name != "all-to-all"]
        return self.shards * min(rates, default=float("inf"))

    def faster(self, times: float, later: float = 1.0) -> "Network":
        """The same network with all rates multiplied by `times`, and latencies by `later`."""
        operations = {
            name: replace(
                line, rate_bits_per_s=times * line.rate_bits_per_s, latency_s=later * line.latency_s
            )
            for name, line in self.operations.items()
        }
        return replace(self, operations=operations)

    def seconds(self, kind: traffic.CollectiveKind, nbytes: float, silent_s: float = 0.0) -> float:
        """Duration of an exchange in which each rank sends `nbytes`, `silent_s` after the one
        before."""
        if self.replicas == 1:
            return 0.0
        again = self.restart * self.restart_s(nbytes, silent_s) if self.restart else 0.0
        if kind == "owner":
            halves = (
                self.operations[stage].seconds(nbytes / 2) for stage in ("all-to-all", "all-gather")
            )
            return again + sum(halves)
        return again + self.operations[kind].seconds(nbytes)

    def restart_s(self, nbytes: float, silent_s: float) -> float:
        """Seconds that slow start adds to an exchange of `nbytes` after a silence.

        TCP halves its window with each period of its timer without data, down to `_WINDOW`, and
        doubles it with each round trip afterwards, until it holds the message or what is on the way
        at full rate.
        """
        one = self.operations["all-to-all"]
        round_trip, rate = (
            one.latency_s,
            one.rate_bits_per_s / 8,
        )  # gloo asks the receiver before it sends
        full = min(nbytes, rate * round_trip)
        periods = (silent_s + round_trip / 2) / (
            round_trip + _TIMER_S
        ) - 1  # the first one costs nothing
        doublings = min(periods, log2(max(full, 1.0) / _WINDOW))
        return (
            max(0.0, doublings * round_trip - full * (1 - 0.5**doublings) / rate)
            if doublings > 0
            else 0.0
        )


@dataclass(frozen=True)
class Work:
    """A training step without the network.

    Args:
        shards: Local parameter shapes on each rank of a node.
        compute_s: Seconds of forward and backward.
        steps: Seconds of the optimizer's step by scheme, as it is `spelled` or by its name; 0 for a
            missing scheme.
        overlap: Gradients are sent while backward still runs.
        accumulate: Equal micro-batches that `compute_s` is of; gradients are sent in the last one's
            backward.
        reports: Ranks agree on the loss of each step, as the trainer does (before a backward pass
            that sends, else during it), and the host waits until they agree on what owners have
            refused.
        on_accelerator: Gathered messages travel with padding, see `Scheme.aligned`.
    """

    shards: Sequence[Shapes]
    compute_s: float
    steps: Mapping[str, Step] = field(default_factory=dict)
    overlap: bool = True
    accumulate: int = 1
    reports: bool = False
    on_accelerator: bool = False

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Coordinates of each parameter over all shards, by name."""
        return {name: sum(prod(shapes[name]) for shapes in self.shards) for name in self.shards[0]}


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one step, averaged over a round.

    Args:
        compute_s: Seconds of forward and backward.
        step_s: Seconds of the optimizer's own work.
        exposed_s: Seconds of waiting for the network that backward does not hide.
        bytes_sent: By a node, over all its ranks.
        memory_bytes: State of replication and messages of one step, on the rank with the most rows.
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
    def waiting(self) -> float:
        """Share of the step that is spent waiting for the network."""
        return self.exposed_s / self.total_s

    @property
    def bytes_per_day(self) -> float:
        return self.bytes_sent * 86400 / self.total_s


def cost(scheme: Scheme, work: Work, network: Network) -> Cost:
    """Predicts the cost of one step under `scheme`.

    Raises:
        LargerThanDense: The scheme would send more than full synchronisation.
    """
    if scheme.signal == "nothing":
        return Cost(scheme, work.compute_s, _optimizer_s(scheme, work), 0.0, 0.0, 0)
    layouts = [scheme.codec.layout(shapes) for shapes in work.shards]
    largest = max(layouts, key=lambda layout: layout.rows)
    traffic.require_below_dense(scheme, largest, network.replicas)
    sends = scheme.aligned() if work.on_accelerator else scheme
    sent = (
        sum(_round_bytes(sends, layout, work, network.replicas) for layout in layouts)
        / scheme.round.every
    )
    step_s = _optimizer_s(scheme, work)
    agreeing = report_s(scheme, work, network) if work.reports else 0.0
    exposed = (
        agreeing + _exposed_s(sends, largest, work, step_s + agreeing, network) / scheme.round.every
    )
    return Cost(
        scheme,
        work.compute_s,
        step_s,
        exposed,
        sent,
        _memory_bytes(scheme, largest, network.replicas),
    )


_STATE_BYTES = {"SignSGD": 0, "SGD": 4, "SGD without momentum": 0, "Muon": 4}
"""Of an optimizer's fp32 state, per parameter; of others as of Adam."""


def close_bytes(scheme: Scheme, optimizer: str, parameters: int, replicas: int) -> float:
    """Bytes that a node sends more per step where replicas are kept close: of a thousandth of their
    agreed state."""
    if scheme.signal == "nothing":
        return 0.0
    state = (
        4 * (scheme.outer.momentum > 0)
        if isinstance(scheme, ParameterScheme)
        else _STATE_BYTES.get(optimizer, 8)
    )
    return (4 + state) * parameters / 1000 * 2 * (replicas - 1) / replicas


def _round_bytes(scheme: Scheme, layout: Layout, work: Work, replicas: int) -> int:
    if work.overlap and scheme.worth_overlapping:
        return traffic.overlapped_bytes(scheme, layout, replicas)
    return sum(
        traffic.message_bytes(scheme, part, replicas) for part in scheme.divide(layout, work.sizes)
    )


def _optimizer_s(scheme: Scheme, work: Work) -> float:
    """Seconds per step of the optimizer's own work, averaged over steps with and without an
    exchange."""
    step = work.steps.get(spelled(scheme), work.steps.get(scheme.name))
    if step is None:
        return 0.0
    exchanging = min(1.0, scheme.fragments / scheme.round.every)
    return step.exchange_s * exchanging + step.local_s * (1 - exchanging)


def report_s(scheme: Scheme, work: Work, network: Network) -> float:
    """Seconds per step in which ranks wait for each other's losses."""
    hidden = 0.0 if scheme.worth_overlapping else BACKWARD * work.compute_s / work.accumulate
    return max(0.0, network.seconds("all-gather", 0) - hidden)


def _exposed_s(
    scheme: Scheme, layout: Layout, work: Work, step_s: float, network: Network
) -> float:
    """Seconds per round in which a rank waits for messages; `step_s` is the part of a step beside
    its compute."""
    waits = 0.0
    silent = scheme.round.every / scheme.fragments * (work.compute_s + step_s)
    for fragment in scheme.divide(layout, work.sizes):
        kind = traffic.collective_for(scheme, fragment, network.replicas)
        nbytes = traffic.message_bytes(scheme, fragment, network.replicas)
        if (
            kind == "owner" and work.reports
        ):  # afterwards all hear whether an owner refused a message
            waits += network.seconds("all-gather", 0)
        if scheme.round.delay:
            latency = network.seconds(kind, 0)
            waits += _delayed_wait_s(
                scheme, network.seconds(kind, nbytes, silent), latency, work.compute_s + step_s
            )
        elif work.overlap and scheme.worth_overlapping:
            latency = network.seconds(kind, 0)
            # Buckets leave in the order of backward: the last layers' first.
            rows = [
                bucket.layout.rows
                for bucket in reversed(traffic.buckets_of(scheme, fragment, network.replicas))
            ]
            if (
                kind == "owner"
            ):  # whose answers leave at once after the last message, and nothing hides them
                sizes = [
                    traffic.stage_bytes(scheme.codec, count, network.replicas) for count in rows
                ]
                sending, answering = (
                    network.operations["all-to-all"],
                    network.operations["all-gather"],
                )
                latency = sending.latency_s
                answer = scheme.reply_codec(network.replicas)
                waits += answering.seconds(traffic.stage_bytes(answer, sum(rows), network.replicas))
                seconds = [sending.seconds(size) - latency for size in sizes]
            else:
                sizes = [
                    traffic.exchange_bytes(kind, scheme, count, network.replicas) for count in rows
                ]
                seconds = [network.seconds(kind, size) - latency for size in sizes]
            parts = [(count / sum(rows), one) for count, one in zip(rows, seconds, strict=True)]
            waits += latency + _overlapped_wait_s(parts, work.compute_s / work.accumulate)
            waits += network.seconds(kind, nbytes, silent) - network.seconds(kind, nbytes)
        else:
            waits += network.seconds(kind, nbytes, silent)
    return waits


def _delayed_wait_s(scheme: Scheme, transfer_s: float, latency_s: float, local_s: float) -> float:
    """Seconds of waiting for a message that has `delay` steps of `local_s` to arrive.

    In the long run a link takes messages no faster than it transfers them: the time between two is
    a bound, too.
    """
    between = scheme.round.every / scheme.fragments * local_s
    return max(0.0, transfer_s - scheme.round.delay * local_s, transfer_s - latency_s - between)


def _overlapped_wait_s(parts: Sequence[tuple[float, float]], compute_s: float) -> float:
    """Seconds from the end of backward until the last of `parts` is sent; each leaves when its
    gradients are ready.

    Args:
        parts: In sending order, the share of all gradients in each message, and the seconds that it
            takes.
        compute_s: Seconds of forward and backward of the micro-batch.

    Example:
        >>> _overlapped_wait_s([(1, 2.0)], 3.0), _overlapped_wait_s([(0.5, 1.0)] * 2, 3.0)
        (2.0, 1.0)
        >>> _overlapped_wait_s([(0.25, 0.1)] * 4, 3.0)
        0.1
    """
    sent = ready = 0.0
    for share, seconds in parts:
        ready += share
        sent = max(sent, compute_s * (1 - BACKWARD * (1 - ready))) + seconds
    return round(sent - compute_s, 12)


def _memory_bytes(scheme: Scheme, layout: Layout, replicas: int) -> int:
    """Bytes of state that replication holds between steps, plus the messages of one step."""
    flat = 4 * layout.rows * layout.chunk
    state = flat if scheme.feedback else 0
    if isinstance(scheme, ParameterScheme):
        state += flat * (1 + (scheme.outer.momentum > 0))
    collective = traffic.collective_for(scheme, layout, replicas)
    if collective == "owner":
        state += flat // replicas
    rows = layout.rows
    if scheme.divides_messages and not scheme.round.delay:  # two buckets are on their way
        rows = min(rows, 2 * traffic.buckets_of(scheme, layout, replicas)[0].layout.rows)
    elif isinstance(scheme, ParameterScheme):
        rows = -(-rows // scheme.fragments)
    in_flight = 1 + scheme.round.delay if isinstance(scheme, GradientScheme) else 1
    if collective == "owner":
        return state + in_flight * (
            scheme.codec.nbytes(rows) + scheme.reply_codec(replicas).nbytes(rows)
        )
    return state + in_flight * scheme.codec.nbytes(rows) * (
        replicas if collective == "all-gather" else 2
    )


def spelled(chosen: Scheme) -> str:
    """Writes a scheme with the arguments that differ from its defaults.

    Example:
        >>> spelled(scheme("demo", {"topk": 1, "chunk": 64}))
        'demo(topk=1)'
    """
    texts = {
        name: f"{x:.4g}" if isinstance(x, float) else str(x) for name, x in changed(chosen).items()
    }
    return f"{chosen.name}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def changed(chosen: Scheme) -> dict[str, object]:
    """The arguments that differ from the scheme's defaults.

    Example:
        >>> changed(scheme("demo", {"topk": 1, "chunk": 64}))
        {'topk': 1}
    """
    defaults = scheme(chosen.name, {}).arguments
    return {name: value for name, value in chosen.arguments.items() if value != defaults[name]}
