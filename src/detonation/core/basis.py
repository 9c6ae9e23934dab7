"""Basis: the coordinates in which a chunk is looked at before anything is selected."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Basis(Protocol):
    """An orthonormal change of coordinates of every row. Pure; the inverse undoes it up to rounding."""

    def forward(self, chunks: Tensor) -> Tensor: ...  # [rows, chunk] -> [rows, chunk]

    def inverse(self, coefficients: Tensor) -> Tensor: ...  # [rows, chunk] -> [rows, chunk]


@dataclass(frozen=True)
class Identity:
    """The coordinates of the parameters themselves."""

    def forward(self, chunks: Tensor) -> Tensor:
        return chunks

    def inverse(self, coefficients: Tensor) -> Tensor:
        return coefficients


@dataclass(frozen=True)
class DCT:
    """Orthonormal DCT-II of every chunk, as in DeMo (Peng, Quesnelle & Kingma, arXiv 2411.19870)."""

    def forward(self, chunks: Tensor) -> Tensor:
        return chunks @ dct_matrix(chunks.shape[1], chunks.device)

    def inverse(self, coefficients: Tensor) -> Tensor:
        return coefficients @ dct_matrix(coefficients.shape[1], coefficients.device).T


@lru_cache(maxsize=16)
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """Columns are the DCT-II basis vectors.

    Built from the closed form in float64: a basis taken from an FFT differs in its last bits between thread counts,
    and replicas would drift apart.
    """  # [size, size] fp32
    at = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * torch.outer(at + 0.5, at)) * math.sqrt(2 / size)
    matrix[:, 0] = math.sqrt(1 / size)
    return matrix.to(torch.float32).to(device)
