"""Columns: which coefficients of each row a message tells of, in the fewest bytes of a size known beforehand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.bits import marks, pack, packed_bytes, unpack
from detonation.kernels import native

SOME = 2048
"""Rows that are looked at together, as many as stay in a cache."""


@dataclass(frozen=True)
class Packed:
    """The columns of `rows` rows as they travel; as numbers only where somebody asks for them."""

    columns: "Columns"
    encoded: Tensor
    rows: int

    def part(self, first: int, rows: int) -> "Packed":
        """Those of `rows` rows from row `first` on, a multiple of 8."""
        start, rows = self.columns.nbytes(first), min(rows, self.rows - first)
        return Packed(self.columns, self.encoded[start : start + self.columns.nbytes(rows)], rows)

    def parts(self) -> "list[Packed]":
        """All, some rows at a time."""
        return [self.part(first, 8 * SOME) for first in range(0, max(1, self.rows), 8 * SOME)]

    def numbers(self) -> Tensor:
        return self.columns.decode(self.encoded, self.rows)  # [rows, kept] int64


def numbers(columns: Tensor | Packed) -> Tensor:
    """`columns` as torch indexes by them."""  # [rows, kept] int64
    return columns.numbers() if isinstance(columns, Packed) else columns


def listed(marked: Tensor, kept: int) -> Tensor:
    """The first `kept` columns of every row that are marked, rising; 0 where there are fewer."""
    rows, chunk = marked.shape  # [rows, chunk] uint8 of 0 and 1 -> [rows, kept] int64
    small = torch.uint8 if chunk < 256 else torch.int32
    found = torch.empty(rows, kept, dtype=torch.int64, device=marked.device)
    numbers = torch.arange(chunk, dtype=small, device=marked.device).repeat(min(rows, SOME), 1)
    for some, columns in zip(torch.split(marked, SOME), torch.split(found, SOME), strict=True):
        # what is not wanted goes to a place before the first, or to one after the last: both are cut off
        place = some.cumsum(1, dtype=small).clamp_(max=min(kept + 1, chunk)).mul_(some).to(torch.int64)
        room = torch.zeros(len(some), kept + 2, dtype=small, device=marked.device)
        columns.copy_(room.scatter_(1, place, numbers[: len(some)])[:, 1:-1])
    return found


@dataclass(frozen=True)
class Columns:
    """`kept` different columns, each below `chunk` and above the one before, in every row.

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

    def encode(self, columns: Tensor | Packed) -> Tensor:
        if isinstance(columns, Packed):
            return columns.encoded
        if self.bitmap:
            columns = columns.to(torch.int64)
            library = native.load_for(columns)
            if library:
                return library.mark(columns, self.chunk)
            marked = torch.zeros(len(columns), self.chunk, dtype=torch.uint8, device=columns.device)
            return pack(marked.scatter_(1, columns, torch.ones_like(columns, dtype=torch.uint8)).view(-1), 1)
        return pack(columns.reshape(-1), self.width) if self.width else columns.new_empty(0, dtype=torch.uint8)

    def decode(self, encoded: Tensor, rows: int) -> Tensor:  # -> [rows, kept] int64
        if self.bitmap:
            library = native.load_for(encoded)
            if library:
                return library.marked(encoded, rows, self.kept, self.chunk)
            return listed(marks(encoded, rows * self.chunk).view(rows, self.chunk), self.kept)
        if not self.width:
            return torch.zeros(rows, self.kept, dtype=torch.long, device=encoded.device)
        return unpack(encoded, rows * self.kept, self.width).view(rows, self.kept)

    def fault(self, encoded: Tensor, rows: int) -> Tensor:
        """Whether `encoded` could come from `encode`: 1 where a column is not below `chunk`, 2 where some fall."""
        library = native.load_for(encoded)  # -> [] int64
        if library and self.bitmap:
            return torch.tensor(library.check_bitmap(encoded, rows, self.kept, self.chunk))
        if library and self.width:
            return torch.tensor(library.check_columns(encoded, rows, self.kept, self.chunk, self.width))
        some = Packed(self, encoded, rows).parts()
        if self.bitmap:
            marked = torch.cat([marks(p.encoded, p.rows * self.chunk).view(p.rows, -1).sum(1) for p in some])
            return 2 * (marked != self.kept).any().to(torch.int64)
        faults = torch.stack([self._fault(part.numbers()) for part in some])
        return torch.where((faults == 1).any(), 1, faults.amax())

    def _fault(self, columns: Tensor) -> Tensor:
        line = columns.view(-1)  # [rows, kept] -> []
        falls = torch.zeros(len(line), dtype=torch.bool, device=line.device)
        torch.le(line[1:], line[:-1], out=falls[1:])
        falls.view_as(columns)[:, 0] = False  # where a row begins
        within = self.chunk == 2**self.width
        outside = torch.zeros_like(falls.any()) if within else (line >= self.chunk).any()
        return torch.where(outside, 1, 2 * falls.any().to(torch.int64))
