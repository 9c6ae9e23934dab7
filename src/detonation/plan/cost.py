"""Predicts the cost of one training step with a scheme, from sizes and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2, prod

from detonation.cluster.network.profile import SILENT_BYTES, SILENT_S, AxisProfile, Operation, Step
from detonation.core.flat.layout import Layout
from detonation.core.schemes import ParameterScheme, Scheme, scheme, traffic
from detonation.link_speed import LinkSpeed

BACKWARD = 2 / 3
"""Share of backward in the time of forward and backward."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the parameters, by name."""

_WINDOW = 14480
_TIMER_S = 0.2
"""Properties of TCP: the bytes in its window after a long pause without data, and the seconds that
its timer adds to a round trip.
"""
_NOISE_S = 5e-3
"""If TCP needs less than this time (in seconds) to restart after a pause, the time cannot be
measured.
"""


@dataclass(frozen=True)
class Network:
    """The network between `replicas` nodes with `shards` ranks each.

    Args:
        operations: Latency and rate of "all-reduce", "all-gather" and "all-to-all" on one rank,
            while all ranks send.
        restart: Measured delay of an exchange after a pause, as a share of the predicted
            `restart_s`; 0 if a pause costs nothing.
    """

    replicas: int
    shards: int
    operations: Mapping[str, Operation]
    restart: float = 0.0

    @classmethod
    def of_axis(cls, measured: AxisProfile, shards: int) -> "Network":
        """Returns the network that `probe` measured on an axis, between nodes with `shards` ranks
        each.
        """
        plain = cls(measured.size, shards, measured.operations)
        if not measured.silence_s:
            return plain
        expected = plain.restart_s((measured.size - 1) * SILENT_BYTES, SILENT_S)
        restart = 1.0
        if expected > _NOISE_S:
            restart = min(1.0, measured.silence_s / expected)
        return replace(plain, restart=restart)

    @classmethod
    def of_link_speed(cls, speed: LinkSpeed, replicas: int, shards: int) -> "Network":
        """Returns a network of nodes with equal links. The ranks of a node share the link of this
        node.
        """
        rate = speed.rate_bits_per_s / shards
        operations = {
            kind: Operation(traffic.hops(kind, replicas) * speed.latency_s, rate, 0.0)
            for kind in ("all-reduce", "all-gather", "all-to-all")
        }
        return cls(replicas, shards, operations)

    @property
    def rate_bits_per_s(self) -> float:
        """Bits per second of a node in the slower of two collectives: all-reduce or all-gather."""
        rates = [o.rate_bits_per_s for name, o in self.operations.items() if name != "all-to-all"]
        return self.shards * min(rates, default=float("inf"))

    def faster(self, times: float) -> "Network":
        """Returns this network, with all rates multiplied by `times`."""
        operations = {
            name: replace(line, rate_bits_per_s=times * line.rate_bits_per_s)
            for name, line in self.operations.items()
        }
        return replace(self, operations=operations)

    def seconds(self, kind: traffic.CollectiveKind, nbytes: float, silent_s: float = 0.0) -> float:
        """Returns the duration of an exchange of `nbytes` per rank that begins `silent_s` after the
        previous exchange.
        """
        if self.replicas == 1:
            return 0.0
        restart_s = 0.0
        if self.restart:
            restart_s = self.restart * self.restart_s(nbytes, silent_s)
        if kind == "owner":
            sending = self.operations["all-to-all"].seconds(nbytes / 2)
            return restart_s + (sending + self.seconds("all-gather", nbytes / 2))
        return restart_s + self.latency_s(kind, nbytes) + self.transfer_s(kind, nbytes)

    def latency_s(self, kind: str, nbytes: float) -> float:
        """Returns the latency of an exchange of `nbytes` per rank: the seconds of the exchange
        without the transfer of the bytes.
        """
        one = self.operations["all-to-all"].latency_s
        latency = self.operations[kind].latency_s
        if kind == "all-gather" and traffic.is_sent_at_once(
            nbytes / (self.replicas - 1), self.replicas
        ):
            return min(latency, one)
        return latency

    def transfer_s(self, kind: str, nbytes: float) -> float:
        """Returns the seconds in which a rank sends `nbytes`, without latency."""
        if kind == "owner":
            return self.transfer_s("all-to-all", nbytes / 2) + self.transfer_s(
                "all-gather", nbytes / 2
            )
        return self.operations[kind].transfer_s(nbytes)

    def restart_s(self, nbytes: float, silent_s: float) -> float:
        """Returns the seconds that TCP's slow start adds to an exchange of `nbytes` after a pause
        of `silent_s` seconds.

        Without data, TCP halves its window in each period of its timer, down to `_WINDOW`. After
        the pause TCP doubles the window in each round trip. The doubling stops when the window
        holds the whole message, or all data in flight at the full rate.
        """
        one = self.operations["all-to-all"]
        # gloo asks the receiver before it sends, which takes a round trip
        round_trip = one.latency_s
        rate = one.rate_bits_per_s / 8
        full = min(nbytes, rate * round_trip)
        # minus 1, because a silent TCP connection keeps its window for the first period
        periods = (silent_s + round_trip / 2) / (round_trip + _TIMER_S) - 1
        doublings = min(periods, log2(max(full, 1.0) / _WINDOW))
        if doublings <= 0:
            return 0.0
        sent: float = full * (1 - 0.5**doublings)
        return max(0.0, doublings * round_trip - sent / rate)


