"""Indices: the encoding of the positions of a message's coefficients, in a size that is known in advance."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.compute.bitmap import bitmap_faults, mark, marked_indices, packed_faults
from detonation.core.compute.bitpack import pack_all, packed_bytes, unpack_all


@dataclass(frozen=True)
class IndexCoding:
    """The encoding of `k` strictly rising indices per row, each below `chunk`.

    Each index is a number of ceil(log2(chunk)) bits, or the row is a bitmap where that is smaller.
    """

    chunk: int
    k: int

    @cached_property
    def width(self) -> int:
        """Bits per index."""
        return (self.chunk - 1).bit_length()

    @cached_property
    def bitmap(self) -> bool:
        """True if a bitmap is smaller than packed numbers."""
        return self.chunk < self.k * self.width

    @property
    def dtype(self) -> torch.dtype:
        """The type of unpacked indices: uint8 where it holds them, else int64."""
        return torch.uint8 if self.width <= 8 else torch.int64

    def nbytes(self, rows: int) -> int:
        """Bytes of the indices of `rows` rows."""
        return packed_bytes(rows, self.chunk) if self.bitmap else packed_bytes(rows * self.k, self.width)

    def encode(self, indices: "Sequence[Tensor | PackedIndices]") -> list[Tensor]:
        """Encodes the indices of each message.

        Shapes: `[rows, k]` integer each -> `[nbytes]` uint8 each.
        """
        if all(isinstance(each, PackedIndices) for each in indices):
            return [each.encoded for each in indices if isinstance(each, PackedIndices)]
        sent = [narrow(each) for each in indices]
        if self.bitmap:
            return [mark(each.to(torch.int64), self.chunk) for each in sent]
        if not self.width:
            return [each.new_empty(0, dtype=torch.uint8) for each in sent]
        return pack_all([each.reshape(-1) for each in sent], self.width)

    def decode(self, encoded: Sequence[Tensor], rows: int, dtype: torch.dtype = torch.int64) -> list[Tensor]:
        """Decodes the indices of each message.

        Shapes: `[nbytes]` uint8 each -> `[rows, k]` of `dtype` each.
        """
        if self.bitmap:
            return [marked_indices(each, rows, self.k, self.chunk, dtype) for each in encoded]
        if not self.width:
            return [torch.zeros(rows, self.k, dtype=dtype, device=each.device) for each in encoded]
        return [line.view(rows, self.k) for line in unpack_all(encoded, rows * self.k, self.width, dtype)]

    def faults(self, packed: "Sequence[PackedIndices]") -> Tensor:
        """Checks that `encode` can produce each of `packed`.

        Shapes: -> `[messages]` int64: 0 without a fault, 1 for an index that is not below `chunk`, 2 for indices of a
        row that do not rise.
        """
        encoded, rows = [each.encoded for each in packed], packed[0].rows
        if self.bitmap:
            return bitmap_faults(encoded, rows, self.k, self.chunk)
        return packed_faults(encoded, rows, self.k, self.chunk, self.width, lambda i: packed[i].unpacked)


@dataclass(frozen=True)
class PackedIndices:
    """The encoded indices of `rows` rows; decoded on first use, and only once."""

    coding: IndexCoding
    encoded: Tensor  # [nbytes] uint8
    rows: int

    @cached_property
    def unpacked(self) -> Tensor:
        """The decoded indices.

        Shapes: -> `[rows, k]` uint8, or int64 where a row has more than 256 coefficients.
        """
        return self.coding.decode([self.encoded], self.rows, self.coding.dtype)[0]


def narrow(indices: Tensor | PackedIndices) -> Tensor:
    """`indices` as a tensor, in the integer type that they have.

    Shapes: -> `[rows, k]` integer.
    """
    return indices.unpacked if isinstance(indices, PackedIndices) else indices


def as_int64(indices: Sequence[Tensor | PackedIndices]) -> list[Tensor]:
    """`indices` of several messages as int64, the type that `torch.gather` needs.

    Shapes: -> `[rows, k]` int64 each.
    """
    packed = [each for each in indices if isinstance(each, PackedIndices) and "unpacked" not in vars(each)]
    if packed:
        coding, encoded = packed[0].coding, [each.encoded for each in packed]
        for each, unpacked in zip(packed, coding.decode(encoded, packed[0].rows, coding.dtype), strict=True):
            vars(each)["unpacked"] = unpacked  # where the cached property keeps it
    return [(each.unpacked if isinstance(each, PackedIndices) else each).to(torch.int64) for each in indices]
