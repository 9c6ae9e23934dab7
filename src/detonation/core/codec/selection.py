"""Selections: which coefficients of every row are sent.

A *shared* selection is a pure function of (seed, step, rows). Every replica computes it, so no
indices are sent.
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
    """Chooses `k` of the `chunk` coefficients of every row, by their indices."""

    @property
    def chunk(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def shared(self) -> bool: ...

    @property
    def period(self) -> int:
        """Steps within which every coordinate is sent at least once; 0 if there is no such bound."""

    def indices(
        self, coefficients: Tensor, step: int, seed: int
    ) -> Tensor: ...  # [rows, chunk] -> [rows, k] int64

    def for_rows(self, first: int, rows: int) -> Selection:
        """The selection for a bucket that begins at row `first` of a flat of `rows` rows."""


@dataclass(frozen=True)
class Everything:
    """All coordinates at every step."""

    chunk: int = 1
    k: int = 1
    shared: bool = True
    period: int = 1

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        # [rows, chunk] -> [rows, k] int64
        return torch.arange(self.k, dtype=torch.int64, device=coefficients.device).expand(
            len(coefficients), -1
        )

    def for_rows(self, first: int, rows: int) -> Everything:
        return self


@dataclass(frozen=True)
class TopK:
    """The `topk` coefficients of largest magnitude in every chunk, in the order of their indices.

    It is not specified which of equal magnitudes is chosen. On a CPU, magnitudes that differ only
    in their lowest log2(chunk) bits may count as equal.
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
        # [rows, chunk] -> [rows, k] int64
        if self.chunk in TOPK_CHUNKS and coefficients.device.type == "cpu" and len(coefficients):
            if self.chunk in kernel_library.KERNEL_CHUNKS and (
                library := kernel_library.load_library()
            ):
                return library.topk(coefficients.contiguous(), self.topk).to(torch.int64)
            return topk_indices(coefficients, self.topk, max(1, CACHE_BLOCK // self.chunk))
        return coefficients.abs().topk(self.topk, dim=1, sorted=False).indices.sort(1).values

    def for_rows(self, first: int, rows: int) -> TopK:
        return self


SMALLEST_RATE = 1e-6
"""With a smaller rate a row would be longer than any model."""


@dataclass(frozen=True)
class Rotation:
    """Base class of selections that ignore the data: each step sends one of `shares` equal parts of
    a row.

    `shares = ceil(1 / rate)`, so no step sends more than `rate`. A rate that is not one over a
    whole number is rounded down. The chunk is a multiple of `shares`, so every message has the same
    size. In `period` steps every coordinate is sent exactly once.
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
        # at rate 1 rows of one: no padding is sent
        return 1 if self.shares == 1 else max(1, 64 // self.shares)

    @cached_property
    def chunk(self) -> int:
        return self.shares * self.k

    def place(self, step: int, seed: int) -> tuple[int, int, int]:
        """Number of the cycle, part of it that `step` sends, and the number that changes the rows'
        permutations."""
        return *divmod(step, self.shares), 0

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        # [rows, chunk] -> [rows, k] int64
        raise NotImplementedError

    def for_rows(self, first: int, rows: int) -> Rotation:
        return self


@dataclass(frozen=True)
class Random(Rotation):
    """A random subset, the same on every replica.

    Each row walks through one of 64 permutations of its indices. Every cycle of `shares` steps
    draws new permutations and assigns them to rows anew. Work and memory per step grow with the
    coefficients sent, not with the flat.

    Args:
        cycle: Whether a row keeps its permutation for a cycle, so that each coordinate is sent once
            per cycle. Otherwise each step assigns the permutations anew, and the time between two
            sendings of a coordinate has no bound.
        first: For a bucket, number of its first row in the flat.
        rows: For a bucket, rows of the flat; 0 for a selection of the whole flat.
    """

    cycle: bool = True
    first: int = 0
    rows: int = 0

    @property
    def period(self) -> int:
        return self.shares if self.cycle or self.shares == 1 else 0

    def place(self, step: int, seed: int) -> tuple[int, int, int]:
        number, share, _ = super().place(step, seed)
        return number, share, 0 if self.cycle else random_start(seed, step, 2) % _TABLES

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        number, share, deal = self.place(step, seed)
        device = coefficients.device
        table = _permutations(self.chunk, seed, number, device)[
            :, share * self.k : (share + 1) * self.k
        ]
        choices = _choices(self.rows or len(coefficients), seed, number, device)
        mine = choices[self.first : self.first + len(coefficients)]
        return table[(mine if self.cycle else mine ^ deal).long()]

    def for_rows(self, first: int, rows: int) -> Random:
        return replace(self, first=first, rows=rows)


@dataclass(frozen=True)
class Striding(Rotation):
    """A comb: every `period`-th coordinate, with an offset that moves by one each step."""

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        device = coefficients.device
        comb = torch.arange(
            self.place(step, seed)[1], self.chunk, self.shares, dtype=torch.int64, device=device
        )
        return comb.expand(len(coefficients), -1)


def random_start(*key: int) -> int:
    """The int64 from which the random words for `key` follow.

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
    """Random permutations: the order of random words. Their low bits are the index, so no two are
    equal."""
    bits = (size - 1).bit_length()
    words = (
        _random_words(_TABLES * size, device, seed, cycle, 0).view(_TABLES, size) >> bits << bits
    )
    return words.add_(torch.arange(size, dtype=torch.int64, device=device)).argsort(1)  # [64, size]


@lru_cache(maxsize=4)
def _choices(rows: int, seed: int, cycle: int, device: torch.device) -> Tensor:
    octets = _random_words(-(-rows // 8), device, seed, cycle, 1).view(torch.uint8)
    return octets[:rows].bitwise_and_(_TABLES - 1)  # [rows] uint8


def _random_words(count: int, device: torch.device, *key: int) -> Tensor:
    """`count` random words that depend on `key` alone, so a resumed run restores no counter.

    Splitmix64 (Steele, Lea & Flood, 2014) in integers. Generators of torch give other numbers on
    other devices, even on GPUs of other sizes; replicas would select other coordinates.

    Shapes: -> `[count]` int64.
    """
    words, start = torch.empty(count, dtype=torch.int64, device=device), random_start(*key)
    for first in range(0, count, _SOME):
        block = words[first : first + _SOME]  # each operation within a cache
        torch.arange(first + 1, first + 1 + len(block), dtype=torch.int64, device=device, out=block)
        block.mul_(signed(_GOLDEN)).add_(start)
        for shift, factor in _ROUNDS:
            block.bitwise_xor_((block >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(
                signed(factor)
            )
    return words


_TABLES = 64
"""Number of permutations that rows choose from; a power of two."""
_SOME = 1 << 14
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The shifts and factors of splitmix64."""
