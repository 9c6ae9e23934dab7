"""The contract of all exchanges, and what they share: a message in flight, how it is sealed and how it is opened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, ClippedMean, MajorityVote, Received, WeightedMean
from detonation.core.codec.arrived import Arrived
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.form import WHOLE, MessageForm, SharedIndices
from detonation.core.codec.indices import Unpackable, narrow
from detonation.core.codec.zeros import zeros_are_negative
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.engine.coding import coding_of, places_of
from detonation.core.exchange.outgoing import Outgoing
from detonation.core.exchange.workspace import Workspace
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.header import HEADER_BYTES
from detonation.core.link.tape import Tape
from detonation.core.schemes.scheme import Scheme


@dataclass
class InFlight:
    """The message of one step, until it is received.

    Args:
        message: Of the stage that was started last; of an all-reduce its buffer, `[rows * k + 3 * replicas]`.
        shared: The indices of the rows from each row on, where all replicas know them; of each owner in a two-stage
            all-reduce.
    """

    step: int
    message: Outgoing | Tensor
    waiting: list[tuple[int, int]] = field(default_factory=list)  # of an all-reduce: runs that were not sent yet
    sums: list[tuple[int, int, Callable[[], Tensor]]] = field(default_factory=list)  # and those that were
    shared: dict[int, Tensor | SharedIndices] = field(default_factory=dict)
    last: Tensor | None = None  # of an all-reduce in several runs: the one that a kernel writes beside the digits

    def know(self, first: int, indices: Tensor | Unpackable | None) -> None:
        """Keeps the indices of the rows from `first` on."""
        if indices is not None:
            self.shared[first] = indices if isinstance(indices, SharedIndices) else narrow(indices)

    def indices(self) -> Tensor | SharedIndices | None:
        """The indices of all rows, where all replicas know them."""  # [..., rows, k]
        found = [self.shared[first] for first in sorted(self.shared)]
        rules = [each for each in found if isinstance(each, SharedIndices)]
        if rules and len(rules) == len(found):
            return rules[0].of_all(sum(each.rows for each in rules))
        return torch.cat([narrow(each) for each in found], -2) if len(found) > 1 else found[0] if found else None


class Exchange(Protocol):
    """Sends messages through one or two collectives. All replicas call its methods in the same order."""

    secluded: bool
    """True if a replica receives messages that the others do not see."""

    def start(self, step: int) -> InFlight:
        """The message of `step`, with nothing in it."""
        ...

    def form(self, flight: InFlight, first: int, rows: int) -> MessageForm | None:
        """The form in which an engine may write the encoded rows from `first` on; None to leave that to `add`."""
        ...

    def add(self, flight: InFlight, first: int, selected: Selected, read_own: bool) -> Tensor | None:
        """Encodes the selection of the rows from `first` on.

        Args:
            read_own: Whether the values as every receiver will decode them are needed, and returned.

        Shapes: selected values `[rows, k]` fp32 -> `[rows, k]` fp32.
        """
        ...

    def send(self, flight: InFlight, status: int | Tensor | None) -> None:
        """Starts a collective with all that was added since the last one.

        Args:
            status: See `Header`; None if more of this message follows.

        Shapes: `[]` int64 where only the device knows.
        """
        ...

    def forward(self, flight: InFlight) -> None:
        """Starts the second collective, if there is one; called for all flights before the first `receive`."""
        ...

    def receive(self, flight: InFlight) -> Received:
        """Waits for the messages that all replicas receive."""
        ...

    def play(self, flight: InFlight, tape: Tape) -> None:
        """Lets arrive what the tape has of this message, in the place of all collectives."""
        ...

    def for_rows(self, first: int, rows: int, guard: Guard) -> "Exchange":
        """The exchange of a bucket, `rows` rows from row `first` on, which shares the state."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The tensors that stay between steps, by name.

        Shapes: any.
        """
        ...


def negative_zeros(scheme: Scheme, step: int, replica: int = 0, replicas: int = 1) -> bool:
    """`zeros_are_negative` for the message that a replica, or the owner of a row, sends at `step`."""
    sending = step // (scheme.round.every * max(1, scheme.codec.selection.period))
    proportional = scheme.signal == "parameters"  # an outer SGD; of gradients the base optimizer may use the sign
    return zeros_are_negative(sending, replica, replicas, proportional or isinstance(scheme.aggregation, MajorityVote))


def sealed(outgoing: Outgoing, guard: Guard, step: int, status: int | Tensor | None, phase: int = 0) -> Tensor:
    """The bytes of the next collective, with a header if it is the last one of its message."""
    if status is None:
        return outgoing.next_run()
    runs = outgoing.last_runs()
    if runs is not None:
        nbytes = outgoing.codec.nbytes(sum(rows for _, rows in runs))
        parts = [row_run(guard, outgoing.codec, form.buffer, form.room, rows) for form, rows in runs]
        guard.seal_runs(parts, nbytes, step, status, phase)
        return next(form.buffer for form, _ in runs if form.room)
    whole, rest, nbytes = outgoing.last_run()
    guard.seal(whole, nbytes, step, status, phase)
    if rest is None:
        return whole[:, : HEADER_BYTES + nbytes]
    rest[:, :HEADER_BYTES] = whole[:, :HEADER_BYTES]
    return rest


def played(tape: Tape, guard: Guard, codec: Codec, step: int, replicas: int) -> Outgoing:
    """The message of `step` that the tape has, on the device of `guard`."""

    def take() -> Tensor:  # [replicas, 64 + nbytes] uint8
        return tape.take(guard.place, step).to(guard.usual.device).view(replicas, -1)

    return Outgoing(codec, 1, played=take, kernels=guard.kernels)


def opened(
    flight: InFlight,
    codec: Codec,
    guard: Guard,
    rows: int,
    shared: Tensor | SharedIndices | None,
    aggregation: Aggregation,
    phase: int = 0,
    signals: bool = True,
    tape: Tape | None = None,
    workspace: Workspace | None = None,
) -> Arrived:
    """Waits for one sealed message per replica, validates and counts them; zeros replace unusable ones.

    Args:
        rows: Of each message.
        shared: Their indices, where all replicas know them.
        phase, signals: See `Guard.seal` and `Expected`.
        tape: Takes in the messages, unless they come from it.
        workspace: Where messages in several runs are put together.
    """
    assert isinstance(flight.message, Outgoing)
    octets, runs, sealed = flight.message.wait(), flight.message.runs, None
    absent, nbytes = flight.message.absent, codec.nbytes(rows)
    if guard.kernels is None or absent or tape is not None:
        sealed, _ = flight.message.whole(octets)
        octets, runs = [sealed[:, : HEADER_BYTES + nbytes]], [(0, rows)]
    if tape is not None and not tape.plays:
        for sender in absent:  # which a replay finds by its empty header
            octets[0][sender, :HEADER_BYTES] = 0
        tape.put(guard.place, flight.step, octets[0])
    if guard.kernels is not None and not absent:
        workspace = workspace or Workspace()
        body = inspected(codec, octets, runs, guard, workspace, flight.step, phase, signals)
        if isinstance(aggregation, ClippedMean):  # kernels know it as a mean with weights
            weights = workspace.take(("weights", phase), (4 * len(body),), body.device).view(torch.float32)
            guard.weigh(body, coding_of(guard.kernels, codec), places_of(guard.kernels, codec, rows, WHOLE), weights)
            aggregation = WeightedMean(weights)
        return codec.arrived(body, rows, shared, aggregation)
    assert sealed is not None
    arrived = codec.arrived(sealed[:, HEADER_BYTES : HEADER_BYTES + nbytes], rows, shared, aggregation)
    refused = guard.admit(sealed, nbytes, arrived.facts(), flight.step, phase, signals, absent)
    if absent and signals:  # the aggregate is that of the others; an owner that is absent leaves its rows as they are
        present = [sender for sender in range(len(sealed)) if sender not in absent]
        body = torch.nn.functional.pad(arrived.body[present], (0, -nbytes % 8))  # each at an address for any type
        arrived = codec.arrived(body[:, :nbytes], rows, shared, aggregation)
        refused = None if refused is None else refused[present]
    if refused is not None:
        if arrived.body.device.type == "cpu":  # simulated replicas receive one buffer together
            arrived = replace(arrived, body=arrived.body.clone())
        arrived.blank(refused)
    return arrived


def row_run(guard: Guard, codec: Codec, octets: Tensor, room: int, rows: int) -> Any:
    """A run of rows of messages, as kernels read it (`RowRun`)."""  # octets [messages, room + nbytes] uint8
    lengths = codec.precision.lengths(rows, codec.selection.k)
    values, statistics = lengths[0], sum(lengths[1:])
    return guard.kernels.RowRun(octets, room, rows, (values, statistics, codec.nbytes(rows) - values - statistics))


def inspected(
    codec: Codec,
    octets: Sequence[Tensor],
    runs: Sequence[tuple[int, int]],
    guard: Guard,
    workspace: Workspace,
    step: int,
    phase: int,
    signals: bool,
) -> Tensor:
    """The messages that arrived run by run, put together and inspected by kernels; zeros replace unusable ones.

    Args:
        runs: The first row of each run, and its rows.

    Shapes: octets `[replicas, bytes]` each -> `[replicas, nbytes]` uint8.
    """
    rows = sum(count for _, count in runs)
    nbytes, pairs = codec.nbytes(rows), sorted(zip(runs, octets, strict=True), key=lambda pair: pair[0])
    parts = [row_run(guard, codec, each, each.shape[1] - codec.nbytes(count), count) for (_, count), each in pairs]
    whole = octets[0]
    # the replicas of a simulation receive one buffer together, in which none may write
    if len(parts) > 1 or whole.device.type == "cpu" or not guard.kernels.is_aligned(whole, 16):
        width = -(-(HEADER_BYTES + nbytes) // LINE_BYTES) * LINE_BYTES
        whole = workspace.take(("whole", phase), (len(whole), width), whole.device)
    coding, places = coding_of(guard.kernels, codec), places_of(guard.kernels, codec, rows, WHOLE)
    guard.inspect(parts, whole, nbytes, coding, places, step, phase, signals)
    return whole[:, HEADER_BYTES : HEADER_BYTES + nbytes]
