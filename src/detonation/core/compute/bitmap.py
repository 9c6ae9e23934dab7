"""Bitmaps of the indices of rows, and the validation of received indices."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import pack, unpack

_SOME_ROWS = 2048  # rows per pass, as many as stay in a cache


def mark(indices: Tensor, chunk: int) -> Tensor:
    """The bitmap of rows of `chunk` bits in which `indices` are set.

    Shapes: `[rows, k]` int64 -> `[ceil(rows * chunk / 8)]` uint8.
    """
    kernel = kernel_library.load_library() if indices.device.type == "cpu" and indices.is_contiguous() else None
    if kernel:
        return kernel.mark(indices, chunk)
    marked = torch.zeros(len(indices), chunk, dtype=torch.uint8, device=indices.device)
    return pack(marked.scatter_(1, indices, torch.ones_like(indices, dtype=torch.uint8)).view(-1), 1)


def marked_indices(bitmap: Tensor, rows: int, k: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """The first `k` indices that are set in each row, rising; 0 where there are fewer.

    Shapes: `[ceil(rows * chunk / 8)]` uint8 -> `[rows, k]` of `dtype`.
    """
    kernel = kernel_library.load_library() if bitmap.device.type == "cpu" and bitmap.is_contiguous() else None
    if kernel:
        return kernel.marked(bitmap, rows, k, chunk).to(dtype)
    marked = unpack(bitmap, rows * chunk, 1, torch.uint8).view(rows, chunk)
    few = torch.uint8 if chunk < 256 else torch.int32
    found = torch.empty(rows, k, dtype=dtype, device=marked.device)
    numbers = torch.arange(chunk, dtype=few, device=marked.device).repeat(min(rows, _SOME_ROWS), 1)
    for some, indices in zip(torch.split(marked, _SOME_ROWS), torch.split(found, _SOME_ROWS), strict=True):
        # an index that is not wanted goes to a place before the first, or to one after the last: both are cut off
        place = some.cumsum(1, dtype=few).clamp_(max=min(k + 1, chunk)).mul_(some).to(torch.int64)
        room = torch.zeros(len(some), k + 2, dtype=few, device=marked.device)
        indices.copy_(room.scatter_(1, place, numbers[: len(some)])[:, 1:-1])
    return found


def bitmap_faults(bitmaps: Sequence[Tensor], rows: int, k: int, chunk: int) -> Tensor:
    """2 where a row of a bitmap has not exactly `k` bits set, else 0.

    Shapes: `[ceil(rows * chunk / 8)]` uint8 each -> `[bitmaps]` int64.
    """
    kernel = (
        kernel_library.load_library() if _readable(bitmaps) else None
    )  # exact, so even a small one is worth the call
    if kernel:
        found = [kernel.check_bitmap(bitmap, rows, k, chunk) for bitmap in bitmaps]
        return torch.tensor(found, dtype=torch.int64, device="cpu")
    return torch.stack([_bitmap_fault(bitmap, rows, k, chunk) for bitmap in bitmaps])


def packed_faults(
    packed: Sequence[Tensor], rows: int, k: int, chunk: int, width: int, unpacked: Callable[[int], Tensor]
) -> Tensor:
    """1 where a packed index is not below `chunk`, 2 where the indices of a row do not rise, else 0.

    Args:
        unpacked: Returns the indices of message i, `[rows, k]`, called only where no kernel reads the packed ones.

    Shapes: `[ceil(rows * k * width / 8)]` uint8 each -> `[messages]` int64.
    """
    kernel = kernel_library.load_library() if width and _readable(packed) else None
    if kernel:
        found = [kernel.check_indices(each, rows, k, chunk, width) for each in packed]
        return torch.tensor(found, dtype=torch.int64, device="cpu")
    return torch.stack([_index_fault(unpacked(i), chunk, width) for i in range(len(packed))])


def _readable(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)


def _bitmap_fault(bitmap: Tensor, rows: int, k: int, chunk: int) -> Tensor:
    some, counts = 8 * _SOME_ROWS, []  # whole bytes of any chunk
    for first in range(0, max(1, rows), some):
        count = min(some, rows - first)
        octets = bitmap[first * chunk // 8 : -(-(first + count) * chunk // 8)]
        counts.append(unpack(octets, count * chunk, 1, torch.uint8).view(-1, chunk).sum(1))
    return 2 * (torch.cat(counts) != k).any().to(torch.int64)


def _index_fault(indices: Tensor, chunk: int, width: int) -> Tensor:
    line = indices.view(-1)
    falls = torch.zeros(1 + len(line), dtype=torch.bool, device=line.device)
    torch.le(line[1:], line[:-1], out=falls[1:-1])
    falls[:-1].view_as(indices)[:, 0] = False  # where a row begins
    fall = falls.view(torch.uint8).amax().to(torch.int64)  # to ask whether any is true takes many times as long
    return 2 * fall if chunk == 2**width else torch.where((line >= chunk).any(), 1, 2 * fall)
