"""The exchange of two collectives, through the owners of rows."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Coefficients, Mean, Received, aggregate
from detonation.core.codec.arrived import Arrived
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.form import WHOLE, MessageForm, SharedIndices
from detonation.core.codec.indices import narrow
from detonation.core.engine.accelerated import replying_engine
from detonation.core.engine.rows_at_once import Room, replied_at_once
from detonation.core.exchange.exchange import InFlight, negative_zeros, opened, played, sealed
from detonation.core.exchange.outgoing import Outgoing, form_of
from detonation.core.exchange.owners import RowOwners
from detonation.core.exchange.workspace import workspace_for
from detonation.core.integrity.guard import Guard
from detonation.core.link.link import Link
from detonation.core.link.tape import Tape
from detonation.core.runtime import Runtime
from detonation.core.schemes.scheme import Scheme


class TwoStage:
    """A two-stage all-reduce: each replica owns some of the rows, receives them from all, aggregates them, and sends
    the result to all.

    The bytes that a replica sends do not grow with the number of replicas. The result is selected and encoded again by
    the codec of the reply; the rest stays in the server residual of the owner and is sent later, so that nothing is
    lost (law 1) between the two stages.

    Args:
        residual: The server residual of the rows that this replica owns, `[owned, chunk]` fp32.
        room: The memory that an accelerator may take.
        runtime: Of the replica.
        first: The number of the first row among those of the whole flat.
    """

    secluded = True

    def __init__(
        self,
        scheme: Scheme,
        codec: Codec,
        link: Link,
        owners: RowOwners,
        residual: Tensor,
        guard: Guard,
        room: Room,
        runtime: Runtime,
        first: int = 0,
    ) -> None:
        self._scheme, self._codec, self._link, self._guard = scheme, codec, link, guard
        self._answer = scheme.reply_codec(link.replicas)
        self.owners, self.residual = owners, residual
        self.replica = link.replica  # the owner that this replica is, until the replicas are renumbered
        self._runtime, self._replier = runtime, None
        if guard.kernels is not None:
            mine = (self.replica, owners.replicas, owners.dealt.turns, owners.run, owners.owned, owners.rows)
            answer = replace(self._answer, selection=self._answer.selection.for_rows(first, owners.rows))
            self._replier = replying_engine(guard.kernels, answer, scheme.aggregation, residual, runtime, mine)
        self._workspace, self._answers = workspace_for(scheme, link), workspace_for(scheme, link)
        self._room, on_cpu = room, residual.device.type == "cpu"
        self._block = owners.owned if on_cpu else replied_at_once(codec, self._answer, link.replicas, room)

    def start(self, step: int) -> InFlight:
        return InFlight(step, Outgoing(self._codec, self._link.replicas, kernels=self._guard.kernels))

    def form(self, flight: InFlight, first: int, rows: int) -> MessageForm | None:
        if self._guard.kernels is None:
            return None
        replicas = self._link.replicas
        owners = RowOwners(rows, replicas, self.owners.run)
        zeros = negative_zeros(self._scheme, flight.step, self._link.replica, replicas)
        device = self.residual.device
        return form_of(self._codec, owners.owned, owners.dealt, zeros, device, first // replicas, self._workspace)

    def add(self, flight: InFlight, first: int, selected: Selected, read_own: bool) -> Tensor | None:
        # selected values [rows, k] fp32 -> [rows, k] fp32
        assert isinstance(flight.message, Outgoing)
        replicas, k = self._link.replicas, self._codec.selection.k
        owners = RowOwners(len(selected.values), replicas, self.owners.run)
        if selected.message is not None:  # an engine has dealt them already
            flight.message.add(first // replicas, owners.owned, selected.message)
            flight.know(first // replicas, selected.indices if self._codec.selection.shared else None)
            return None
        lines: list[tuple[Tensor, Tensor | None]] = [(selected.values, None)]
        if selected.indices is not None:  # padding is zeros, at valid indices
            sent = narrow(selected.indices)
            padding = torch.arange(k, dtype=sent.dtype, device=sent.device) if owners.missing else None
            lines.append((sent, padding))
        values, *dealt = owners.deal_each(lines)
        indices = dealt[0] if dealt else None
        zeros = negative_zeros(self._scheme, flight.step, self._link.replica, replicas)
        (message,) = self._codec.encode(Selected(values, indices, owned=True), negative_zeros=zeros)
        del values  # before those of the message are read
        flight.message.add(first // replicas, owners.owned, message)
        if self._codec.selection.shared:
            rule = selected.indices if isinstance(selected.indices, SharedIndices) else indices
            flight.know(first // replicas, rule)
        return owners.collect(self._codec.read(message, owners.owned)) if read_own else None

    def send(self, flight: InFlight, status: int | Tensor | None) -> None:
        assert isinstance(flight.message, Outgoing)
        octets = sealed(flight.message, self._guard, flight.step, status, phase=1).contiguous()
        flight.message.arriving.append(self._link.all_to_all(octets))

    def forward(self, flight: InFlight) -> None:
        owned, mine = self.owners.owned, self._shared(flight)
        if isinstance(mine, Tensor):
            mine = mine[self._link.replica]
        arrived = opened(
            flight, self._codec, self._guard, owned, mine, self._scheme.aggregation, 1, workspace=self._workspace
        )
        assert isinstance(flight.message, Outgoing)
        came, reply, first = flight.message, Outgoing(self._answer, 1, kernels=self._guard.kernels), 0
        received, zeros = arrived.received(self.owners.run), negative_zeros(self._scheme, flight.step)
        if self._replier is not None and self._replier.reads(received):
            form = form_of(self._answer, owned, WHOLE, zeros, self.residual.device, 0, self._answers)
            reply.add(0, owned, self._replier.reply(received, form, flight.step))
            came.release()
        else:
            for block in received.blocks(self._block):
                self._reply(reply, first, block, zeros)
                first += block.values.shape[1]
                del block  # before the next one is read
        flight.message = reply
        octets = sealed(reply, self._guard, flight.step, 0)
        reply.arriving.append(self._link.all_gather(octets.view(-1)))

    def _reply(self, reply: Outgoing, first: int, block: Coefficients, zeros: bool) -> None:
        """Adds to the reply the coefficients of the mean of the rows from `first` on; the rest stays here."""
        rows, chunk = block.values.shape[1], self._codec.selection.chunk
        residual = self.residual[first : first + rows]
        residual += aggregate(block, self._scheme.aggregation, chunk)
        selected = self._answer.pick(residual, block.indices if self._codec.selection.shared else None)
        (message,) = self._answer.encode(selected, negative_zeros=zeros)
        sent, indices = self._answer.read(message, rows), selected.indices
        if isinstance(indices, Tensor):  # no two of a row are equal
            residual.scatter_add_(1, indices, sent.neg())
        else:
            residual -= sent
        reply.add(first, rows, message)

    def receive(self, flight: InFlight) -> Received:
        owned = self.owners.owned
        tape, shared = self._link.tape, self._shared(flight)
        arrived = opened(
            flight, self._answer, self._guard, owned, shared, Mean(), signals=False, tape=tape, workspace=self._answers
        )
        unit, width = self.owners.run * self._link.replicas, self._answer.selection.k
        read, dealt = partial(self._collected, arrived), self.owners.dealt
        assert isinstance(flight.message, Outgoing)
        release = flight.message.release
        return Received(self.owners.rows, read, unit=unit, width=width, release=release, source=arrived, dealt=dealt)

    def _shared(self, flight: InFlight) -> Tensor | SharedIndices | None:
        """The indices that all replicas know: of all rows by their rule, or of those of each owner."""
        shared = flight.indices()
        if self._replier is not None or not isinstance(shared, SharedIndices):
            return shared
        padding = torch.arange(self._codec.selection.k, dtype=torch.int64, device=self.residual.device)
        return self.owners.deal(shared.unpacked, padding if self.owners.missing else None)  # [replicas, owned, k]

    def _collected(self, arrived: Arrived, first: int, end: int) -> Coefficients:
        """The replies of all owners about the rows from `first` to below `end`, as one message."""
        replicas = self._link.replicas
        owners = RowOwners(end - first, replicas, self.owners.run)
        of_each = first // replicas, first // replicas + owners.owned
        indices = arrived.indices(*of_each)
        unpacked = [] if indices is None else [narrow(indices)]  # before the values, beside which bitmaps would lie
        sent = [arrived.values(*of_each), *unpacked]
        values, *collected = (lines.unsqueeze(0) for lines in owners.collect_each(sent))
        return Coefficients(values, collected[0] if collected else None)

    def play(self, flight: InFlight, tape: Tape) -> None:
        flight.message = played(tape, self._guard, self._answer, flight.step, self._link.replicas)

    def for_rows(self, first: int, rows: int, guard: Guard) -> "TwoStage":
        owners = RowOwners(rows, self.owners.replicas, self.owners.run)
        start = first // owners.replicas
        residual = self.residual[start : start + owners.owned]
        return TwoStage(
            self._scheme, self._codec, self._link, owners, residual, guard, self._room, self._runtime, first
        )

    def state(self) -> dict[str, Tensor]:  # [owned, chunk] fp32 and [1] fp32
        return {"server_residual": self.residual, "usual_norm": self._guard.usual}
