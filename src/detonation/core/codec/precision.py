"""Precisions: the number formats in which the coefficients of a message are sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from detonation.core.codec.codebooks import E3M0, Int8, Sign, TwoBit

if TYPE_CHECKING:
    from torch import Tensor


class Precision(Protocol):
    """A number format for the values of a message, as two pure functions. Receivers decode with
    `decode(encode(values), rows, k)`.

    The encoding is an odd function: if all values, and the sign that zeros get, are negated, all
    decoded values are negated. Without this property, parameters with sent values near zero would
    drift in one direction. Dimensions of a tensor before `rows` stand for several messages.
    """

    @property
    def summable(self) -> bool:
        """True if an all-reduce can add encoded values."""

    @property
    def block(self) -> int:
        """Number of values in a block. The values of a block are encoded together, and a message
        can be cut between blocks."""

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        """Encodes values in this number format.

        Args:
            negative_zeros: Whether zeros are sent as negative, if no code stands for zero; see
                `zeros_are_negative`.

        Shapes: `[..., rows, k]` fp32 -> one tensor that owns its memory.
        """

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor: ...  # -> [..., rows, k] fp32

    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        """Bytes of each part of an encoding, such as codes and statistics. Every part can be cut
        between two blocks."""

    def nbytes(self, rows: int, k: int) -> int: ...

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[Tensor | None, Tensor]:
        """Returns whether `encode` can have produced the statistics of an encoding, and the norm of
        the encoded values.

        The first result is None for a precision without statistics. The norm may be an upper bound;
        it is NaN or infinite if any value is NaN or infinite.

        Shapes: the output of `encode` -> `[...]` bool, `[...]` fp32.
        """


@dataclass(frozen=True)
class Float:
    """Values in a floating-point type of torch that has `size` bytes. The type is given by its
    `name`, so that the command `plan` need not import torch.
    """

    name: str
    size: int
    summable: bool = True
    block: ClassVar[int] = 1

    @cached_property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.name)  # type: ignore[no-any-return]

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        # shapes: [..., rows, k] fp32 -> [..., rows, k] of `dtype`
        return values.to(self.dtype, copy=True)

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:
        # shapes: [..., rows, k] of `dtype` -> [..., rows, k] fp32
        return encoded.to(torch.float32)

    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        return (self.nbytes(rows, k),)

    def nbytes(self, rows: int, k: int) -> int:
        return rows * k * self.size

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[None, Tensor]:
        # shape: [..., rows, k] of `dtype`
        return None, torch.linalg.vector_norm(encoded, dim=(-2, -1), dtype=torch.float32)


def numbers(octets: Tensor, dtype: torch.dtype) -> Tensor:
    """Views bytes as numbers of `dtype`. If the address of the bytes is not aligned for `dtype`,
    copies the bytes first.

    Shapes: `[messages, nbytes]` uint8 -> `[messages, n]` of `dtype`.
    """
    messages = len(octets)
    if not octets.numel():
        return octets.new_empty(messages, 0, dtype=dtype)
    # `view` checks even the stride of a dimension of size 1, so this dimension is dropped
    if messages == 1:
        octets = octets[0]
    size = dtype.itemsize
    if octets.storage_offset() % size or any(stride % size for stride in octets.stride()[:-1]):
        octets = octets.clone(memory_format=torch.contiguous_format)
    return octets.view(dtype).view(messages, -1)


FP32 = Float("float32", 4)

PRECISIONS: dict[str, Precision] = {
    "fp32": FP32,
    "bf16": Float("bfloat16", 2),
    "int8": Int8(),
    "4bit": E3M0(),
    "2bit": TwoBit(),
    "sign": Sign(),
}
