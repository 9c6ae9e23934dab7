"""Message rows: consecutive rows of messages in their wire format, and indices that receivers
compute themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from detonation.core.codec.indices import IndexCoding
from detonation.core.codec.precision import Float, numbers
from detonation.core.codec.selection import Selection
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.flat.layout import copy
from detonation.core.flat.rows import RowOwners

if TYPE_CHECKING:
    from torch import Tensor

    from detonation.core.codec.codec import Codec


T = TypeVar("T")


@dataclass
class Workspace:
    """Keeps the buffers of messages, and reuses them by name. With a `depth` of 0 no buffer is
    reused.

    A message stays in its buffer until its collective ends. The stream that encodes a message first
    waits for the collective of the previous message, so `depth` buffers of each name suffice.

    Args:
        depth: Number of messages with the same name that may be in flight at the same time.
    """

    depth: int = 0
    _kept: dict[Hashable, list[tuple[Hashable, Any]]] = field(default_factory=dict)

    def take(self, name: Hashable, size: Hashable, make: Callable[[], T]) -> T:
        """Returns a buffer with undefined content. If `depth` buffers of this `name` exist, and the
        least recently used of them has this `size`, returns that buffer; else a new buffer from
        `make`.
        """
        if not self.depth:
            return make()
        kept = self._kept.setdefault(name, [])
        oldest = None
        if len(kept) == self.depth:
            oldest = kept.pop(0)
        if oldest is None or oldest[0] != size:
            oldest = size, make()
        kept.append(oldest)
        found: T = oldest[1]
        return found


@dataclass(eq=False)
class MessageRows:
    """Consecutive rows of a message in their wire format (a run). Every engine writes the rows that
    it encodes into the buffer of a run.

    If rows have owners (replicas that aggregate them), a run holds the same rows of several
    messages, one message for each owner. The first write allocates the buffer.

    Args:
        codec: Precision and index coding, which define the parts.
        first: Index of the first row of each message.
        room: Free bytes of `octets` before the values, for the header of the message.
        owners: How rows of the flat are assigned to messages; None for one message.
        negative_zeros: See `Precision.encode`. The value may change at each step.
        is_summed: Whether an all-reduce overwrites this memory with the sum.
        whole: The run of all rows of the message; None if this run itself holds all rows.
    """

    codec: Codec
    rows: int
    allocate: Callable[[], Tensor]
    first: int = 0
    room: int = 0
    owners: RowOwners | None = None
    negative_zeros: bool = False
    is_summed: bool = False
    whole: MessageRows | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of each message, without the `room` bytes of its header."""
        return sum(self.codec.lengths[self.rows])

    @cached_property
    def octets(self) -> Tensor:
        """The whole buffer: bytes for a header, the rows of this run, and possibly other rows of
        the message.

        Shapes: -> `[messages, room + nbytes or more]` uint8.
        """
        if self.whole:
            return self.whole.octets
        return self.allocate()

    @property
    def body(self) -> Tensor:
        """The bytes of these rows in each message, without the header.

        Shapes: -> `[messages, nbytes]` uint8.
        """
        return self.octets[:, self.room : self.room + self.nbytes]

    @cached_property
    def parts(self) -> Sequence[Tensor]:
        """The parts of each message as views: the values, their statistics and the indices.
        `Codec.lengths` gives the size of each part.

        Shapes: -> `[messages, length]` uint8 each.
        """
        if self.whole:
            return self.codec.cut(self.whole.parts, self.first, self.first + self.rows)
        lengths = self.codec.lengths[self.rows]
        return torch.split(self.octets[:, self.room : self.room + sum(lengths)], list(lengths), 1)

    @property
    def padding(self) -> Tensor | None:
        """The bytes of the buffer after the last row of each message. The checksum counts these
        bytes as zeros.

        None on a CPU, for messages without a header, and if this run does not hold the last row of
        the message.

        Shapes: -> `[messages, n]` uint8.
        """
        whole = self.whole or self
        # a message for an all-reduce has no header, and so no padding
        is_end = bool(whole.room) and self.first + self.rows == whole.rows
        if not is_end or whole.octets.device.type == "cpu":
            return None
        return whole.octets[:, whole.room + whole.nbytes :]

    @cached_property
    def numbers(self) -> Tensor | None:
        """A view of the values of these rows as floating-point numbers. None if the values are sent
        as codes, or if the rows belong to several messages (`owners`).

        Shapes: -> `[rows, k]` of the type of the precision.
        """
        precision = self.codec.precision
        if self.owners or not isinstance(precision, Float):
            return None
        if self.whole is None:
            end = self.room + self.codec.lengths[self.rows][0]
            values = self.octets[0, self.room : end].view(precision.dtype)
        else:
            values = numbers(self.parts[0], precision.dtype)
        return values.view(self.rows, self.codec.selection.k)

    def of_rows(self, first: int, rows: int) -> MessageRows:
        """A run of `rows` rows from row `first` of the flat on, which shares this run's buffer.
        This run must hold a whole message.
        """
        owners = None
        if self.owners:
            owners = self.owners.of_bucket(rows)
            first //= owners.replicas
            rows = owners.owned
        if rows == self.rows:
            return self
        return replace(self, rows=rows, first=first, owners=owners, whole=self)

    def copy(self) -> MessageRows:
        """A copy of these rows in new memory."""
        return replace(self, allocate=self.body.clone, room=0, whole=None)


