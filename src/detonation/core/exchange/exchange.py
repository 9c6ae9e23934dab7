"""The interface of all exchanges, their common code, and the exchanges with one collective:
all-reduce and all-gather.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from detonation.core.codec import (
    Divided,
    Float,
    MajorityVote,
    MessageRows,
    Received,
    Sums,
    Workspace,
)
from detonation.core.integrity.guard import Guard, Stage
from detonation.core.integrity.message import DIGITS, HEADER_BYTES, Message
from detonation.core.integrity.observer import PlayedMessages
from detonation.core.link import Link
from detonation.core.schemes import Scheme, aligned_rows

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio

# allocates a tensor for the bytes of messages, from a shape and a `device`
empty_octets = partial(torch.empty, dtype=torch.uint8)


class Exchange(ABC):
    """Sends messages of at most `rows` rows, encoded by the scheme's codec, through one or two
    collectives, and receives the messages of all replicas.

    All replicas must call the methods of an exchange in the same order."""

    secluded = False
    """True if a replica receives messages that no other replica receives, and answers them in a
    second collective.
    """

    def __init__(self, scheme: Scheme, link: Link, guard: Guard, rows: int) -> None:
        self._scheme = scheme
        self._codec = scheme.codec
        self._link = link
        self._guard = guard
        self._rows = rows
        # number of steps between two messages with the same coordinates, for `zeros_are_negative`
        self._period = scheme.round.every * max(1, scheme.codec.selection.period)
        # argument `cancel` of `zeros_are_negative`: False for gradients, unless replicas vote
        self._cancel = scheme.signal == "parameters" or isinstance(scheme.aggregation, MajorityVote)
        # Gradients are sent at every step, so the buffers of their messages are kept for reuse.
        # Rounds end rarely, so the message buffers of rounds are freed after each exchange.
        # Under an elastic communicator, which may resend a message later, no buffer is reused.
        # A simulated communicator on a CPU shares the buffer of the sender, so no buffer is reused.
        kept = guard.on_kernels and scheme.signal == "gradients" and link.elastic is None
        self._workspace = Workspace(int(kept))
        # Takes back receive buffers for reuse.
        # None on an accelerator without kernels, because torch's allocator reuses buffers there.
        self.recycle: Callable[[Tensor], None] | None = None
        if guard.on_kernels or guard.usual.device.type == "cpu":
            self.recycle = link.recycle

    @abstractmethod
    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        """Returns the buffer (run) for `rows` rows of the message, from row `first` on. The engine
        writes encoded values into this buffer, which the next collective sends.

        The buffer that begins at row 0 is sent last, together with the header.
        """

    @abstractmethod
    def send(self, message: Message, status: int | Tensor | None) -> None:
        """Starts the collective that sends the buffer of the last call of `run`.

        Args:
            status: See `Header`; None if more buffers of this message follow.

        Shapes: status `[]` int64 if only the device knows the status.
        """

    def forward(self, message: Message) -> None:
        """Starts the second collective of this exchange, if there is a second one. Must be called
        for all messages in flight before the first call of `receive`.
        """
        return

    @abstractmethod
    def receive(self, message: Message) -> Received:
        """Waits for the messages of all replicas, and validates them."""

    @abstractmethod
    def play(self, message: Message, playback: PlayedMessages) -> None:
        """Makes `receive` return the messages of all replicas that the recorded run `playback`
        contains. No collective runs."""

    def for_rows(self, first: int, rows: int, guard: Guard) -> "Exchange":
        """Creates the exchange for messages of one bucket, which has `rows` rows from row `first`
        on. The new exchange shares the state of this exchange.
        """
        return type(self)(self._scheme, self._link, guard, rows)

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of this exchange that persist between steps, by name."""


