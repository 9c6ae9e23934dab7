"""Selections: the choice of coefficients that are sent from every row.

A *shared* selection is a pure function of (seed, step, rows). Every replica computes the selected
indices itself, so messages contain no indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import torch

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import signed
from detonation.core.compute.topk_cpu import TOPK_CHUNKS, topk_indices
from detonation.core.flat.layout import CACHE_BLOCK

if TYPE_CHECKING:
    from torch import Tensor


class Selection(Protocol):
    """Chooses `k` of the `chunk` coefficients of every row, and returns the indices of these
    coefficients."""

    @property
    def chunk(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def shared(self) -> bool: ...

    @property
    def period(self) -> int:
        """Number of steps in which every coordinate is sent at least once; 0 if a coordinate may
        wait for any number of steps.
        """

    def indices(
        self, coefficients: Tensor, step: int, seed: int
    ) -> Tensor: ...  # shapes: [rows, chunk] -> [rows, k] int64

    def for_rows(self, first: int, rows: int) -> Selection:
        """The selection for a bucket that begins at row `first` of a flat of `rows` rows."""


@dataclass(frozen=True)
class Everything:
    """Sends all coordinates at every step."""

    chunk: int = 1
    k: int = 1
    shared: bool = True
    period: int = 1

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        # shapes: [rows, chunk] -> [rows, k] int64
        numbers = torch.arange(self.k, dtype=torch.int64, device=coefficients.device)
        return numbers.expand(len(coefficients), -1)

    def for_rows(self, first: int, rows: int) -> Everything:
        return self


@dataclass(frozen=True)
class TopK:
    """The `topk` coefficients of largest magnitude in every chunk, in the order of their indices.

    Ties between equal magnitudes are broken arbitrarily. On a CPU, magnitudes that differ only in
    their lowest log2(chunk) bits may count as equal.
    """

    topk: int
    chunk: int
    shared: bool = False
    period: int = 0

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}, must be at least 1")
        if not 1 <= self.topk <= self.chunk:
            raise ValueError(f"topk is {self.topk}, must be from 1 to chunk ({self.chunk})")

    @cached_property
    def k(self) -> int:
        return self.topk

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        # shapes: [rows, chunk] -> [rows, k] int64
        if self.chunk in TOPK_CHUNKS and coefficients.device.type == "cpu" and len(coefficients):
            has_kernel = self.chunk in kernel_library.KERNEL_CHUNKS
            if has_kernel and (library := kernel_library.load_library()):
                return library.topk(coefficients.contiguous(), self.topk).to(torch.int64)
            return topk_indices(coefficients, self.topk, max(1, CACHE_BLOCK // self.chunk))
        return coefficients.abs().topk(self.topk, dim=1, sorted=False).indices.sort(1).values

    def for_rows(self, first: int, rows: int) -> TopK:
        return self


SMALLEST_RATE = 1e-6
"""Smallest rate of a selection. A smaller rate would need rows of more than a million
coordinates."""


@dataclass(frozen=True)
class Rotation:
    """Base class of selections that ignore the data: each step sends one of `shares` equal parts of
    every row.

    `shares = ceil(1 / rate)`, so a `rate` is rounded down to 1 divided by an integer. The chunk is
    a multiple of `shares`, so every message has the same size. In `period` steps every coordinate
    is sent exactly once.
    """

    rate: float
    shared = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate is {self.rate}, must be above 0 and at most 1")
        if self.rate < SMALLEST_RATE:
            raise ValueError(f"rate is {self.rate}, must be at least {SMALLEST_RATE:g}")

    @cached_property
    def shares(self) -> int:
        return math.ceil(1 / self.rate - 1e-9)

    @property
    def period(self) -> int:
        return self.shares

    @cached_property
    def k(self) -> int:
        if self.shares == 1:
            return 1  # so a row has one coordinate, and no parameter needs padding
        return max(1, 64 // self.shares)

    @cached_property
    def chunk(self) -> int:
        return self.shares * self.k

    def phase(self, step: int, seed: int) -> tuple[int, int, int]:
        """Three integers that define which coordinates `step` sends.

        The first integer is the index of the cycle: a cycle has `shares` steps. The second integer
        is the index of the part of each row that is sent: a row has `shares` equal parts. The third
        integer is 0, except in `Random`: there it changes by XOR which permutation each row uses.
        """
        return *divmod(step, self.shares), 0

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        # shapes: [rows, chunk] -> [rows, k] int64
        raise NotImplementedError

    def for_rows(self, first: int, rows: int) -> Rotation:
        return self


@dataclass(frozen=True)
class Random(Rotation):
    """A random subset of the coordinates, the same on every replica.

    Each row sends its coordinates in the order of one of 64 permutations. For each cycle of
    `shares` steps new permutations are drawn and assigned to the rows. Computing time and temporary
    storage per step grow with the count of sent coefficients, not with the size of the flat.

    Args:
        cycle: True if a row keeps its permutation for a cycle, so that each coordinate is sent once
            per cycle. If False, each step assigns the permutations again, and a coordinate may wait
            any number of steps.
        first: For a bucket, the index of its first row in the flat.
        rows: For a bucket, the number of rows of the whole flat; 0 if there are no buckets.
    """

    cycle: bool = True
    first: int = 0
    rows: int = 0

    @property
    def period(self) -> int:
        if self.cycle or self.shares == 1:
            return self.shares
        return 0

    def phase(self, step: int, seed: int) -> tuple[int, int, int]:
        cycle, share, change = super().phase(step, seed)
        if not self.cycle:
            change = random_start(seed, step, 2) % _TABLES
        return cycle, share, change

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        cycle, share, change = self.phase(step, seed)
        device = coefficients.device
        permutations = _permutations(self.chunk, seed, cycle, device)
        table = permutations[:, share * self.k : (share + 1) * self.k]
        choices = _choices(self.rows or len(coefficients), seed, cycle, device)
        mine = choices[self.first : self.first + len(coefficients)]
        if change:
            mine = mine ^ change
        return table[mine.long()]

    def for_rows(self, first: int, rows: int) -> Random:
        return replace(self, first=first, rows=rows)


@dataclass(frozen=True)
class Striding(Rotation):
    """Sends every `period`-th coordinate of a row. The index of the first sent coordinate grows by
    1 at each step, and returns to 0 after `period` steps."""

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        _, offset, _ = self.phase(step, seed)
        device = coefficients.device
        comb = torch.arange(offset, self.chunk, self.shares, dtype=torch.int64, device=device)
        return comb.expand(len(coefficients), -1)


def random_start(*key: int) -> int:
    """The int64 from which the random words for `key` are computed.

    >>> random_start(0, 1, 0) == random_start(0, 1, 1)
    False
    """
    start = 0
    for part in key:
        start += _GOLDEN * (part + 1)
        for shift, factor in _ROUNDS:
            start %= 2**64
            start = (start ^ (start >> shift)) * factor
    return signed(start)


@lru_cache(maxsize=4)
def _permutations(size: int, seed: int, cycle: int, device: torch.device) -> Tensor:
    """64 random permutations of `size` numbers. Each permutation is the order that sorts a line of
    random words. The low bits of each word are replaced by the index of the word, so that no two
    words of a line are equal.

    Shapes: -> `[64, size]` int64.
    """
    bits = (size - 1).bit_length()
    words = _random_words(_TABLES * size, device, seed, cycle, 0).view(_TABLES, size)
    words = words >> bits << bits
    return words.add_(torch.arange(size, dtype=torch.int64, device=device)).argsort(1)


@lru_cache(maxsize=4)
def _choices(rows: int, seed: int, cycle: int, device: torch.device) -> Tensor:
    octets = _random_words(-(-rows // 8), device, seed, cycle, 1).view(torch.uint8)
    return octets[:rows].bitwise_and_(_TABLES - 1)  # [rows] uint8


def _random_words(count: int, device: torch.device, *key: int) -> Tensor:
    """`count` random words that depend on `key` alone, so that a resumed run needs no saved state
    of a generator.

    The words are computed by splitmix64 (Steele, Lea & Flood, 2014) in integer arithmetic. torch's
    generators give different numbers on different devices, even on GPUs of different sizes, so
    replicas that used them would select different coordinates.

    Shapes: -> `[count]` int64.
    """
    words = torch.empty(count, dtype=torch.int64, device=device)
    start = random_start(*key)
    for first in range(0, count, _BLOCK):
        block = words[first : first + _BLOCK]
        torch.arange(first + 1, first + 1 + len(block), dtype=torch.int64, device=device, out=block)
        block.mul_(signed(_GOLDEN)).add_(start)
        for shift, factor in _ROUNDS:
            shifted = (block >> shift).bitwise_and_(2 ** (64 - shift) - 1)
            block.bitwise_xor_(shifted).mul_(signed(factor))
    return words


_TABLES = 64
"""Number of permutations to which rows are assigned; a power of two."""
_BLOCK = 1 << 14
"""Number of random words computed at once, so few that they fit into a CPU's cache."""
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The shifts and factors of splitmix64."""
