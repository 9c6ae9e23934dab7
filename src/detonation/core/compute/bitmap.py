"""Bitmaps of the indices of rows, and the validation of received indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import bit_counts, pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

_SOME_ROWS = 2048
"""Rows per pass on a CPU, as many as stay in a cache."""


def mark(indices: Tensor, chunk: int) -> Tensor:
    """The bitmap of rows of `chunk` bits in which `indices` are set.

    Shapes: `[..., rows, k]` integer -> `[..., ceil(rows * chunk / 8)]` uint8.
    """
    *messages, rows, _ = indices.shape
    wide = indices.to(torch.int64)
    kernel = kernel_library.load_library() if indices.device.type == "cpu" else None
    if kernel and not messages:
        return kernel.mark(wide.contiguous(), chunk)
    marked = torch.zeros(*messages, rows, chunk, dtype=torch.uint8, device=indices.device)
    return pack(marked.scatter_(-1, wide, 1).view(*messages, rows * chunk), 1)


def marked_indices(bitmap: Tensor, rows: int, k: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """The first `k` indices that are set in each row, rising; 0 where there are fewer.

    Shapes: `[..., ceil(rows * chunk / 8)]` uint8 -> `[..., rows, k]` of `dtype`.
    """
    messages = bitmap.shape[:-1]
    kernel = kernel_library.load_library() if bitmap.device.type == "cpu" else None
    if kernel and not messages:
        return kernel.marked(bitmap, rows, k, chunk).to(dtype)
    narrow = torch.uint8 if chunk < 256 else torch.int32
    marked = unpack(bitmap, rows * chunk, 1, torch.uint8).view(*messages, rows, chunk)
    if marked.device.type == "cpu":
        return _found_on_cpu(marked.reshape(-1, chunk), k, narrow, dtype).view(*messages, rows, k)
    wanted = torch.arange(1, k + 1, dtype=narrow, device=bitmap.device).expand(*messages, rows, k).contiguous()
    # the place of the first bit at which so many are set; after the last one where there are not so many
    counted = marked.cumsum_(-1) if narrow == marked.dtype else marked.cumsum(-1, dtype=narrow)
    del marked
    found = torch.empty(wanted.shape, dtype=dtype, device=bitmap.device)
    return torch.remainder(torch.searchsorted(counted, wanted, out_int32=True), chunk, out=found)


def _found_on_cpu(marked: Tensor, k: int, narrow: torch.dtype, dtype: torch.dtype) -> Tensor:
    """`marked_indices` of unpacked bitmaps, a few rows at a time."""  # [rows, chunk] uint8 -> [rows, k]
    chunk, found = marked.shape[1], torch.empty(len(marked), k, dtype=dtype, device="cpu")
    numbers = torch.arange(chunk, dtype=narrow, device="cpu").repeat(min(len(marked), _SOME_ROWS), 1)
    for some, indices in zip(torch.split(marked, _SOME_ROWS), torch.split(found, _SOME_ROWS), strict=True):
        # an index that is not wanted goes to a place before the first, or to one after the last: both are cut off
        place = some.cumsum(1, dtype=narrow).clamp_(max=min(k + 1, chunk)).mul_(some).to(torch.int64)
        room = torch.zeros(len(some), k + 2, dtype=narrow, device="cpu")
        indices.copy_(room.scatter_(1, place, numbers[: len(some)])[:, 1:-1])
    return found


def bitmap_faults(bitmaps: Tensor, rows: int, k: int, chunk: int) -> Tensor:
    """2 where a row of a bitmap has not exactly `k` bits set, else 0.

    Shapes: `[messages, ceil(rows * chunk / 8)]` uint8 -> `[messages]` int64.
    """
    kernel = kernel_library.load_library() if bitmaps.device.type == "cpu" else None  # exact, so even a small one is
    if kernel:  # worth the call
        return kernel.check_bitmap(bitmaps, rows, k, chunk)
    if chunk % 8:
        bits = unpack(bitmaps, rows * chunk, 1, torch.uint8).view(len(bitmaps), rows, chunk)
        counts = bits.sum(2, dtype=torch.int32)
    else:  # without a byte for each bit
        ones = bit_counts(bitmaps.device).index_select(0, bitmaps.to(torch.int32).view(-1))
        counts = ones.view(len(bitmaps), rows, chunk // 8).sum(2, dtype=torch.int32)
    return (counts != k).any(1) * 2


def index_faults(indices: Tensor, chunk: int, width: int) -> Tensor:
    """1 where an index is not below `chunk`, 2 where the indices of a row do not rise, else 0.

    Shapes: `[messages, rows, k]` integer -> `[messages]` int64.
    """
    falls = (indices[..., 1:] <= indices[..., :-1]).flatten(1).any(1)
    found = falls * 2
    return found if chunk == 2**width else torch.where((indices >= chunk).flatten(1).any(1), 1, found)