def joined(runs: Sequence[Sequence[Tensor]], room: int, header: Tensor | None = None) -> Tensor:
    """Joins a header and all runs (consecutive rows, see `MessageRows`) of a message. The header is
    followed by the values of all runs, then by all statistics, then by all indices. Zeros pad the
    message to a multiple of `LINE_BYTES`.

    Args:
        runs: Parts of each run, in the order of their rows.
        header: `[messages, room]` uint8; None leaves `room` bytes free.
        room: Bytes of the header.

    Shapes: parts `[messages, length]` -> `[messages, room + nbytes + padding]` uint8.
    """
    parts = [part for parts in zip(*runs, strict=True) for part in parts]
    lengths = [part.shape[1] for part in parts]
    nbytes = room + sum(lengths)
    width = -(-nbytes // LINE_BYTES) * LINE_BYTES
    device = parts[0].device
    found = torch.empty(len(parts[0]), width, dtype=torch.uint8, device=device)
    padding = zero_byte(device).expand(len(found), width - nbytes)
    copy(torch.split(found, [room, *lengths, width - nbytes], 1), [header, *parts, padding])
    return found


@lru_cache(maxsize=8)
def zero_byte(device: torch.device) -> Tensor:
    """A zero on `device`, cached.

    Shapes: -> `[1, 1]` uint8.
    """
    return torch.zeros(1, 1, dtype=torch.uint8, device=device)


def indices_by_rule(
    selection: Selection, rows: int, step: int, seed: int, device: torch.device
) -> Tensor:
    """The indices that a shared selection chooses at `step`. They do not depend on the data.

    Shapes: -> `[rows, k]` int64.
    """
    like = torch.empty(1, selection.chunk, dtype=torch.float32, device=device)
    return selection.indices(like.expand(rows, -1), step, seed)


@dataclass(frozen=True)
class SharedIndices:
    """The indices of a shared selection for a range of rows at one step. They are computed once, on
    first use.

    Kernels compute these indices themselves and read only `step` from this object.
    """

    selection: Selection
    rows: int
    step: int
    seed: int
    device: torch.device

    @cached_property
    def unpacked(self) -> Tensor:
        """The indices as a tensor.

        Shapes: -> `[rows, k]` of `IndexCoding.dtype`.
        """
        found = indices_by_rule(self.selection, self.rows, self.step, self.seed, self.device)
        return found.to(IndexCoding(self.selection.chunk, self.selection.k).dtype)

    def of_all(self, rows: int) -> SharedIndices:
        """The indices of a whole flat of `rows` rows. The rows of this object must be the first
        rows of the flat."""
        return replace(self, selection=self.selection.for_rows(0, rows), rows=rows)
