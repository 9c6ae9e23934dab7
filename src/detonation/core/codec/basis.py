"""Bases: orthonormal transforms of each chunk, before coefficients are selected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from detonation.core.compute.scatter_sum import product_in_order, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

_ONE = 1 << 120
_PI = 0x3243F6A8885A308D313198A2E037073
"""Pi as a fixed-point integer, in units of 1 / `_ONE`."""


class Basis(Protocol):
    """An orthonormal transform of every row. Both directions are pure functions; `inverse` undoes
    `forward` up to rounding.

    `forward` may round differently on different processors, because its results are sent: all
    replicas receive the same coefficients. `inverse` must compute the same bits on every processor,
    because each replica computes the update by itself.
    """

    @property
    def tile(self) -> int:
        """Side of the square tile that a row holds; 0 if a row holds neighbouring coordinates."""

    def forward(self, chunks: Tensor) -> Tensor: ...  # shapes: [rows, chunk] -> [rows, chunk]

    def inverse(self, coefficients: Tensor) -> Tensor: ...  # shapes: [rows, chunk] -> [rows, chunk]


@dataclass(frozen=True)
class Identity:
    """No transform: coefficients are the coordinates of the parameters."""

    tile: ClassVar[int] = 0

    def forward(self, chunks: Tensor) -> Tensor:  # shapes: [rows, chunk] -> [rows, chunk]
        return chunks

    def inverse(self, coefficients: Tensor) -> Tensor:  # shapes: [rows, chunk] -> [rows, chunk]
        return coefficients


@dataclass(frozen=True)
class DCT:
    """Orthonormal DCT-II of every chunk, as in DeMo (Peng, Quesnelle & Kingma, arXiv
    2411.19870)."""

    tile: ClassVar[int] = 0

    def forward(self, chunks: Tensor) -> Tensor:  # shapes: [rows, chunk] -> [rows, chunk]
        waves = dct_waves(chunks.shape[1], chunks.device)
        # On a CPU the result is column-major: top-k reads one coefficient of all rows at a time.
        if chunks.device.type == "cpu":
            return _product(waves, chunks).T
        return _product(chunks, waves)

    def inverse(self, coefficients: Tensor) -> Tensor:  # shapes: [rows, chunk] -> [rows, chunk]
        return product_in_order(coefficients, dct_waves(coefficients.shape[1], coefficients.device))

    def inverse_sparse(self, values: Tensor, indices: Tensor, chunk: int) -> Tensor:
        """Computes the inverse transform of rows with few nonzero coefficients. Coefficients of a
        row with equal indices are added.

        Shapes: values `[rows, k]` fp32, indices `[rows, k]` integer -> `[rows, chunk]` fp32.
        """
        return weighted_sum(dct_waves(chunk, values.device), values, indices)


@dataclass(frozen=True)
class TileDCT:
    """Orthonormal DCT-II of every square tile along both of its sides, as in DeMo.

    The transform along one side is a product with a matrix of `tile` x `tile` numbers. The inverse
    transform processes first the lines of a tile, then the columns of this tile.
    """

    tile: int

    def forward(self, chunks: Tensor) -> Tensor:  # shapes: [rows, chunk] -> [rows, chunk]
        matrix = dct_matrix(self.tile, chunks.device)
        return (matrix.T @ self._squares(chunks) @ matrix).view_as(chunks)

    def inverse(self, coefficients: Tensor) -> Tensor:  # shapes: [rows, chunk] -> [rows, chunk]
        waves = dct_waves(self.tile, coefficients.device)
        tiles = self._squares(coefficients)
        for _ in range(2):
            tiles = product_in_order(tiles.reshape(-1, self.tile), waves).view(tiles.shape).mT
        return tiles.reshape(coefficients.shape)

    def _squares(self, rows: Tensor) -> Tensor:  # shapes: [rows, tile * tile] -> [rows, tile, tile]
        return rows.view(len(rows), self.tile, self.tile)


@lru_cache(maxsize=16)
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """The matrix whose columns are the DCT-II basis vectors, with the same bits on every machine.

    The cosines are computed in integer arithmetic. A library's cosine differs in its last bit
    between processors, and the result of an FFT depends on the count of threads. So with a
    library's cosine or an FFT, replicas on different machines would diverge.

    Shapes: -> `[size, size]` fp32.
    """
    at = torch.arange(size, dtype=torch.int64, device="cpu")
    steps = torch.outer(2 * at + 1, at) % (4 * size)  # angles in units of pi / (2 * size)
    scale = math.isqrt(2 * _ONE * _ONE // size)
    waves = [_cosine(number, 2 * size) * scale / (_ONE * _ONE) for number in range(2 * size + 1)]
    cosines = torch.tensor(waves, dtype=torch.float64, device="cpu")
    matrix = cosines[torch.minimum(steps, 4 * size - steps)]
    # every processor rounds a square root correctly, so the bits of the root are always equal
    matrix[:, 0] = math.sqrt(1 / size)
    return matrix.to(torch.float32).to(device)


def _cosine(number: int, steps: int) -> int:
    """The cosine of pi * `number` / `steps`, from its Taylor series. The result is a fixed-point
    integer, in units of 1 / `_ONE`."""
    if 2 * number > steps:
        return -_cosine(steps - number, steps)
    square = (_PI * number // steps) ** 2 // _ONE
    total = term = _ONE
    for factor in range(1, 40, 2):
        term = -term * square // _ONE // (factor * (factor + 1))
        total += term
    return total


@lru_cache(maxsize=16)
def dct_waves(size: int, device: torch.device) -> Tensor:
    """The DCT-II basis vectors, one per row: the transpose of `dct_matrix`.

    Shapes: -> `[size, size]` fp32, contiguous.
    """
    return dct_matrix(size, device).T.contiguous()


@lru_cache
def _one_dnn() -> Callable[..., Tensor] | None:
    if not torch._C._has_mkldnn:
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """`one @ other.T`, computed by oneDNN on a CPU.

    MKL, which torch uses by default, has half the throughput of oneDNN on AMD processors.
    """
    if one.device.type == "cpu" and one.numel() and other.numel() and (product := _one_dnn()):
        return product(one, other, None, "none", [], "")
    return one @ other.T