def zeros_are_negative(
    sending: int, replica: int = 0, replicas: int = 1, cancel: bool = True
) -> bool:
    """True if a replica encodes zeros as negative numbers. The signs of zeros cancel over all
    replicas and all messages.

    One bit cannot encode zero: a coordinate that is zero decodes to plus or minus one magnitude,
    and would drift if this sign never changed. So the messages that contain this coordinate are
    counted, and messages 2 n and 2 n + 1 have opposite signs. Multiples of the golden ratio choose
    which message of such a pair is negative. Therefore the signs also cancel for a coordinate that
    is zero only in every second or third message.

    Args:
        sending: Number of earlier messages with the coordinate; number of all earlier messages if
            the selection has no period. The step number would not suffice: with an even period, a
            coordinate is sent only at even steps or only at odd steps.
        replica: From 0 to below `replicas`.
        cancel: Whether the signs of an even number of replicas cancel in each message. Use True for
            votes, which then tie, and if weights move in proportion to the update. Use False for
            optimizers that use only the sign of a mean: one sign then has the majority in each
            message, and the weights move back and forth. With True they would make a random walk:
            as magnitudes differ, the mean would be a small number with an arbitrary sign.

    Example:
        >>> [zeros_are_negative(sending) for sending in range(6)]
        [False, True, True, False, False, True]
        >>> [zeros_are_negative(0, replica, 4) for replica in range(4)]
        [False, True, False, True]
        >>> [zeros_are_negative(0, replica, 4, cancel=False) for replica in range(4)]
        [False, True, False, False]
    """
    opposed = replica % 2 == 1 and (cancel or replica < replicas - 1)
    return ((sending // 2 * _GOLDEN >> 63) + sending + opposed) % 2 == 1


def played(
    playback: PlayedMessages, guard: Guard, step: int, replicas: int
) -> Callable[[], Tensor]:
    """Returns a function that reads the messages of `step` from the recorded run `playback`, and
    copies them to the device of `guard`."""
    return lambda: (
        playback.take(guard.place, step).to(guard.usual.device).view(replicas, -1)
    )  # [replicas, 64 + nbytes]


class AllReduce(Exchange):
    """An exchange by all-reduce: the network adds the messages of all replicas. All messages
    contain the same coordinates, in a dtype that the network can add.
    """

    def __init__(self, scheme: Scheme, link: Link, guard: Guard, rows: int) -> None:
        super().__init__(scheme, link, guard, rows)
        assert isinstance(self._codec.precision, Float)
        self._dtype = self._codec.precision.dtype
        self._k = self._codec.selection.k
        self._digits = DIGITS * link.replicas

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        # the buffer that begins at row 0 also carries the status of each replica (status digits)
        nbytes = (rows * self._k + (0 if first else self._digits)) * self._dtype.itemsize
        new = partial(empty_octets, (1, nbytes), device=self._guard.usual.device)
        memory = partial(self._workspace.take, ("sum", first), nbytes, new)
        message.waiting = run = MessageRows(self._codec, rows, memory, first, is_summed=True)
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        run = message.waiting
        message.waiting = None
        assert run is not None
        message.rows.append((run.first, run.rows))
        values = run.octets[0].view(self._dtype)
        if status is not None:
            digits = values[run.rows * self._k :]
            self._guard.seal_sum(digits, status, message.step, message.missing)
        message.arriving.append(self._link.all_reduce(values))

    def receive(self, message: Message) -> Received:
        link = self._link
        runs = list[tuple[int, Tensor]]()
        for at, count in message.rows or [(0, self._rows)]:
            (total,), absent = link.wait([message.arriving.pop(0)])
            if lost := len(absent):
                # Scale the sum as if each absent replica had sent the mean of the present replicas.
                # Copy the sum first, because another simulated replica may still read this tensor.
                total = total.clone()
                total[: count * self._k] *= link.replicas / (link.replicas - lost)
            runs.append((at, total[: count * self._k].view(count, self._k)))
        digits = total[count * self._k :]  # the last collective also carries each replica's status
        runs.sort(key=itemgetter(0))
        if message.played:
            # the log does not record which replicas were absent, so any status may be missing
            absent = {*range(link.replicas)}
        elif link.observer:
            if len(runs) > 1:
                whole = torch.cat([*(run.view(-1) for _, run in runs), digits])
            else:
                whole = total
            link.observer.received(self._guard.place, message.step, whole)
        values = [run for _, run in runs]
        fine = self._guard.open_sum(values, digits, message.step, absent)
        if message.missing:
            self._guard.hear_sum(message.missing, digits, message.step, absent)
        if not isinstance(fine, Tensor) and not fine:
            runs = [(first, torch.zeros_like(run)) for first, run in runs]
        if isinstance(fine, Tensor):
            report = fine
        else:
            report = None
        return Sums(
            runs,
            self._rows,
            Divided(link.replicas),
            message.indices if message.shared else None,
            report,
        )

    def play(self, message: Message, playback: PlayedMessages) -> None:
        message.played = True

        def take() -> Tensor:  # [rows * k + digits]
            return (
                playback.take(self._guard.place, message.step)
                .to(self._guard.usual.device)
                .view(self._dtype)
            )

        message.arriving.append(take)

    # no state: an all-reduce cannot check the norms of single messages, and keeps no reference norm
    def state(self) -> dict[str, Tensor]:
        return {}


class AllGather(Exchange):
    """An exchange by all-gather: every replica receives the messages of all replicas."""

    def __init__(self, scheme: Scheme, link: Link, guard: Guard, rows: int) -> None:
        super().__init__(scheme, link, guard, rows)
        self._width = self._codec.width(rows, HEADER_BYTES)
        unit = aligned_rows(self._codec)
        self._stage = Stage(self._codec, rows, scheme.aggregation, unit, workspace=self._workspace)
        self._has_codes = not isinstance(self._codec.precision, Float)

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        if first:
            room = 0
        else:
            room = HEADER_BYTES
        # the buffer of a whole message has padding for the checksum, so sealing needs no copy
        shape = 1, self._width if rows == self._rows else self._codec.sent(rows, room)
        memory = partial(empty_octets, shape, device=self._guard.usual.device)
        new = partial(MessageRows, self._codec, rows, memory, first, room)
        if self._workspace.depth:  # reuses a run, which is a buffer with its views
            run = self._workspace.take(("run", first), rows, new)
        else:
            run = new()
        message.waiting = run
        if self._has_codes:
            run.negative_zeros = zeros_are_negative(
                message.step // self._period, self._link.replica, self._link.replicas, self._cancel
            )
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        octets = self._guard.seal(message, status)
        message.arriving.append(self._link.all_gather(octets[0]))

    def receive(self, message: Message) -> Received:
        message.arrived, message.absent = self._link.wait(message.arriving)
        if message.shared:
            shared = message.indices
        else:
            shared = None
        arrived = self._guard.open(message, self._stage, shared, self._link.observer)
        if not arrived.aggregation.rowwise:
            arrived.weigh()
        return arrived

    def play(self, message: Message, playback: PlayedMessages) -> None:
        message.played = True
        message.arriving.append(played(playback, self._guard, message.step, self._link.replicas))

    def state(self) -> dict[str, Tensor]:  # [1] fp32
        return {"usual_norm": self._guard.usual}
