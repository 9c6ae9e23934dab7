"""The message of one step: runs of rows that engines write, that collectives carry, and that are
joined again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from detonation.core.codec.codec import Codec
from detonation.core.codec.indices import Unpackable, narrow
from detonation.core.codec.message_rows import MessageRows, SharedIndices, joined
from detonation.core.integrity.header import HEADER_BYTES
from detonation.core.integrity.missing import Missing


@dataclass
class Message:
    """The messages of one collective stage of a step: one for all replicas, or one for each.

    The wire carries the bytes of one message with one header, however many collectives it takes:
    each carries a run of rows, and the last one begins with the header, which speaks of all.

    Args:
        waiting: The run that the next collective carries, if it has been made.
        sent: The runs of the collectives that were started, until the last one is sealed.
        rows: The first row of each of those, and its rows.
        arriving: Waits for what arrives in each of those, such as `[replicas, nbytes]` uint8.
        arrived: What has arrived in each, until it is released.
        shared: The indices of the rows from each row on, where all replicas know them.
        absent: Once all has arrived, the replicas whose messages did not arrive whole, because they
            were lost.
        recycle: Takes back receive buffers; None where nobody has a use for them.
        reply: Of a stage that owners answer, their answer.
        missing: The gradients that this replica lacks, if it does.
        played: Whether it comes from a `PlayedMessages`, which owns its memory.
    """

    step: int
    codec: Codec
    waiting: MessageRows | None = None
    sent: list[MessageRows] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    arriving: list[Callable[[], Tensor]] = field(default_factory=list)
    arrived: list[Tensor] = field(default_factory=list)
    shared: dict[int, Tensor | SharedIndices] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    recycle: Callable[[Tensor], None] | None = None
    reply: Message | None = None
    missing: Missing | None = None
    played: bool = False

    def know(self, first: int, indices: Tensor | Unpackable | None) -> None:
        """Keeps the indices of the rows of the flat from `first` on."""
        if indices is not None:
            self.shared[first] = indices if isinstance(indices, SharedIndices) else narrow(indices)

    @property
    def indices(self) -> Tensor | SharedIndices | None:
        """The indices of all rows of the flat, where all replicas know them."""  # [rows, k]
        if len(self.shared) < 2:
            return next(iter(self.shared.values()), None)
        found = [self.shared[first] for first in sorted(self.shared)]
        rules = [each for each in found if isinstance(each, SharedIndices)]
        if len(rules) == len(found):
            return rules[0].of_all(sum(each.rows for each in rules))
        return torch.cat([narrow(each) for each in found])

    def whole(self, end: int) -> Tensor:
        """The bytes that have arrived, put together; `end` of them without the padding, which
        becomes zeros.

        Shapes: -> `[messages of all replicas, end + padding]` uint8.
        """
        runs, arrived = list[Sequence[Tensor]](), self.arrived
        if len(arrived) == 1:
            octets = arrived[0]
            if octets.shape[1] % 8 == 0:  # torch reads numbers at their addresses alone
                octets[:, end:].zero_()
                return octets
            runs = [(octets[:, HEADER_BYTES:end],)]
        else:
            pairs = sorted(zip(self.rows, arrived, strict=True), key=lambda pair: pair[0])
            lengths = [list(self.codec.lengths[rows]) for (_, rows), _ in pairs]
            bodies = [each if rows[0] else each[:, HEADER_BYTES:] for rows, each in pairs]
            runs = [
                torch.split(body[:, : sum(some)], some, 1)
                for body, some in zip(bodies, lengths, strict=True)
            ]
            octets = pairs[0][1]
        whole = joined(runs, HEADER_BYTES, octets[:, :HEADER_BYTES])
        self.release()
        return whole

    def release(self) -> None:
        """Returns the receive buffers; what they hold must not be used afterwards."""
        if self.recycle:
            for each in self.arrived:
                self.recycle(each)
        self.arrived.clear()