@dataclass(frozen=True)
class Work:
    """The local work of a training step, without the network.

    Args:
        shards: Local parameter shapes on each rank of a node.
        compute_s: Seconds of forward and backward.
        steps: Seconds of the optimizer's step for each scheme, by the text of `spelled` or by the
            scheme's name. A missing scheme counts as 0.
        overlap: Send gradients during backward.
        accumulate: Number of equal micro-batches in `compute_s`; only the last backward sends.
        reports: Ranks exchange their losses in each step, as in `detonation train`: before the
            first message of backward, or after backward. Ranks then also exchange which messages
            owners refused.
        on_accelerator: Pad gathered messages, see `Scheme.aligned`.
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
        """Number of coordinates of each parameter, summed over all shards, by name."""
        return {name: sum(prod(shapes[name]) for shapes in self.shards) for name in self.shards[0]}


@dataclass(frozen=True)
class Cost:
    """The predicted cost of one step with a scheme, averaged over a round.

    Args:
        compute_s: Seconds of forward and backward.
        step_s: Seconds of the optimizer's own work.
        exposed_s: Seconds of waiting for the network that backward does not hide.
        bytes_sent: Bytes that all ranks of a node send.
        memory_bytes: Bytes of the replication state and of the messages of one step, on the rank
            with the most rows.
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
        """Share of a step for which a rank waits for the network."""
        return self.exposed_s / self.total_s

    @property
    def bytes_per_day(self) -> float:
        return self.bytes_sent * 86400 / self.total_s


def cost(scheme: Scheme, work: Work, network: Network) -> Cost:
    """Predicts the cost of one step with `scheme`.

    Raises:
        LargerThanDense: The scheme would send more than full synchronisation.
    """
    if scheme.signal == "nothing":
        return Cost(scheme, work.compute_s, _optimizer_s(scheme, work), 0.0, 0.0, 0)
    layouts = [scheme.codec.layout(shapes) for shapes in work.shards]
    largest = max(layouts, key=lambda layout: layout.rows)
    traffic.require_below_dense(scheme, largest, network.replicas)
    sends = scheme
    if work.on_accelerator:
        sends = scheme.aligned()
    every = scheme.round.every
    sent = sum(_round_bytes(sends, layout, work, network.replicas) for layout in layouts)
    step_s = _optimizer_s(scheme, work)
    agreeing = 0.0
    if work.reports:
        hidden = _before_sending_s(sends, largest, work, network.replicas)
        agreeing = max(0.0, report_s(scheme, work, network) - hidden)
    exposed = _exposed_s(sends, largest, work, step_s + agreeing, network)
    memory = _memory_bytes(scheme, largest, network.replicas)
    return Cost(scheme, work.compute_s, step_s, agreeing + exposed / every, sent / every, memory)


_STATE_BYTES = {"SignSGD": 0, "SGD": 4, "SGD without momentum": 0, "Muon": 4}
"""Bytes per parameter of an optimizer's fp32 state. Optimizers that are not listed, such as Adam,
need 8 bytes.
"""


