"""Runs: rows of messages in memory, as they travel; and what is known of them without their bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

from detonation.core.codec.indices import IndexCoding
from detonation.core.codec.precision import Float, numbers
from detonation.core.codec.selection import Selection
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.flat.layout import copy
from detonation.core.flat.owners import RowOwners

if TYPE_CHECKING:
    from torch import Tensor

    from detonation.core.codec.codec import Codec


@dataclass
class Workspace:
    """Buffers of messages, by name; new ones each time with a `depth` of 0.

    A message lies in its buffer until the collective that carries it has ended. The next one is
    encoded on the same stream, after that stream has waited for the collective; so there are as
    many buffers as messages may be in flight.

    Args:
        depth: The messages of one name that may be in flight together.
    """

    depth: int = 0
    _buffers: dict[Hashable, list[Tensor]] = field(default_factory=dict)

    def take(self, name: Hashable, shape: Sequence[int], device: torch.device) -> Tensor:
        """The buffer that was taken longest ago.

        Shapes: -> `shape` uint8, of any content.
        """
        if not self.depth:
            return torch.empty(*shape, dtype=torch.uint8, device=device)
        buffers = self._buffers.setdefault(name, [])
        oldest = buffers.pop(0) if len(buffers) == self.depth else None
        if oldest is None or oldest.shape != torch.Size(shape):
            oldest = torch.empty(*shape, dtype=torch.uint8, device=device)
        buffers.append(oldest)
        return oldest


@dataclass(frozen=True)
class MessageRows:
    """Consecutive rows of a message in memory, as they travel: every engine writes there.

    With owners it is the same rows of as many messages, one for each owner. The memory is taken
    when it is written.

    Args:
        codec: The precision, the coding of the indices, and with them the parts.
        first: The first row, of each message.
        room: The bytes of `octets` before the first part.
        owners: How rows of the flat are dealt to the messages; None for one message.
        negative_zeros: See `Precision.encode`.
        is_summed: Whether the network adds into this memory, once it is sent.
        whole: The run of which these are some rows.
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
        """The bytes of each message, without the room before them."""
        return sum(self.codec.lengths[self.rows])

    @cached_property
    def octets(self) -> Tensor:
        """The memory: the room for a header, the rows, and nothing or room for others.

        Shapes: -> `[messages, room + nbytes or more]` uint8.
        """
        return self.whole.octets if self.whole else self.allocate()

    @property
    def body(self) -> Tensor:
        """The bytes after the header.

        Shapes: -> `[messages, nbytes]` uint8.
        """
        return self.octets[:, self.room : self.room + self.nbytes]

    @cached_property
    def parts(self) -> Sequence[Tensor]:
        """The values, their statistics and the indices; see `Codec.lengths`.

        Shapes: -> `[messages, length]` uint8 each.
        """
        if self.whole:
            return self.codec.cut(self.whole.parts, self.first, self.first + self.rows)
        lengths = self.codec.lengths[self.rows]
        return torch.split(self.octets[:, self.room : self.room + sum(lengths)], list(lengths), 1)

    @property
    def padding(self) -> Tensor | None:
        """Of rows with a header, on an accelerator: what follows the last one up to the end of a
        line, where checksums read zeros.

        Shapes: -> `[messages, n]` uint8.
        """
        whole = self.whole or self
        is_end = bool(whole.room) and self.first + self.rows == whole.rows  # a sum has no header
        if not is_end or whole.octets.device.type == "cpu":
            return None
        return whole.octets[:, whole.room + whole.nbytes :]

    @cached_property
    def numbers(self) -> Tensor | None:
        """The values of one message as numbers, in place; None where they are codes, or dealt to
        several messages.

        Shapes: -> `[rows, k]` of the type of the precision.
        """
        precision = self.codec.precision
        if self.owners or not isinstance(precision, Float):
            return None
        if self.whole is None:
            end = self.room + self.codec.lengths[self.rows][0]
            return (
                self.octets[0, self.room : end]
                .view(precision.dtype)
                .view(self.rows, self.codec.selection.k)
            )
        return numbers(self.parts[0], precision.dtype).view(self.rows, self.codec.selection.k)

    def of_rows(self, first: int, rows: int) -> MessageRows:
        """The `rows` rows of the flat from row `first` on, of the run of a whole message."""
        owners = self.owners and self.owners.of_bucket(rows)
        begin, count = (first // owners.replicas, owners.owned) if owners else (first, rows)
        return (
            self
            if count == self.rows
            else replace(self, rows=count, first=begin, owners=owners, whole=self)
        )

    def copy(self) -> MessageRows:
        """The same rows in memory of their own."""
        return replace(self, allocate=self.body.clone, room=0, whole=None)


def joined(runs: Sequence[Sequence[Tensor]], room: int, header: Tensor | None = None) -> Tensor:
    """A header, and then part by part the bytes of all runs, and zeros up to whole lines of a
    checksum.

    Args:
        runs: The parts of each run, in the order of their rows.
        room: The bytes of the header, which are left free where it is None.

    Shapes: parts `[messages, length]`, header `[messages, room]` -> `[messages, room + nbytes +
    padding]` uint8, whose padding is zeros.
    """
    parts = [part for parts in zip(*runs, strict=True) for part in parts]
    lengths = [part.shape[1] for part in parts]
    nbytes = room + sum(lengths)
    width, device = -(-nbytes // LINE_BYTES) * LINE_BYTES, parts[0].device
    found = torch.empty(len(parts[0]), width, dtype=torch.uint8, device=device)
    padding = zero_byte(device).expand(len(found), width - nbytes)
    copy(torch.split(found, [room, *lengths, width - nbytes], 1), [header, *parts, padding])
    return found


@lru_cache(maxsize=8)
def zero_byte(device: torch.device) -> Tensor:
    """A zero on `device`, made once.

    Shapes: -> `[1, 1]` uint8.
    """
    return torch.zeros(1, 1, dtype=torch.uint8, device=device)


def indices_by_rule(
    selection: Selection, rows: int, step: int, seed: int, device: torch.device
) -> Tensor:
    """The indices of a selection that all replicas share: they depend on no coefficient.

    Shapes: -> `[rows, k]` int64.
    """
    like = torch.empty(1, selection.chunk, dtype=torch.float32, device=device)
    return selection.indices(like.expand(rows, -1), step, seed)


@dataclass(frozen=True)
class SharedIndices:
    """The indices that a shared selection sends of some rows at one step; computed on first use,
    and only once.

    Kernels compute them where they need them, and ask for `step` alone.
    """

    selection: Selection
    rows: int
    step: int
    seed: int
    device: torch.device

    @cached_property
    def unpacked(self) -> Tensor:
        """The indices.

        Shapes: -> `[rows, k]` of `IndexCoding.dtype`.
        """
        found = indices_by_rule(self.selection, self.rows, self.step, self.seed, self.device)
        return found.to(IndexCoding(self.selection.chunk, self.selection.k).dtype)

    def of_all(self, rows: int) -> SharedIndices:
        """The indices of all `rows` rows of the flat that these rows begin."""
        return replace(self, selection=self.selection.for_rows(0, rows), rows=rows)
