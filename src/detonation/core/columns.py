"""Columns: which coefficients of each row a message tells of, in the fewest bytes of a size known beforehand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.bits import pack, packed_bytes, unpack
from detonation.kernels import native


@dataclass(frozen=True)
class Packed:
    """The columns of `rows` rows as they travel; as numbers only where somebody asks for them."""

    columns: "Columns"
    encoded: Tensor
    rows: int

    def numbers(self) -> Tensor:
        return self.columns.decode(self.encoded, self.rows)  # [rows, kept] int64


def numbers(columns: Tensor | Packed) -> Tensor:
    """`columns` as torch indexes by them."""  # [rows, kept] int64
    return columns.numbers() if isinstance(columns, Packed) else columns


@dataclass(frozen=True)
class Columns:
    """`kept` different columns, each below `chunk`, in every row.

    Each as a number of ceil(log2(chunk)) bits, or all as a bitmap of the row where that is smaller.
    """

    chunk: int
    kept: int

    @property
    def width(self) -> int:
        return (self.chunk - 1).bit_length()

    @property
    def bitmap(self) -> bool:
        return self.chunk < self.kept * self.width

    def nbytes(self, rows: int) -> int:
        return packed_bytes(rows, self.chunk) if self.bitmap else packed_bytes(rows * self.kept, self.width)

    def ordered(self, columns: Tensor) -> Tensor:
        """The columns in the order in which `decode` returns them."""  # [rows, kept] -> [rows, kept]
        return columns.sort(1).values if self.bitmap else columns

    def encode(self, columns: Tensor | Packed) -> Tensor:
        if isinstance(columns, Packed):
            return columns.encoded
        if self.bitmap:
            library = native.load_for(columns)
            if library:
                return library.mark(columns, self.chunk)
            marked = torch.zeros(len(columns), self.chunk, dtype=torch.uint8, device=columns.device)
            return pack(marked.scatter_(1, columns, 1).view(-1), 1)
        return pack(columns.reshape(-1), self.width) if self.width else columns.new_empty(0, dtype=torch.uint8)

    def decode(self, encoded: Tensor, rows: int) -> Tensor:  # -> [rows, kept] int64
        if self.bitmap:
            library = native.load_for(encoded)
            if library:
                return library.marked(encoded, rows, self.kept, self.chunk)
            marked = unpack(encoded, rows * self.chunk, 1).view(rows, self.chunk)
            return torch.nonzero_static(marked, size=rows * self.kept)[:, 1].view(rows, self.kept)
        if not self.width:
            return torch.zeros(rows, self.kept, dtype=torch.long, device=encoded.device)
        return unpack(encoded, rows * self.kept, self.width).view(rows, self.kept)

    def fault(self, encoded: Tensor, rows: int) -> Tensor:
        """Whether `encoded` could come from `encode`: 1 where a column is not below `chunk`, 2 where not all differ."""
        device = encoded.device  # [] int64
        library = native.load_for(encoded)
        if library and self.bitmap:
            return torch.tensor(library.check_bitmap(encoded, rows, self.kept, self.chunk))
        if library and self.width:
            return torch.tensor(library.check_columns(encoded, rows, self.kept, self.chunk, self.width))
        if self.bitmap:
            marked = unpack(encoded, rows * self.chunk, 1).view(rows, self.chunk).sum(1)
            return 2 * (marked != self.kept).any().to(torch.int64)
        columns = self.decode(encoded, rows).sort(1).values
        outside, twice = (columns >= self.chunk).any(), (columns.diff(dim=1) == 0).any()
        return torch.where(outside, 1, 2 * twice.to(torch.int64)).to(device)
