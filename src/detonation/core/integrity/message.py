"""The message of one step: engines write it in runs of rows, collectives send the runs, and the
receiver joins them."""

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

    A message may need several collectives. Each sends a run of rows; the last one begins with the
    header for all of them.

    Args:
        waiting: The run that the next collective sends, if it has been encoded.
        sent: Runs of the collectives that were started, until the last one is sealed.
        rows: First row and number of rows of each of these runs.
        arriving: For each of these runs, waits for the received bytes: `[replicas, nbytes]` uint8.
        arrived: The received bytes of each run, until they are released.
        shared: Indices that all replicas know, by the first row of the flat to which they belong.
        absent: Once all has arrived, the lost replicas whose messages are not complete.
        recycle: Takes back receive buffers; None if they are not reused.
        reply: The answer of the owners, for a stage that owners answer.
        missing: Missing gradients of this replica; None without any.
        played: True if it comes from a `PlayedMessages`, which owns its memory.
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
        """Stores the indices of rows from row `first` of the flat on."""
        if isinstance(indices, SharedIndices):
            self.shared[first] = indices
        elif indices is not None:
            self.shared[first] = narrow(indices)

    @property
    def indices(self) -> Tensor | SharedIndices | None:
        """The indices of all rows of the flat; None if only the message contains them.

        Shapes: -> `[rows, k]` integer.
        """
        if len(self.shared) < 2:
            return next(iter(self.shared.values()), None)
        found = [self.shared[first] for first in sorted(self.shared)]
        rules = [each for each in found if isinstance(each, SharedIndices)]
        if len(rules) == len(found):
            return rules[0].of_all(sum(each.rows for each in rules))
        return torch.cat([narrow(each) for each in found])

    def whole(self, end: int) -> Tensor:
        """Joins the received bytes: `end` bytes per message, followed by zero padding.

        Shapes: -> `[messages of all replicas, end + padding]` uint8.
        """
        runs: list[Sequence[Tensor]]
        arrived = self.arrived
        if len(arrived) == 1:
            octets = arrived[0]
            if octets.shape[1] % 8 == 0:  # every message is aligned for int64
                octets[:, end:].zero_()
                return octets
            runs = [(octets[:, HEADER_BYTES:end],)]
        else:
            pairs = sorted(zip(self.rows, arrived, strict=True), key=lambda pair: pair[0])
            octets = pairs[0][1]
            runs = []
            for (first, rows), body in pairs:
                if not first:
                    body = body[:, HEADER_BYTES:]
                lengths = list(self.codec.lengths[rows])
                runs.append(torch.split(body[:, : sum(lengths)], lengths, 1))
        whole = joined(runs, HEADER_BYTES, octets[:, :HEADER_BYTES])
        self.release()
        return whole

    def release(self) -> None:
        """Returns the receive buffers. Their content must not be used afterwards."""
        if self.recycle:
            for each in self.arrived:
                self.recycle(each)
        self.arrived.clear()
