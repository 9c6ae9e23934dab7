"""Exchanges of one collective: an all-reduce or an all-gather."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Coefficients, Received
from detonation.core.codec.codec import Codec
from detonation.core.codec.indices import narrow
from detonation.core.codec.message_rows import MessageRows, SharedIndices, Sums
from detonation.core.codec.precision import Float
from detonation.core.exchange.exchange import negative_zeros, opened, played, sealed
from detonation.core.exchange.message import Message
from detonation.core.exchange.workspace import fresh, workspace_for
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.header import DIGITS, HEADER_BYTES
from detonation.core.link.link import Link
from detonation.core.link.tape import Tape
from detonation.core.schemes.buckets import aligned_rows
from detonation.core.schemes.scheme import Scheme


@dataclass(frozen=True)
class Divided:
    """The mean of messages that the network has added up already."""

    replicas: int
    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:  # [1, rows, k] -> [rows, k]
        return values[0] / self.replicas


class AllReduce:
    """The network adds the messages: all carry the same coordinates, in a type that can be added."""

    secluded = False

    def __init__(self, scheme: Scheme, codec: Codec, link: Link, guard: Guard, rows: int) -> None:
        assert isinstance(codec.precision, Float)
        self._scheme, self._codec, self._link, self._guard, self._rows = scheme, codec, link, guard, rows
        self._dtype, self._k, self._digits = codec.precision.dtype, codec.selection.k, DIGITS * link.replicas
        self._workspace, self._fresh = workspace_for(scheme, link, guard.kernels is not None), fresh(guard)

    def start(self, step: int) -> Message:
        return Message(step, self._codec, self._guard.kernels)

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        # the digits of all replicas leave with the first rows
        nbytes = (rows * self._k + (0 if first else self._digits)) * self._dtype.itemsize
        memory = self._fresh and partial(self._fresh, 1, nbytes)
        memory = memory or partial(self._workspace.take, ("sum", first), (1, nbytes), self._guard.usual.device)
        message.waiting = run = MessageRows(self._codec, rows, memory, first, is_summed=True)
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        run = message.leave()
        message.sent.clear()
        values = run.octets[0].view(self._dtype)
        if status is not None:
            digits = values[run.rows * self._k :]
            if self._guard.kernels is None:  # which write all of the digits
                digits.zero_()
            self._guard.seal_sum(digits, status, message.step)
        message.sums.append(self._link.all_reduce(values))

    def forward(self, message: Message) -> None:
        pass

    def receive(self, message: Message) -> Received:
        rows = message.rows or [(0, self._rows)]
        totals = [(at, self._of_all(wait(), count)) for (at, count), wait in zip(rows, message.sums, strict=True)]
        digits = totals[-1][1][rows[-1][1] * self._k :]
        elastic = self._link.elastic
        absent = elastic.absent if elastic else ()
        if self._link.tape and self._link.tape.plays:
            absent = range(self._link.replicas)  # the tape does not say who was
        ordered = sorted(totals, key=lambda run: run[0])
        counts = dict(rows)
        runs = {at: total[: counts[at] * self._k].view(counts[at], self._k) for at, total in ordered}
        if self._link.tape and not self._link.tape.plays:
            whole = torch.cat([*(run.view(-1) for run in runs.values()), digits]) if len(runs) > 1 else totals[0][1]
            self._link.tape.put(self._guard.place, message.step, whole)
        shared, replicas, source = message.indices, self._link.replicas, None
        if self._guard.kernels is not None:
            report = self._workspace.take("report", (4 * (1 + len(digits)),), digits.device).view(torch.float32)
            self._guard.inspect_sum(list(runs.values()), digits, message.step, report, absent)
            source = Sums(list(runs.items()), report, replicas, shared)
        elif not self._guard.open_sum(list(runs.values()), digits, message.step, absent):
            runs = {first: torch.zeros_like(run) for first, run in runs.items()}
        read = partial(_read_sums, runs, shared, None if source is None else source.report)
        return Received(self._rows, read, Divided(replicas), source=source)

    def _of_all(self, total: Tensor, rows: int) -> Tensor:
        """A sum of `rows` rows and digits, as if absent replicas had sent the mean of the others.

        The sum itself stays as it is: another replica may still need a copy.
        """
        if absent := len(self._link.absent):
            total = total.clone()
            total[: rows * self._k] *= self._link.replicas / (self._link.replicas - absent)
        return total

    def play(self, message: Message, tape: Tape) -> None:
        def take() -> Tensor:  # [rows * k + digits]
            return tape.take(self._guard.place, message.step).to(self._guard.usual.device).view(self._dtype)

        message.sums.append(take)

    def for_rows(self, first: int, rows: int, guard: Guard) -> "AllReduce":
        return AllReduce(self._scheme, self._codec, self._link, guard, rows)

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


class AllGather:
    """Every replica receives every message."""

    secluded = False

    def __init__(self, scheme: Scheme, codec: Codec, link: Link, guard: Guard, rows: int) -> None:
        self._scheme, self._codec, self._link, self._guard, self._rows = scheme, codec, link, guard, rows
        self._workspace, self._fresh = workspace_for(scheme, link, guard.kernels is not None), fresh(guard)
        self._unit, self._width = aligned_rows(codec), codec.width(rows, HEADER_BYTES)
        self._has_codes = not isinstance(codec.precision, Float)

    def start(self, step: int) -> Message:
        return Message(step, self._codec, self._guard.kernels)

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        room = 0 if first else HEADER_BYTES
        # a whole message is sealed where it lies
        shape = 1, self._width if rows == self._rows else room + self._codec.nbytes(rows)
        memory = self._fresh and partial(self._fresh, *shape)
        memory = memory or partial(self._workspace.take, ("run", first), shape, self._guard.usual.device)
        zeros = self._has_codes and negative_zeros(self._scheme, message.step, self._link.replica, self._link.replicas)
        message.waiting = run = MessageRows(self._codec, rows, memory, first, room, negative_zeros=zeros)
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        octets = sealed(message, self._guard, status)
        message.arriving.append(self._link.all_gather(octets[0]))

    def forward(self, message: Message) -> None:
        pass

    def receive(self, message: Message) -> Received:
        aggregation, tape, workspace = self._scheme.aggregation, self._link.tape, self._workspace
        shared = message.indices
        arrived = opened(message, self._guard, self._rows, shared, aggregation, tape=tape, workspace=workspace)
        return arrived.received(self._unit, message.release)

    def play(self, message: Message, tape: Tape) -> None:
        message.played = played(tape, self._guard, message.step, self._link.replicas)

    def for_rows(self, first: int, rows: int, guard: Guard) -> "AllGather":
        return AllGather(self._scheme, self._codec, self._link, guard, rows)

    def state(self) -> dict[str, Tensor]:  # [1] fp32
        return {"usual_norm": self._guard.usual}
