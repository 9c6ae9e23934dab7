"""Exchanges of one collective: an all-reduce or an all-gather."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Coefficients, Received
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.form import WHOLE, MessageForm, SharedIndices, Sums
from detonation.core.codec.indices import narrow
from detonation.core.codec.precision import Float
from detonation.core.exchange.exchange import InFlight, negative_zeros, opened, played, sealed
from detonation.core.exchange.outgoing import Outgoing, form_of
from detonation.core.exchange.workspace import Workspace, workspace_for
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.header import DIGITS
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
        self._workspace = workspace_for(scheme, link) if guard.kernels is not None else Workspace()

    def start(self, step: int) -> InFlight:
        buffer = self._take("sum", self._rows * self._k + self._digits)
        if self._guard.kernels is None:  # which write all of the digits
            buffer[len(buffer) - self._digits :].zero_()
        return InFlight(step, buffer)

    def _take(self, name: Hashable, count: int) -> Tensor:
        """Memory for `count` numbers."""
        octets = self._workspace.take(name, (count * self._dtype.itemsize,), self._guard.usual.device)
        return octets.view(self._dtype)

    def form(self, flight: InFlight, first: int, rows: int) -> MessageForm | None:
        buffer, count = flight.message, rows * self._k
        assert isinstance(buffer, Tensor)
        if self._guard.kernels is None:
            return None
        if self._scheme.needs_own_update:  # the network adds into its buffer
            part = self._take(("own", first), count)
        elif first or rows == self._rows:
            part = buffer[first * self._k :][:count]
        else:  # with room for the digits, which leave with the first rows
            flight.last = self._take("last", count + self._digits)
            part = flight.last[:count]
        return MessageForm(part.view(torch.uint8).unsqueeze(0), 0, rows)

    def add(self, flight: InFlight, first: int, selected: Selected, read_own: bool) -> Tensor | None:
        # selected values [rows, k] fp32 -> [rows, k] fp32
        message, buffer = selected.message, flight.message
        assert isinstance(buffer, Tensor)
        flight.know(first, selected.indices)
        values = selected.values if message is None else message.values
        flight.waiting.append((first, len(values)))
        if message is not None and not self._scheme.needs_own_update:  # an engine has written them where they leave
            return None
        part = buffer[first * self._k : first * self._k + values.numel()].view_as(values)
        part.copy_(values)
        return part.to(torch.float32, copy=True) if read_own else None  # the network is about to add into the buffer

    def send(self, flight: InFlight, status: int | Tensor | None) -> None:
        buffer = flight.message
        assert isinstance(buffer, Tensor)
        first, rows = min(flight.waiting)[0], sum(rows for _, rows in flight.waiting)
        flight.waiting.clear()
        run = buffer[first * self._k : (first + rows) * self._k]
        if status is not None:
            whole = buffer if flight.last is None else flight.last
            digits = whole[len(whole) - self._digits :]
            self._guard.seal_sum(digits, status, flight.step)
            run = whole if rows == self._rows or flight.last is not None else torch.cat([run, digits])
        flight.sums.append((first, rows, self._link.all_reduce(run)))

    def forward(self, flight: InFlight) -> None:
        pass

    def receive(self, flight: InFlight) -> Received:
        totals = [(first, rows, self._of_all(wait(), rows)) for first, rows, wait in flight.sums]
        digits, elastic = totals[-1][2][totals[-1][1] * self._k :], self._link.elastic
        absent = elastic.absent if elastic else ()
        if self._link.tape and self._link.tape.plays:
            absent = range(self._link.replicas)  # the tape does not say who was
        elif self._link.tape:
            values = [total[: rows * self._k] for _, rows, total in sorted(totals, key=lambda run: run[0])]
            whole = totals[0][2] if len(totals) == 1 else torch.cat([*values, digits])
            self._link.tape.put(self._guard.place, flight.step, whole)
        ordered = sorted(totals, key=lambda run: run[0])
        runs = {first: total[: rows * self._k].view(rows, self._k) for first, rows, total in ordered}
        shared, replicas, source = flight.indices(), self._link.replicas, None
        if self._guard.kernels is not None:
            report = self._workspace.take("report", (4 * (1 + len(digits)),), digits.device).view(torch.float32)
            self._guard.inspect_sum(list(runs.values()), digits, flight.step, report, absent)
            source = Sums(list(runs.items()), report, replicas, shared)
        elif not self._guard.open_sum(list(runs.values()), digits, flight.step, absent):
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

    def play(self, flight: InFlight, tape: Tape) -> None:
        def take() -> Tensor:  # [rows * k + digits]
            return tape.take(self._guard.place, flight.step).to(self._guard.usual.device).view(self._dtype)

        flight.waiting.clear()
        flight.sums.append((0, self._rows, take))

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
        self._workspace = workspace_for(scheme, link)

    def start(self, step: int) -> InFlight:
        return InFlight(step, Outgoing(self._codec, 1, kernels=self._guard.kernels))

    def form(self, flight: InFlight, first: int, rows: int) -> MessageForm | None:
        zeros, device = self._zeros(flight.step), self._guard.usual.device
        return form_of(self._codec, rows, WHOLE, zeros, device, first, self._workspace)

    def _zeros(self, step: int) -> bool:
        return negative_zeros(self._scheme, step, self._link.replica, self._link.replicas)

    def add(self, flight: InFlight, first: int, selected: Selected, read_own: bool) -> Tensor | None:
        # selected values [rows, k] fp32 -> [rows, k] fp32
        assert isinstance(flight.message, Outgoing)
        rows = len(selected.values)
        (message,) = self._codec.encode(selected, negative_zeros=self._zeros(flight.step))
        flight.message.add(first, rows, message)
        if self._codec.selection.shared:
            flight.know(first, selected.indices)
        return self._codec.read(message, rows) if read_own else None

    def send(self, flight: InFlight, status: int | Tensor | None) -> None:
        assert isinstance(flight.message, Outgoing)
        octets = sealed(flight.message, self._guard, flight.step, status)
        flight.message.arriving.append(self._link.all_gather(octets.view(-1)))

    def forward(self, flight: InFlight) -> None:
        pass

    def receive(self, flight: InFlight) -> Received:
        aggregation, shared = self._scheme.aggregation, flight.indices()
        tape, workspace = self._link.tape, self._workspace
        arrived = opened(
            flight, self._codec, self._guard, self._rows, shared, aggregation, tape=tape, workspace=workspace
        )
        assert isinstance(flight.message, Outgoing)
        return arrived.received(aligned_rows(self._codec), flight.message.release)

    def play(self, flight: InFlight, tape: Tape) -> None:
        flight.message = played(tape, self._guard, self._codec, flight.step, self._link.replicas)

    def for_rows(self, first: int, rows: int, guard: Guard) -> "AllGather":
        return AllGather(self._scheme, self._codec, self._link, guard, rows)

    def state(self) -> dict[str, Tensor]:  # [1] fp32
        return {"usual_norm": self._guard.usual}
