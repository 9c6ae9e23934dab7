"""The contract of all exchanges, and what they share: how a message is sealed and how it is opened."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, ClippedMean, MajorityVote, Received, WeightedMean
from detonation.core.codec.arrived import Arrived
from detonation.core.codec.codec import Codec
from detonation.core.codec.message_rows import MessageRows, SharedIndices, row_run
from detonation.core.codec.zeros import zeros_are_negative
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.engine.coding import coding_of, places_of
from detonation.core.exchange.message import Message
from detonation.core.exchange.workspace import Workspace
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.header import HEADER_BYTES
from detonation.core.link.tape import Tape
from detonation.core.schemes.scheme import Scheme


class Exchange(Protocol):
    """Sends messages through one or two collectives. All replicas call its methods in the same order."""

    secluded: bool
    """True if a replica receives messages that the others do not see, and answers them in a second collective."""

    def start(self, step: int) -> Message:
        """The message of `step`, with nothing in it."""
        ...

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        """Where engines write the `rows` rows of the flat from row `first` on, which the next collective carries.

        The rows from 0 on leave last, with the header.
        """
        ...

    def send(self, message: Message, status: int | Tensor | None) -> None:
        """Starts a collective with the run that waits.

        Args:
            status: See `Header`; None if more of this message follows.

        Shapes: `[]` int64 where only the device knows.
        """
        ...

    def forward(self, message: Message) -> None:
        """Starts the second collective, where `secluded`; called for all messages before the first `receive`."""
        ...

    def receive(self, message: Message) -> Received:
        """Waits for the messages that all replicas receive."""
        ...

    def play(self, message: Message, tape: Tape) -> None:
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


def sealed(message: Message, guard: Guard, status: int | Tensor | None, phase: int = 0) -> Tensor:
    """The bytes of the next collective, with a header if it is the last one of its message."""
    run = message.leave()
    if status is not None:
        guard.seal(sorted(message.sent, key=attrgetter("first")), message.step, status, phase)
        message.sent.clear()  # the collectives hold what they still need
    return run.octets[:, : run.room + run.nbytes]


def played(tape: Tape, guard: Guard, step: int, replicas: int) -> Callable[[], Tensor]:
    """Takes the messages of `step` from the tape, to the device of `guard`."""
    return lambda: tape.take(guard.place, step).to(guard.usual.device).view(replicas, -1)  # [replicas, 64 + nbytes]


def opened(
    message: Message,
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
    codec, octets = message.codec, message.wait()
    absent, nbytes = message.absent, sum(codec.lengths[rows])
    runs = message.rows or [(0, rows)]
    if guard.kernels is None or absent or tape is not None:
        octets, runs = [message.whole(octets)], [(0, rows)]
    if tape is not None and not tape.plays:
        for sender in absent:  # which a replay finds by its empty header
            octets[0][sender, :HEADER_BYTES] = 0
        tape.put(guard.place, message.step, octets[0][:, : HEADER_BYTES + nbytes])
    if guard.kernels is not None and not absent:
        workspace = workspace or Workspace()
        body = inspected(codec, octets, runs, guard, workspace, message.step, phase, signals)
        if isinstance(aggregation, ClippedMean):  # kernels know it as a mean with weights
            weights = workspace.take(("weights", phase), (4 * len(body),), body.device).view(torch.float32)
            guard.weigh(body, coding_of(guard.kernels, codec), places_of(guard.kernels, codec, rows), weights)
            aggregation = WeightedMean(weights)
        return codec.arrived(body, rows, shared, aggregation)
    (whole,) = octets
    arrived = codec.arrived(whole[:, HEADER_BYTES : HEADER_BYTES + nbytes], rows, shared, aggregation)
    refused = guard.admit(whole, nbytes, arrived.facts(), message.step, phase, signals, absent)
    if absent and signals:  # the aggregate is that of the others; an owner that is absent leaves its rows as they are
        present = [sender for sender in range(len(whole)) if sender not in absent]
        arrived = codec.arrived(arrived.body[present], rows, shared, aggregation)
        refused = None if refused is None else refused[present]
    if refused is not None:
        if arrived.body.device.type == "cpu":  # simulated replicas receive one buffer together
            arrived = replace(arrived, body=arrived.body.clone())
        arrived.blank(refused)
    return arrived


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
    parts = [
        row_run(guard.kernels, codec, each, each.shape[1] - codec.nbytes(count), count) for (_, count), each in pairs
    ]
    whole = octets[0]
    # the replicas of a simulation receive one buffer together, in which none may write
    if len(parts) > 1 or whole.device.type == "cpu" or not guard.kernels.is_aligned(whole, 16):
        width = -(-(HEADER_BYTES + nbytes) // LINE_BYTES) * LINE_BYTES
        whole = workspace.take(("whole", phase), (len(whole), width), whole.device)
    coding, places = coding_of(guard.kernels, codec), places_of(guard.kernels, codec, rows)
    guard.inspect(parts, whole, nbytes, coding, places, step, phase, signals)
    return whole[:, HEADER_BYTES : HEADER_BYTES + nbytes]
