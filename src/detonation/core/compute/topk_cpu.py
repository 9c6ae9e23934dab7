"""Top-k of every row on a CPU in plain torch, for many rows at once. torch's own top-k sorts one
row at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TOPK_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
MOST_ROUNDS = 12
"""Up to this number of selected coefficients per row, finding one maximum after the other is faster
than sorting."""
_LOWEST = -(1 << 31)


def topk_indices(coefficients: Tensor, count: int, some: int) -> Tensor:
    """The indices of the `count` largest magnitudes of every row, in rising order.

    Sorts keys: a key is a magnitude whose lowest log2(chunk) bits are replaced by the inverted bits
    of the index. So one comparison of keys orders both magnitudes and indices. Magnitudes that
    differ only in these bits count as equal.

    Args:
        some: Number of rows that are processed at a time; so few that they fit into a cache.

    Shapes: `[rows, chunk]` fp32, chunk one of `TOPK_CHUNKS` -> `[rows, count]` int64.
    """
    rows, chunk = coefficients.shape
    magnitude = 0x7FFFFFFF & -chunk
    falling = torch.arange(chunk - 1, -1, -1, dtype=torch.int32, device="cpu").unsqueeze(1)
    found = torch.empty(rows, count, dtype=torch.int64, device="cpu")
    for part, indices in zip(
        torch.split(coefficients, some), torch.split(found, some), strict=True
    ):
        network = _network(threading.get_ident(), chunk, count, len(part), torch.int32)
        keys = network.numbers
        torch.bitwise_and(part.t().view(torch.int32), magnitude, out=keys).bitwise_or_(falling)
        if count <= MOST_ROUNDS:
            largest = _maxima(keys, count)
        else:
            largest = network.largest()
        indices.copy_(_rising(largest, chunk).t())
    return found


def _maxima(keys: Tensor, count: int) -> Tensor:
    """The `count` largest keys of each column, in falling order. The sign bits of the returned keys
    may be wrong. Overwrites `keys`, which must not be negative.

    Finds one maximum after the other. Each maximum must be removed before the next search. For this
    the function subtracts one number from all keys of the column, modulo 2**32: the number that
    turns the maximum into the lowest int32. Then all smaller keys are positive, in their old order,
    and all earlier maxima are negative.

    Shapes: `[chunk, columns]` int32 -> `[count, columns]` int32.
    """
    found = torch.empty(count, keys.shape[1], dtype=torch.int32, device="cpu")
    torch.amax(keys, 0, out=found[0])
    for last, line in pairwise(found):
        keys.sub_(last.bitwise_xor(_LOWEST))
        torch.amax(keys, 0, out=line)
    # adds back the numbers that the loop subtracted from the keys, up to errors in the sign bits
    return found.cumsum(0, dtype=torch.int32)


def _rising(keys: Tensor, chunk: int) -> Tensor:
    """The indices that the lowest bits of `keys` hold, in rising order."""  # [count, rows] uint8
    count, rows = keys.shape
    lines = 1 << (count - 1).bit_length()
    network = _network(threading.get_ident(), lines, lines, rows, torch.uint8)
    network.numbers[count:] = 255
    network.numbers[:count].copy_(keys).bitwise_not_().bitwise_and_(chunk - 1)
    return network.largest()[:count]


class SortingNetwork:
    """A bitonic sorting network that sorts all columns of a matrix at once, by comparing whole
    lines (rows of the matrix).

    The views for all comparisons are made in advance, because making them takes longer than the
    comparisons.

    Args:
        lines: Number of lines of the matrix, a power of two.
        count: How many of the largest numbers of each column are wanted.
    """

    def __init__(self, lines: int, count: int, columns: int, dtype: torch.dtype) -> None:
        self.numbers = torch.empty(lines, columns, dtype=dtype, device="cpu")
        """The numbers to sort, which `largest` overwrites."""
        self._comparisons: list[tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]] = []
        self._now = self.numbers
        self._next = torch.empty_like(self.numbers)
        size = 1 << (count - 1).bit_length()
        for merged in range(1, size.bit_length()):
            self._merge(2**merged)
        while len(self._now) > size:
            self._drop_half(size)
            if len(self._now) > size or size > count:
                self._merge(size)
        self._found = self._now[size - count :]

    def largest(self) -> Tensor:
        """The `count` largest numbers of each column: in rising order if `count` is the number of
        lines, else in any order. The next call overwrites the returned tensor.

        Shapes: -> `[count, columns]`.
        """
        for compare, one, other, out in self._comparisons:
            compare(one, other, out=out)
        return self._found

    def _merge(self, size: int) -> None:
        """Adds to this network the comparisons that sort blocks of `size` lines, alternately in
        rising and in falling order. Before, each block must be bitonic: rising and then falling, or
        a rotation of this order.
        """
        lines, columns = self._now.shape
        blocks = min(2, lines // size)
        step = size // 2
        while step:
            shape = -1, blocks, size // (2 * step), 2, step, columns
            pairs = self._now.view(shape)
            sorted_pairs = self._next.view(shape)
            for block in range(blocks):
                one, other = pairs[:, block].unbind(2)
                low, high = sorted_pairs[:, block].unbind(2)
                if block:
                    low, high = high, low
                self._comparisons.append((torch.minimum, one, other, low))
                self._comparisons.append((torch.maximum, one, other, high))
            done = self._next
            self._next = self._now
            self._now = done
            step //= 2

    def _drop_half(self, size: int) -> None:
        """Adds to this network the comparisons that join every two sorted blocks to one block. The
        new block is bitonic and holds the `size` largest numbers of the two blocks, column by
        column.
        """
        one, other = self._now.view(-1, 2, size, self._now.shape[1]).unbind(1)
        half = len(self._now) // 2
        kept = self._next[:half]
        self._comparisons.append((torch.maximum, one, other, kept.view_as(one)))
        self._next = self._now[:half]
        self._now = kept


@lru_cache(maxsize=8)
def _network(
    thread: int, lines: int, count: int, columns: int, dtype: torch.dtype
) -> SortingNetwork:
    """A cached sorting network. Each thread has a network of its own, because a network stores the
    numbers that it sorts."""
    return SortingNetwork(lines, count, columns, dtype)
