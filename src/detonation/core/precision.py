"""Precision: how a told coefficient is written down."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Precision(Protocol):
    """Pure: `decode(encode(values))` is what the receivers read."""

    @property
    def summable(self) -> bool:
        """Whether encoded values may be added up by the network (all-reduce)."""
        ...

    def encode(self, values: Tensor) -> Tensor: ...  # [rows, kept] fp32 -> one tensor that owns its memory

    def decode(self, encoded: Tensor) -> Tensor: ...  # -> [rows, kept] fp32

    def nbytes(self, rows: int, kept: int) -> int: ...


@dataclass(frozen=True)
class Float:
    """A floating-point type as it is."""

    dtype: torch.dtype
    summable: bool = True

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype, copy=True)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.to(torch.float32)

    def nbytes(self, rows: int, kept: int) -> int:
        return rows * kept * self.dtype.itemsize


PRECISIONS: dict[str, Precision] = {"fp32": Float(torch.float32), "bf16": Float(torch.bfloat16)}