def close_bytes(scheme: Scheme, optimizer: str, parameters: int, replicas: int) -> float:
    """Returns the bytes per step that a node sends to keep replicas almost equal, if their
    arithmetic differs. On average, replicas then copy a thousandth of the weights and optimizer
    state per step, by an all-reduce. Under a scheme with rounds, replicas copy parts of the anchor
    and the outer momentum instead.
    """
    if scheme.signal == "nothing":
        return 0.0
    if isinstance(scheme, ParameterScheme):
        state = 4 * (scheme.outer.momentum > 0)
    else:
        state = _STATE_BYTES.get(optimizer, 8)
    return (4 + state) * parameters / 1000 * 2 * (replicas - 1) / replicas


def _round_bytes(scheme: Scheme, layout: Layout, work: Work, replicas: int) -> int:
    if work.overlap and scheme.signal == "gradients":
        return traffic.overlapped_bytes(scheme, layout, replicas)
    return sum(
        traffic.message_bytes(scheme, part, replicas) for part in scheme.divide(layout, work.sizes)
    )


def _optimizer_s(scheme: Scheme, work: Work) -> float:
    """Returns the seconds of the optimizer's own work per step, averaged over steps with an
    exchange and steps without an exchange.
    """
    step = work.steps.get(spelled(scheme), work.steps.get(scheme.name))
    if step is None:
        return 0.0
    exchanging = min(1.0, scheme.fragments / scheme.round.every)
    return step.exchange_s * exchanging + step.local_s * (1 - exchanging)


def _before_sending_s(scheme: Scheme, layout: Layout, work: Work, replicas: int) -> float:
    """Returns the seconds of backward before the first bucket is sent."""
    if not (work.overlap and scheme.signal == "gradients"):
        return 0.0
    first = traffic.buckets_of(scheme, layout, replicas)[-1].layout.rows
    return first / max(1, layout.rows) * BACKWARD * work.compute_s / work.accumulate


def report_s(scheme: Scheme, work: Work, network: Network) -> float:
    """Returns the seconds per step for which ranks wait for the losses of all ranks. If backward
    overlaps with sending, backward begins only after these losses have arrived.
    """
    hidden = 0.0
    if scheme.signal != "gradients":
        hidden = BACKWARD * work.compute_s / work.accumulate
    return max(0.0, network.seconds("all-gather", 0) - hidden)


def _exposed_s(
    scheme: Scheme, layout: Layout, work: Work, step_s: float, network: Network
) -> float:
    """Returns the seconds per round for which a rank waits for messages. `step_s` is the duration
    of a step without forward and backward.
    """
    if network.replicas == 1:
        return 0.0
    waits = 0.0
    local_s = work.compute_s + step_s
    silent = scheme.round.every / scheme.fragments * local_s
    for fragment in scheme.divide(layout, work.sizes):
        kind = traffic.collective_for(scheme, fragment, network.replicas)
        nbytes = traffic.message_bytes(scheme, fragment, network.replicas)
        transfer_s = network.seconds(kind, nbytes, silent)
        # ranks also exchange which messages the owners (aggregating replicas) refused
        if kind == "owner" and work.reports:
            waits += network.seconds("all-gather", 0)
        if scheme.round.delay:
            latency = network.seconds(kind, nbytes) - network.transfer_s(kind, nbytes)
            waits += _delayed_wait_s(scheme, transfer_s, latency, local_s)
        elif work.overlap and scheme.signal == "gradients":
            # Buckets are sent in the order in which backward computes them: the last layers first.
            buckets = reversed(traffic.buckets_of(scheme, fragment, network.replicas))
            rows = [bucket.layout.rows for bucket in buckets]
            # The wait for the owners' answers is not hidden, because they answer after backward.
            if kind == "owner":
                answer = scheme.reply_codec(network.replicas)
                size = traffic.stage_bytes(answer, sum(rows), network.replicas)
                waits += network.seconds("all-gather", size)
            waits += _buckets_wait_s(scheme, kind, rows, work, network)
            waits += transfer_s - network.seconds(kind, nbytes)
        else:
            waits += transfer_s
    return waits


