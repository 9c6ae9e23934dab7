"""The two-stage exchange: each replica is the owner of some rows. An owner aggregates the messages
of all replicas for these rows, and sends the aggregate to all replicas.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from detonation.core.codec import (
    Coefficients,
    Collected,
    Float,
    Mean,
    MessageRows,
    Received,
    aggregate,
    narrow,
)
from detonation.core.engine import ReferenceEngine, Room, replied_at_once
from detonation.core.exchange.exchange import Exchange, empty_octets, played, zeros_are_negative
from detonation.core.flat.rows import KeptRows, RowOwners
from detonation.core.integrity.guard import Guard, Stage
from detonation.core.integrity.message import HEADER_BYTES, Message
from detonation.core.integrity.observer import PlayedMessages
from detonation.core.link import Link
from detonation.core.schemes import Scheme


class TwoStage(Exchange):
    """A two-stage all-reduce: each replica owns a part of the rows, receives these rows from all
    replicas, aggregates the received rows, and sends the aggregate to all replicas.

    The bytes that a replica sends do not grow with the number of replicas. The owner encodes the
    aggregate again and sends only a part of it. The rest of the aggregate stays in the owner's
    residual and is sent later, so the second encoding loses nothing.

    Args:
        residual: The server residual of the rows that this replica owns, `[owned, chunk]` fp32.
        engine: The engine of this replica; it may provide a `replier` that computes the answers of
            an owner.
        first: The index of the first row in the whole flat.
    """

    secluded = True

    def __init__(
        self,
        scheme: Scheme,
        link: Link,
        owners: RowOwners,
        residual: Tensor,
        guard: Guard,
        room: Room,
        engine: ReferenceEngine,
        first: int = 0,
    ) -> None:
        super().__init__(scheme, link, guard, owners.rows)
        codec = scheme.codec
        self._answer = scheme.reply_codec(link.replicas)
        self._has_codes = not isinstance(codec.precision, Float)
        self.owners = owners
        self.residual = residual
        self.replica = (
            link.replica
        )  # index of this replica among the owners; does not change if replicas join or leave
        answer = replace(
            self._answer, selection=self._answer.selection.for_rows(first, owners.rows)
        )
        self._engine = engine
        self._replier = engine.replier(answer, scheme.aggregation, residual, owners, self.replica)
        self._widths = [each.width(owners.owned, HEADER_BYTES) for each in (codec, self._answer)]
        self._asked = Stage(
            codec, owners.owned, scheme.aggregation, owners.run, phase=1, workspace=self._workspace
        )
        self._answered = Stage(
            self._answer, owners.owned, Mean(), owners.run, signals=False, workspace=self._workspace
        )
        self._room = room
        on_cpu = residual.device.type == "cpu"
        if on_cpu:
            some = owners.owned
        else:
            some = replied_at_once(codec, self._answer, link.replicas, room)
        self._block = (
            -(-max(1, some) // owners.run) * owners.run
        )  # rows of a block: a multiple of `owners.run`, because messages can be cut only there

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        whole = rows == self._rows
        room = 0 if first else HEADER_BYTES
        if whole:
            owners = self.owners
        else:
            owners = self.owners.of_bucket(rows)
        # Without kernels, the buffer of a whole message has padding, so that sealing needs no copy.
        aligned = whole and not self._guard.on_kernels
        shape = (
            owners.replicas,
            self._widths[0] if aligned else self._codec.sent(owners.owned, room),
        )
        new = partial(empty_octets, shape, device=self.residual.device)
        memory = partial(self._workspace.take, ("run", first), shape, new)
        zeros = self._has_codes and zeros_are_negative(
            message.step // self._period, self._link.replica, owners.replicas, self._cancel
        )
        message.waiting = run = MessageRows(
            self._codec, owners.owned, memory, first // owners.replicas, room, owners, zeros
        )
        return run

    def send(self, message: Message, status: int | Tensor | None) -> None:
        octets = self._guard.seal(message, status, phase=1).contiguous()
        message.arriving.append(self._link.all_to_all(octets))

    def forward(self, message: Message) -> None:
        owned = self.owners.owned
        reply = self._reply_to(message)
        mine = reply.shared.get(0)
        if isinstance(mine, Tensor):
            mine = mine[self._link.replica]
        shape = (1, self._widths[1])
        message.arrived, message.absent = self._link.wait(message.arriving)
        received = self._guard.open(message, self._asked, mine)
        if message.missing:
            lines = message.missing.rows.unsqueeze(1)
            own = self.owners.deal(lines, lines.new_full((1,), -1))[self.replica]
            message.missing.kept.append(KeptRows(self.residual, own.view(-1)))
        new = partial(empty_octets, shape, device=self.residual.device)
        memory = partial(self._workspace.take, "reply", shape, new)
        zeros = zeros_are_negative(message.step // self._period)
        reply.waiting = run = MessageRows(
            self._answer, owned, memory, 0, HEADER_BYTES, negative_zeros=zeros
        )
        if self._replier is not None and self._replier.reads(received):
            self._replier.reply(received, run, message.step)
            message.release()
        else:
            for first in range(0, max(1, owned), self._block):
                rows = min(self._block, owned - first)
                self._reply(
                    received.read(first, first + rows),
                    run if rows == owned else run.of_rows(first, rows),
                )
        sent = self._guard.seal(reply, 0)
        reply.arriving.append(self._link.all_gather(sent[0]))

    def _reply(self, block: Coefficients, run: MessageRows) -> None:
        """Aggregates a block of owned rows, and writes the coefficients of the answer into the
        buffer `run`. The part of the aggregate that the answer does not hold stays in the owner's
        residual.
        """
        residual = self.residual[run.first : run.first + run.rows]
        residual += aggregate(block, self._scheme.aggregation, self._codec.selection.chunk)
        selected = self._answer.pick(
            residual, block.indices if self._codec.selection.shared else None
        )
        self._answer.write(selected, run)
        sent = self._answer.written(run)
        indices = selected.indices
        # the indices of a row are distinct, so each number of the residual changes at most once
        if isinstance(indices, Tensor):
            residual.scatter_add_(1, indices, sent.neg())
        else:
            residual -= sent

    def receive(self, message: Message) -> Received:
        reply = message.reply
        assert reply is not None
        reply.arrived, reply.absent = self._link.wait(reply.arriving)
        opened = self._guard.open(reply, self._answered, reply.shared.get(0), self._link.observer)
        return Collected(opened, self.owners)

    def _reply_to(self, message: Message) -> Message:
        """Creates the owner's reply to `message`, without content. Indices that all replicas know
        move from the message to the reply, grouped by the owner of each row."""
        message.reply = reply = Message(message.step, self._answer, recycle=self.recycle)
        reply.missing = message.missing
        if message.shared:
            shared = message.indices
        else:
            shared = None
        if isinstance(shared, Tensor) or (self._replier is None and shared is not None):
            padding = torch.arange(
                self._codec.selection.k, dtype=torch.int64, device=self.residual.device
            )
            shared = self.owners.deal(
                narrow(shared), padding if self.owners.missing else None
            )  # [replicas, owned, k]
        if shared is not None:
            message.shared = {}
            reply.shared = {0: shared}
        return reply

    def play(self, message: Message, playback: PlayedMessages) -> None:
        reply = self._reply_to(message)
        reply.played = True
        reply.arriving.append(played(playback, self._guard, message.step, self._link.replicas))

    def for_rows(self, first: int, rows: int, guard: Guard) -> "TwoStage":
        owners = self.owners.of_bucket(rows)
        start = first // owners.replicas
        residual = self.residual[start : start + owners.owned]
        return TwoStage(
            self._scheme, self._link, owners, residual, guard, self._room, self._engine, first
        )

    def state(self) -> dict[str, Tensor]:  # shapes of the two tensors: [owned, chunk] and [1], fp32
        return {"server_residual": self.residual, "usual_norm": self._guard.usual}
