"""Indices: the positions of the sent coefficients in their rows. The size of the encoded indices is
known in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import bit_counts, pack, packed_bytes, unit_dtype, unpack
from detonation.core.flat.layout import CACHE_BLOCK

if TYPE_CHECKING:
    from torch import Tensor


def mark(indices: Tensor, chunk: int) -> Tensor:
    """The bitmap in which the bits at `indices` are set, for rows of `chunk` bits.

    Shapes: `[..., rows, k]` integer -> `[..., ceil(rows * chunk / 8)]` uint8.
    """
    *messages, rows, _ = indices.shape
    if indices.device.type == "cpu" and (kernel := kernel_library.load_library()):
        return kernel.mark(indices, chunk)
    if indices.device.type == "cpu" and chunk in (8, 16, 32, 64):
        return _words(indices.reshape(-1, indices.shape[-1]), chunk).view(*messages, -1)
    marked = torch.zeros(*messages, rows, chunk, dtype=torch.uint8, device=indices.device)
    marked.scatter_(-1, indices.to(torch.int64), 1)
    return pack(marked.view(*messages, rows * chunk), 1)


def _words(indices: Tensor, chunk: int) -> Tensor:
    """The bitmaps of all rows as bytes. Each bitmap is computed as one integer."""
    # shapes: [rows, k] integer -> [rows * chunk / 8] uint8
    words = torch.empty(len(indices), dtype=unit_dtype(chunk // 8), device="cpu")
    some = _cached_rows(chunk)
    for part, found in zip(torch.split(indices, some), torch.split(words, some), strict=True):
        found.copy_(torch.bitwise_left_shift(1, part.to(torch.int64)).sum(1))
    return words.view(torch.uint8)


def _cached_rows(chunk: int) -> int:
    """How many rows of `chunk` numbers of 8 bytes fit into a CPU's cache."""
    return max(1, CACHE_BLOCK // chunk)


def marked_indices(bitmap: Tensor, rows: int, k: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """The positions of the first `k` set bits of each row in rising order, padded with 0 if a row
    has fewer than `k` set bits.

    Shapes: `[..., ceil(rows * chunk / 8)]` uint8 -> `[..., rows, k]` of `dtype`.
    """
    if bitmap.device.type == "cpu" and (kernel := kernel_library.load_library()):
        return kernel.marked(bitmap, rows, k, chunk).to(dtype)
    messages = bitmap.shape[:-1]
    counted = unpack(bitmap, rows * chunk, 1, torch.uint8).view(*messages, rows, chunk)
    if bitmap.device.type == "cpu":
        return _positions(counted.reshape(-1, chunk), dtype)[:, :k].reshape(*messages, rows, k)
    if chunk < 256:
        counted.cumsum_(-1)
    else:
        counted = counted.cumsum(-1, dtype=torch.int32)
    wanted = torch.arange(1, k + 1, dtype=counted.dtype, device=bitmap.device)
    wanted = wanted.expand(*messages, rows, k).contiguous()
    # for each wanted n, the position of the n-th set bit; `chunk` if there is no such bit
    positions = torch.searchsorted(counted.contiguous(), wanted, out_int32=True)
    del counted
    found = torch.empty(wanted.shape, dtype=dtype, device=bitmap.device)
    return torch.remainder(positions, chunk, out=found)


def _positions(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The positions of the set bits of each row in rising order, followed by zeros. The position of
    the n-th set bit is scattered to column n, because torch's own search would process one row at a
    time.

    Shapes: `[rows, chunk]` uint8 -> `[rows, chunk]` of `dtype`.
    """
    rows, chunk = bits.shape
    found = torch.zeros(rows, chunk + 1, dtype=dtype, device="cpu")
    every = torch.arange(chunk, dtype=dtype, device="cpu").expand(rows, chunk)
    some = _cached_rows(chunk)
    narrow_count = torch.uint8 if chunk < 256 else torch.int32
    parts = (torch.split(each, some) for each in (bits, found, every))
    for part, target, columns in zip(*parts, strict=True):
        ranks = part.cumsum(1, dtype=narrow_count).mul_(part)  # 0 if the bit is not set
        target.scatter_(1, ranks.to(torch.int64), columns)
    return found[:, 1:]


def bitmap_faults(bitmaps: Tensor, rows: int, k: int, chunk: int) -> Tensor:
    """The fault code of each bitmap: 2 if some row does not have exactly `k` set bits, else 0.

    Shapes: `[messages, ceil(rows * chunk / 8)]` uint8 -> `[messages]` int64.
    """
    if bitmaps.device.type == "cpu" and (kernel := kernel_library.load_library()):
        return kernel.check_indices(bitmaps, rows, k, chunk, 0)
    if chunk % 8:
        bits = unpack(bitmaps, rows * chunk, 1, torch.uint8).view(len(bitmaps), rows, chunk)
        counts = bits.sum(2, dtype=torch.int32)
    else:  # a lookup table counts the set bits of each byte, so that no tensor of bits is needed
        ones = bit_counts(bitmaps.device).index_select(0, bitmaps.to(torch.int32).view(-1))
        counts = ones.view(len(bitmaps), rows, chunk // 8).sum(2, dtype=torch.int32)
    return _any_of_row(counts != k) * 2


def index_faults(indices: Tensor, chunk: int, width: int) -> Tensor:
    """The fault code of the indices of each message: 1 if an index is not below `chunk`, 2 if the
    indices of a row do not rise, else 0.

    Shapes: `[messages, rows, k]` integer -> `[messages]` int64.
    """
    falls = indices[..., 1:] <= indices[..., :-1]
    found = _any_of_row(falls.flatten(1)) * 2
    if chunk == 2**width:
        return found
    return torch.where(_any_of_row((indices >= chunk).flatten(1)), 1, found)


def _any_of_row(facts: Tensor) -> Tensor:
    """Returns for each row whether any value is True. On a CPU this function computes the maximum
    of the bytes, because torch's `any` takes 30 times as long.

    Shapes: `[rows, n]` bool -> `[rows]` bool.
    """
    if facts.device.type != "cpu" or not facts.numel():
        return facts.any(1)
    return facts.view(torch.uint8).amax(1).view(torch.bool)


@dataclass(frozen=True)
class IndexCoding:
    """Encodes `k` strictly rising indices per row, each below `chunk`.

    A packed index needs ceil(log2(chunk)) bits. Each row is sent as a bitmap instead if a bitmap is
    smaller than `k` packed indices.
    """

    chunk: int
    k: int

    @cached_property
    def width(self) -> int:
        """Bits of a packed index."""
        return (self.chunk - 1).bit_length()

    @cached_property
    def bitmap(self) -> bool:
        """True if rows are sent as bitmaps, because a bitmap is smaller than packed indices."""
        return self.chunk < self.k * self.width

    @cached_property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype that holds every index and that torch computes with."""
        if self.width <= 8:
            return torch.uint8
        if self.width <= 15:
            return torch.int16
        return torch.int32

    def nbytes(self, rows: int) -> int:
        """Bytes of the indices of `rows` rows."""
        if self.bitmap:
            return packed_bytes(rows, self.chunk)
        return packed_bytes(rows * self.k, self.width)

    def encode(self, indices: Tensor | Unpackable) -> Tensor:
        """Encodes the indices of each message.

        Shapes: `[..., rows, k]` integer -> `[..., nbytes]` uint8.
        """
        if isinstance(indices, PackedIndices):
            return indices.encoded
        if not isinstance(indices, torch.Tensor):
            indices = indices.unpacked
        if self.bitmap:
            return mark(indices, self.chunk)
        *messages, rows, k = indices.shape
        if not self.width:
            return torch.empty(*messages, 0, dtype=torch.uint8, device=indices.device)
        return pack(indices.reshape(*messages, rows * k), self.width)

    def decode(self, encoded: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """Decodes the indices of each message.

        Shapes: `[..., nbytes]` uint8 -> `[..., rows, k]` of `dtype`.
        """
        if self.bitmap:
            return marked_indices(encoded, rows, self.k, self.chunk, dtype)
        shape = (*encoded.shape[:-1], rows, self.k)
        if not self.width:
            return torch.zeros(shape, dtype=dtype, device=encoded.device)
        return unpack(encoded, rows * self.k, self.width, dtype).view(shape)

    def faults(self, packed: PackedIndices) -> Tensor:
        """Finds indices that `encode` cannot have produced, in each message.

        Shapes: -> `[messages]` int64: 0 without a fault, 1 for an index that is not below `chunk`,
        2 for indices of a row that do not rise.
        """
        if self.bitmap:
            return bitmap_faults(packed.encoded, packed.rows, self.k, self.chunk)
        encoded = packed.encoded
        is_on_host = encoded.device.type == "cpu"
        if self.width and is_on_host and (kernel := kernel_library.load_library()):
            return kernel.check_indices(encoded, packed.rows, self.k, self.chunk, self.width)
        return index_faults(packed.unpacked, self.chunk, self.width)


@dataclass(frozen=True)
class PackedIndices:
    """Encoded indices of `rows` rows, for one or several messages. The indices are decoded once, on
    first use.
    """

    coding: IndexCoding
    encoded: Tensor  # [..., nbytes] uint8
    rows: int

    @cached_property
    def unpacked(self) -> Tensor:
        """The decoded indices.

        Shapes: -> `[..., rows, k]` of `IndexCoding.dtype`.
        """
        return self.coding.decode(self.encoded, self.rows, self.coding.dtype)

    def part(self, first: int, end: int) -> Tensor | PackedIndices:
        """The indices of rows `first` to `end`, excluding `end`. `first` is a multiple of 8.

        A decoded bitmap is eight times as large as the bitmap, so large bitmaps are decoded part by
        part.

        Shapes: -> `[..., end - first, k]` integer.
        """
        if (first, end) == (0, self.rows):
            return self
        if not self.coding.bitmap:
            return self.unpacked[..., first:end, :]
        begin = first * self.coding.chunk // 8
        return PackedIndices(self.coding, self.encoded[..., begin:], end - first)

    def blank(self, skipped: Tensor) -> None:
        """Sets the decoded indices of the refused messages `skipped` to zero. The bytes of these
        messages are zeros, too.

        Shapes: `[messages]` bool.
        """
        if "unpacked" in vars(self):
            self.unpacked.masked_fill_(skipped.view(-1, 1, 1), 0)


class Unpackable(Protocol):
    """Indices that are unpacked into a tensor on first use."""

    @property
    def unpacked(self) -> Tensor: ...  # [..., rows, k] integer


def narrow(indices: Tensor | Unpackable) -> Tensor:
    """The indices as a tensor in their own integer dtype, unpacked if they are packed.

    Shapes: -> `[..., rows, k]` integer.
    """
    if isinstance(indices, torch.Tensor):
        return indices
    return indices.unpacked