def _buckets_wait_s(
    scheme: Scheme,
    kind: traffic.CollectiveKind,
    rows: Sequence[int],
    work: Work,
    network: Network,
) -> float:
    """Returns the seconds from the end of backward until all buckets have arrived. `rows` holds the
    number of rows of each bucket.
    """
    if kind == "owner":
        sent: str = "all-to-all"
        sizes = [traffic.stage_bytes(scheme.codec, count, network.replicas) for count in rows]
    else:
        sent = kind
        sizes = [traffic.exchange_bytes(kind, scheme, count, network.replicas) for count in rows]
    latency = max(network.latency_s(sent, size) for size in sizes)
    seconds = [network.transfer_s(sent, size) for size in sizes]
    parts = [(count / sum(rows), one) for count, one in zip(rows, seconds, strict=True)]
    return latency + _overlapped_wait_s(parts, work.compute_s / work.accumulate)


def _delayed_wait_s(scheme: Scheme, transfer_s: float, latency_s: float, local_s: float) -> float:
    """Returns the seconds of waiting for a message that may arrive `delay` steps later, if a step
    takes `local_s` without this wait.

    The wait has two lower bounds: the message must arrive within `delay` steps, and the link must
    have transferred the message before the next message is sent.
    """
    between = scheme.round.every / scheme.fragments * local_s
    return max(0.0, transfer_s - scheme.round.delay * local_s, transfer_s - latency_s - between)


def _overlapped_wait_s(parts: Sequence[tuple[float, float]], compute_s: float) -> float:
    """Returns the seconds from the end of backward until the last message is sent.

    Each message is sent as soon as its gradients are available.

    Args:
        parts: Messages in sending order: share of all gradients, and seconds of the transfer.
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
        begin = compute_s * (1 - BACKWARD * (1 - ready))
        sent = max(sent, begin) + seconds
    return round(sent - compute_s, 12)


def _memory_bytes(scheme: Scheme, layout: Layout, replicas: int) -> int:
    """Returns the bytes of the replication state that is kept between steps, plus the bytes of the
    messages of one step.
    """
    flat = 4 * layout.rows * layout.chunk
    state = 0
    if scheme.feedback:
        state = flat
    if isinstance(scheme, ParameterScheme):
        state += flat * (1 + (scheme.outer.momentum > 0))
    collective = traffic.collective_for(scheme, layout, replicas)
    if collective == "owner":
        state += flat // replicas
    rows = layout.rows
    # two buckets are in flight at the same time
    if scheme.divides_messages and not scheme.round.delay:
        rows = min(rows, 2 * traffic.buckets_of(scheme, layout, replicas)[0].layout.rows)
    elif isinstance(scheme, ParameterScheme):
        rows = -(-rows // scheme.fragments)
    nbytes = scheme.codec.nbytes(rows)
    if collective == "owner":
        return state + nbytes + scheme.reply_codec(replicas).nbytes(rows)
    if collective == "all-gather":
        return state + nbytes * replicas
    return state + nbytes * 2


def spelled(chosen: Scheme) -> str:
    """Returns the text of a scheme, with the steps of its round and the arguments that differ from
    its defaults.

    The text names `every` also if it is the default, because bytes and losses depend on it most.

    Example:
        >>> spelled(scheme("demo", {"topk": 1, "chunk": 64}))
        'demo(topk=1)'
        >>> spelled(scheme("muloco", {"precision": "2bit"}))
        'muloco(every=30, precision=2bit)'
    """
    shown = changed(chosen)
    if chosen.round.every > 1:
        shown = {"every": chosen.round.every, **shown}
    texts = []
    for name, value in shown.items():
        if isinstance(value, float):
            texts.append(f"{name}={value:.4g}")
        else:
            texts.append(f"{name}={value}")
    return f"{chosen.name}({', '.join(texts)})"


def changed(chosen: Scheme) -> dict[str, object]:
    """Returns the arguments of a scheme that differ from its defaults.

    Example:
        >>> changed(scheme("demo", {"topk": 1, "chunk": 64}))
        {'topk': 1}
    """
    defaults = scheme(chosen.name, {}).arguments
    return {name: value for name, value in chosen.arguments.items() if value != defaults[name]}
