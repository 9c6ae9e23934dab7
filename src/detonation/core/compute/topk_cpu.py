"""Top-k of every row on a CPU, in blocks of rows that fit in a cache.

On a CPU torch.topk sorts row by row. Here each line holds one coefficient of all rows, and each operation processes
many lines: repeated maxima for a small k, a sorting network for a larger one. The network is a list of calls on memory
that is allocated once, because at the size of a cache a call costs as much as its arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    Call = tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]
    """An operation, its two operands, and its output."""

TOPK_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
FEW = 8
_last = threading.local()  # the finder that a thread used last: engines ask for one block after the other


class TopKFinder:
    """Finds the `count` largest magnitudes of each of `rows` rows of `chunk` coefficients, one of `TOPK_CHUNKS`.

    Magnitudes that differ only in their lowest log2(chunk) bits count as equal: in a key the index replaces these bits,
    so that one comparison orders both.
    """

    def __init__(self, chunk: int, count: int, rows: int) -> None:
        self._chunk, self._count, self._rows = chunk, count, rows
        numbers = {n: torch.arange(n, dtype=torch.int64, device="cpu") for n in (chunk, count, rows)}
        self._keys, spare = torch.empty(2, chunk, rows, dtype=torch.int32, device="cpu")
        # its bits in a key, as a tensor: a call with a number takes longer
        self._column = torch.tensor(chunk - 1, dtype=torch.int32, device="cpu")
        self._falling = (chunk - 1 - numbers[chunk]).to(torch.int32).unsqueeze(1)
        self._last = numbers[rows] + (chunk - 1) * rows  # the place of the last column of each row
        self._lasts = self._last.to(torch.int32).repeat_interleave(count)
        self._turned = (numbers[rows] + rows * numbers[count].unsqueeze(1)).t().reshape(-1)  # lines to rows
        self._place = torch.empty(rows, dtype=torch.int64, device="cpu")
        size = 1 << (count - 1).bit_length()
        self._search: list[Call] = []
        self._found = self._keys[:0]
        if count > FEW:
            self._found, spare = _best(self._search, self._keys, spare, size, order=count < size)
        else:
            self._found, spare = spare[:size], torch.empty(size, rows, dtype=torch.int32, device="cpu")
        self._order: list[Call] = []
        self._ordered, _ = _sorted(self._order, self._found, spare, size)

    def find(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of the largest coefficients of each row, rising, and their positions in the flattened `lines`.

        Shapes: `[chunk, rows]` fp32 -> indices and positions, `[rows, count]` int32 each.
        """
        torch.bitwise_and(lines.view(torch.int32), 0x7FFFFFFF & -self._chunk, out=self._keys)
        self._keys.bitwise_or_(self._falling)
        if self._search:
            _run(self._search)
            self._found.bitwise_and_(self._chunk - 1)
        else:
            self._one_by_one()
        if self._count < len(self._found):
            self._found[self._count :] = -1
        _run(self._order)
        # by index: to turn a narrow matrix round takes torch twice as long
        falling = self._ordered.view(-1).index_select(0, self._turned)
        columns, places = self._chunk - 1 - falling, torch.sub(self._lasts, falling, alpha=self._rows)
        return columns.view(self._rows, self._count), places.view(self._rows, self._count)

    def _one_by_one(self) -> None:
        keys, place = self._keys.view(-1), self._place
        for i, found in enumerate(self._found[: self._count]):
            if i:
                torch.sub(self._last, self._found[i - 1], alpha=self._rows, out=place)
                keys.index_fill_(0, place, -1)
            torch.amax(self._keys, 0, out=found)
            found.bitwise_and_(self._column)


def topk_indices(coefficients: Tensor, count: int, some: int) -> Tensor:
    """The indices of the `count` largest magnitudes of every row, rising, found in blocks of `some` rows.

    Shapes: `[rows, chunk]` fp32 -> `[rows, count]` int64.
    """
    found = torch.empty(len(coefficients), count, dtype=torch.int64, device="cpu")
    for rows, columns in zip(torch.split(coefficients, some), torch.split(found, some), strict=True):
        shape = coefficients.shape[1], count, len(rows)
        if getattr(_last, "shape", None) != shape:
            _last.shape, _last.finder = shape, TopKFinder(*shape)
        columns.copy_(_last.finder.find(rows.t().contiguous())[0])
    return found


def _run(calls: list[Call]) -> None:
    for operation, one, other, out in calls:
        operation(one, other, out=out)


def _best(calls: list[Call], keys: Tensor, spare: Tensor, size: int, order: bool) -> tuple[Tensor, Tensor]:
    """Records the calls that find the `size` largest keys of each row, sorted if `order`; returns result and spare."""
    keys, spare = _sorted(calls, keys, spare, size)  # [chunk, rows] -> [size, rows]
    while len(keys) > size:  # of one that falls and one that rises the larger of each pair: that falls and rises
        pairs = keys.view(-1, 2, size, keys.shape[1])
        half = spare[: len(keys) // 2]
        calls.append((torch.maximum, pairs[:, 0], pairs[:, 1], half.view(-1, size, keys.shape[1])))
        keys, spare = _merged(calls, half, keys, size) if order or len(half) > size else (half, keys)
    return keys, spare


def _sorted(calls: list[Call], keys: Tensor, spare: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Records the calls that sort runs of `size`, falling and rising in turn (Batcher, 1968); returns as `_best`."""
    length = 2
    while length <= size:
        keys, spare = _merged(calls, keys, spare, length)
        length *= 2
    return keys, spare


def _merged(calls: list[Call], keys: Tensor, spare: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Records the calls that sort runs of `length` that fall and then rise, or rise and then fall; as `_sorted`."""
    step, ways = length // 2, 2 if len(keys) > length else 1
    while step:
        shape = (len(keys) // (ways * length), ways, length // (2 * step), 2, step, keys.shape[1])
        before, after = keys.view(shape), spare[: len(keys)].view(shape)
        for way, (high, low) in enumerate([(torch.maximum, torch.minimum), (torch.minimum, torch.maximum)][:ways]):
            pair = before[:, way, :, 0], before[:, way, :, 1]
            calls += [(high, *pair, after[:, way, :, 0]), (low, *pair, after[:, way, :, 1])]
        keys, spare, step = after.view_as(keys), keys, step // 2
    return keys, spare
