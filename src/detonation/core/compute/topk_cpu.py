"""Top-k of every row on a CPU, a block of rows at a time that stays in a cache.

On a CPU torch.topk sorts row by row. Here a coefficient of all rows is one line, and an operation takes many lines:
where few are asked for, one maximum of all after the other, else a sorting network. That lies ready as calls on memory
that is made once, because at the size of a cache a call costs as much as its arithmetic.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TOPK_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
FEW = 8

Call = tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]
"""An operation, the two that it is done to, and where the result goes."""


class TopKFinder:
    """Finds the `count` largest magnitudes of every row, of `rows` rows of `chunk`, one of CHUNKS.

    Magnitudes that agree but for `chunk` units in the last place count as equal: the lowest bits of a key are its
    column, so that one comparison orders both.
    """

    def __init__(self, chunk: int, count: int, rows: int) -> None:
        self._chunk, self._count, self._rows = chunk, count, rows
        self._keys, spare = torch.empty(2, chunk, rows, dtype=torch.int32)
        # its bits in a key, as a tensor: a call with a number takes longer
        self._column = torch.tensor(chunk - 1, dtype=torch.int32)
        self._falling = torch.arange(chunk - 1, -1, -1, dtype=torch.int32).unsqueeze(1)
        self._last = torch.arange(rows) + (chunk - 1) * rows  # the place of the last column of each row
        self._lasts = self._last.to(torch.int32).repeat_interleave(count)
        self._turned = (torch.arange(rows) + rows * torch.arange(count).unsqueeze(1)).t().reshape(-1)  # lines to rows
        self._place = torch.empty(rows, dtype=torch.int64)
        size = 1 << (count - 1).bit_length()
        self._search: list[Call] = []
        self._found = self._keys[:0]
        if count > FEW:
            self._found, spare = _best(self._search, self._keys, spare, size, order=count < size)
        else:
            self._found, spare = spare[:size], torch.empty(size, rows, dtype=torch.int32)
        self._order: list[Call] = []
        self._ordered, _ = _sorted(self._order, self._found, spare, size)

    def find(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of the largest coefficients of each row, rising, and where in the flattened `lines` they are."""
        # lines [chunk, rows] fp32 -> 2 x [rows, count] int32
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
    """The columns of the `count` largest magnitudes of every row, rising, found `some` rows at a time."""
    # [rows, chunk] fp32 -> [rows, count] int64
    found = torch.empty(len(coefficients), count, dtype=torch.int64)
    finder: TopKFinder | None = None
    for rows, columns in zip(torch.split(coefficients, some), torch.split(found, some), strict=True):
        if finder is None or len(rows) < some:
            finder = TopKFinder(coefficients.shape[1], count, len(rows))
        columns.copy_(finder.find(rows.t().contiguous())[0])
    return found


def _run(calls: list[Call]) -> None:
    for operation, one, other, out in calls:
        operation(one, other, out=out)


def _best(calls: list[Call], keys: Tensor, spare: Tensor, size: int, order: bool) -> tuple[Tensor, Tensor]:
    """Will find the `size` largest of each column, in `order` or not: groups are sorted, every second one upwards."""
    keys, spare = _sorted(calls, keys, spare, size)  # [chunk, rows] -> [size, rows]
    while len(keys) > size:  # of one that falls and one that rises the larger of each pair: that falls and rises
        pairs = keys.view(-1, 2, size, keys.shape[1])
        half = spare[: len(keys) // 2]
        calls.append((torch.maximum, pairs[:, 0], pairs[:, 1], half.view(-1, size, keys.shape[1])))
        keys, spare = _merged(calls, half, keys, size) if order or len(half) > size else (half, keys)
    return keys, spare


def _sorted(calls: list[Call], keys: Tensor, spare: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Will sort runs of `size`: the first falls, the next rises, and so on (Batcher, 1968). Where, and what is free."""
    length = 2
    while length <= size:
        keys, spare = _merged(calls, keys, spare, length)
        length *= 2
    return keys, spare


def _merged(calls: list[Call], keys: Tensor, spare: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The same of runs of `length` that fall and then rise, or rise and then fall."""
    step, ways = length // 2, 2 if len(keys) > length else 1
    while step:
        shape = (len(keys) // (ways * length), ways, length // (2 * step), 2, step, keys.shape[1])
        before, after = keys.view(shape), spare[: len(keys)].view(shape)
        for way, (high, low) in enumerate([(torch.maximum, torch.minimum), (torch.minimum, torch.maximum)][:ways]):
            pair = before[:, way, :, 0], before[:, way, :, 1]
            calls += [(high, *pair, after[:, way, :, 0]), (low, *pair, after[:, way, :, 1])]
        keys, spare, step = after.view_as(keys), keys, step // 2
    return keys, spare
