"""The contract of all exchanges, what they share, and those of one collective: an all-reduce or an all-gather."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Coefficients, MajorityVote, Received
from detonation.core.codec.indices import narrow
from detonation.core.codec.message_rows import MessageRows, SharedIndices, Sums
from detonation.core.codec.precision import Float
from detonation.core.codec.zeros import zeros_are_negative
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.header import DIGITS, HEADER_BYTES
from detonation.core.integrity.message import Message, Tape, Workspace
from detonation.core.link.link import Link
from detonation.core.schemes.buckets import aligned_rows
from detonation.core.schemes.scheme import Scheme


class Exchange(Protocol):
    """Sends messages through one or two collectives. All replicas call its methods in the same order."""

    secluded: bool
    """True if a replica receives messages that the others do not see, and answers them in a second collective."""

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


def played(tape: Tape, guard: Guard, step: int, replicas: int) -> Callable[[], Tensor]:
    """Takes the messages of `step` from the tape, to the device of `guard`."""
    return lambda: tape.take(guard.place, step).to(guard.usual.device).view(replicas, -1)  # [replicas, 64 + nbytes]


def workspace_for(scheme: Scheme, link: Link, guard: Guard) -> Workspace:
    """The workspace of a channel.

    Gradients leave at every step. A round is rare, and its messages take memory only while they travel. A communicator
    that outlives replicas may send a message once more, long after it has arrived here; one of simulated replicas, on
    a CPU, hands a message itself to others, who may still read it.
    """
    kept = guard.on_kernels and scheme.signal == "gradients" and link.elastic is None
    return Workspace(scheme.round.delay + 1 if kept else 0)


@dataclass(frozen=True)
class Divided:
    """The mean of messages that the network has added up already."""

    replicas: int
    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:  # [1, rows, k] -> [rows, k]
        return values[0] / self.replicas


class OneStage:
    """What exchanges of one collective share: a message of `rows` rows at most, in the codec of the scheme."""

    secluded = False

    def __init__(self, scheme: Scheme, link: Link, guard: Guard, rows: int) -> None:
        self._scheme, self._codec, self._link, self._guard, self._rows = scheme, scheme.codec, link, guard, rows
        self._workspace = workspace_for(scheme, link, guard)

    def forward(self, message: Message) -> None:
        pass

    def for_rows(self, first: int, rows: int, guard: Guard) -> Self:
        return type(self)(self._scheme, self._link, guard, rows)


class AllReduce(OneStage):
    """The network adds the messages: all carry the same coordinates, in a type that can be added."""

    def __init__(self, scheme: Scheme, link: Link, guard: Guard, rows: int) -> None:
        super().__init__(scheme, link, guard, rows)
        assert isinstance(self._codec.precision, Float)
        self._dtype, self._k = self._codec.precision.dtype, self._codec.selection.k
        self._digits = DIGITS * link.replicas

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        # the digits of all replicas leave with the first rows
        nbytes = (rows * self._k + (0 if first else self._digits)) * self._dtype.itemsize
        memory = partial(torch.empty, 1, nbytes, dtype=torch.uint8, device=self._guard.usual.device)
        if self._guard.on_kernels:  # which allocate nothing
            memory = partial(self._workspace.take, ("sum", first), (1, nbytes), self._guard.usual.device)
        message.waiting = run = MessageRows(self._codec, rows, memory, first, is_summed=True)
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        run, message.waiting = message.waiting, None
        assert run is not None
        message.rows.append((run.first, run.rows))
        values = run.octets[0].view(self._dtype)
        if status is not None:
            self._guard.seal_sum(values[run.rows * self._k :], status, message.step)
        message.sums.append(self._link.all_reduce(values))

    def receive(self, message: Message) -> Received:
        rows = message.rows or [(0, self._rows)]
        elastic, totals = self._link.elastic, list[tuple[int, Tensor]]()
        for (at, count), wait in zip(rows, message.sums, strict=True):
            total = wait()
            if elastic and (lost := len(elastic.absent)):
                # as if they had sent the mean of the others; of a copy, as another replica may still need the sum
                total = total.clone()
                total[: count * self._k] *= self._link.replicas / (self._link.replicas - lost)
            totals.append((at, total))
        digits = totals[-1][1][rows[-1][1] * self._k :]
        absent = elastic.absent if elastic else ()
        if self._link.tape and self._link.tape.plays:
            absent = range(self._link.replicas)  # the tape does not say who was
        ordered = sorted(totals, key=itemgetter(0))
        counts = dict(rows)
        runs = {at: total[: counts[at] * self._k].view(counts[at], self._k) for at, total in ordered}
        if self._link.tape and not self._link.tape.plays:
            whole = torch.cat([*(run.view(-1) for run in runs.values()), digits]) if len(runs) > 1 else totals[0][1]
            self._link.tape.put(self._guard.place, message.step, whole)
        shared, replicas, source = message.indices if message.shared else None, self._link.replicas, None
        fine = self._guard.open_sum(list(runs.values()), digits, message.step, absent, self._workspace)
        if isinstance(fine, Tensor):
            source = Sums(list(runs.items()), fine, replicas, shared)
        elif not fine:
            runs = {first: torch.zeros_like(run) for first, run in runs.items()}
        read = partial(_read_sums, runs, shared, None if source is None else source.report)
        return Received(self._rows, read, Divided(replicas), source=source)

    def play(self, message: Message, tape: Tape) -> None:
        def take() -> Tensor:  # [rows * k + digits]
            return tape.take(self._guard.place, message.step).to(self._guard.usual.device).view(self._dtype)

        message.sums.append(take)

    def state(self) -> dict[str, Tensor]:  # none: a sum has no norm of each replica
        return {}


def _read_sums(
    runs: dict[int, Tensor], shared: Tensor | SharedIndices | None, report: Tensor | None, first: int, end: int
) -> Coefficients:
    """The sums of the rows from `first` to below `end`."""  # runs [rows, k] each; report as in `Sums`
    cut = [run[max(0, first - at) : max(0, end - at)] for at, run in runs.items()]
    parts = [part for part in cut if len(part)] or cut[:1]
    values = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.float32)
    if report is not None:
        values = values.masked_fill(report[0] == 0, 0.0)
    return Coefficients(values.unsqueeze(0), None if shared is None else narrow(shared)[first:end])


class AllGather(OneStage):
    """Every replica receives every message."""

    def __init__(self, scheme: Scheme, link: Link, guard: Guard, rows: int) -> None:
        super().__init__(scheme, link, guard, rows)
        self._unit, self._width = aligned_rows(self._codec), self._codec.width(rows, HEADER_BYTES)
        self._has_codes = not isinstance(self._codec.precision, Float)

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        room = 0 if first else HEADER_BYTES
        # a whole message is sealed where it lies
        shape = 1, self._width if rows == self._rows else room + self._codec.nbytes(rows)
        memory = partial(torch.empty, shape, dtype=torch.uint8, device=self._guard.usual.device)
        if self._guard.on_kernels:  # which allocate nothing
            memory = partial(self._workspace.take, ("run", first), shape, self._guard.usual.device)
        zeros = self._has_codes and negative_zeros(self._scheme, message.step, self._link.replica, self._link.replicas)
        message.waiting = run = MessageRows(self._codec, rows, memory, first, room, negative_zeros=zeros)
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        octets = self._guard.seal(message, status)
        message.arriving.append(self._link.all_gather(octets[0]))

    def receive(self, message: Message) -> Received:
        shared = message.indices if message.shared else None
        rule = self._scheme.aggregation
        arrived = self._guard.open(message, self._rows, shared, rule, tape=self._link.tape, workspace=self._workspace)
        return arrived.received(self._unit, message.release)

    def play(self, message: Message, tape: Tape) -> None:
        message.played = played(tape, self._guard, message.step, self._link.replicas)

    def state(self) -> dict[str, Tensor]:  # [1] fp32
        return {"usual_norm": self._guard.usual}
