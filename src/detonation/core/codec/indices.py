"""Columns: which coefficients of each row a message tells of, in the fewest bytes of a size known beforehand."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.compute.bitpack import pack, packed_bytes, unpack
from detonation.kernels import native

SOME = 2048
"""Rows that are looked at together, as many as stay in a cache."""


@dataclass(frozen=True)
class Packed:
    """The columns of `rows` rows as they travel; as numbers only where somebody asks for them, and then once."""

    columns: "Columns"
    encoded: Tensor
    rows: int

    @cached_property
    def small(self) -> Tensor:
        """The numbers, in the fewest bytes."""  # [rows, kept] uint8, int64 where a row has more than 256 columns
        return self.columns.decode(self.encoded, self.rows, torch.uint8 if self.columns.width <= 8 else torch.int64)

    def part(self, first: int, rows: int) -> "Packed":
        """Those of `rows` rows from row `first` on, a multiple of 8."""
        start, rows = self.columns.nbytes(first), min(rows, self.rows - first)
        return Packed(self.columns, self.encoded[start : start + self.columns.nbytes(rows)], rows)

    def fault(self) -> Tensor:
        """Whether they could come from `Columns.encode`: 1 where one is not below `chunk`, 2 where some fall."""
        columns, library = self.columns, native.load_for(self.encoded)  # -> [] int64
        kept, chunk, width = columns.kept, columns.chunk, columns.width
        if library and columns.bitmap:
            return torch.tensor(library.check_bitmap(self.encoded, self.rows, kept, chunk))
        if library and width:
            return torch.tensor(library.check_columns(self.encoded, self.rows, kept, chunk, width))
        if columns.bitmap:
            some = [self.part(first, 8 * SOME) for first in range(0, max(1, self.rows), 8 * SOME)]
            bits = (unpack(part.encoded, part.rows * chunk, 1, torch.uint8).view(-1, chunk) for part in some)
            return 2 * (torch.cat([marked.sum(1) for marked in bits]) != kept).any().to(torch.int64)
        line = self.small.view(-1)
        falls = torch.zeros(1 + len(line), dtype=torch.bool, device=line.device)
        torch.le(line[1:], line[:-1], out=falls[1:-1])
        falls[:-1].view_as(self.small)[:, 0] = False  # where a row begins
        fall = falls.view(torch.uint8).amax().to(torch.int64)  # to ask whether any is true takes many times as long
        return 2 * fall if chunk == 2**width else torch.where((line >= chunk).any(), 1, 2 * fall)


def small(columns: Tensor | Packed) -> Tensor:
    """`columns` as numbers in whatever bytes they have."""  # [rows, kept]
    return columns.small if isinstance(columns, Packed) else columns


def numbers(columns: Tensor | Packed) -> Tensor:
    """`columns` as torch indexes by them."""  # [rows, kept] int64
    return small(columns).to(torch.int64)


def listed(marked: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """The first `kept` columns of every row that are marked, rising; 0 where there are fewer."""
    rows, chunk = marked.shape  # [rows, chunk] uint8 of 0 and 1 -> [rows, kept]
    narrow = torch.uint8 if chunk < 256 else torch.int32
    found = torch.empty(rows, kept, dtype=dtype, device=marked.device)
    numbers = torch.arange(chunk, dtype=narrow, device=marked.device).repeat(min(rows, SOME), 1)
    for some, columns in zip(torch.split(marked, SOME), torch.split(found, SOME), strict=True):
        # what is not wanted goes to a place before the first, or to one after the last: both are cut off
        place = some.cumsum(1, dtype=narrow).clamp_(max=min(kept + 1, chunk)).mul_(some).to(torch.int64)
        room = torch.zeros(len(some), kept + 2, dtype=narrow, device=marked.device)
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

    def decode(self, encoded: Tensor, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:  # -> [rows, kept]
        if self.bitmap:
            library = native.load_for(encoded)
            if library:
                return library.marked(encoded, rows, self.kept, self.chunk).to(dtype)
            marked = unpack(encoded, rows * self.chunk, 1, torch.uint8).view(rows, self.chunk)
            return listed(marked, self.kept, dtype)
        if not self.width:
            return torch.zeros(rows, self.kept, dtype=dtype, device=encoded.device)
        return unpack(encoded, rows * self.kept, self.width, dtype).view(rows, self.kept)
