"""Precisions: how the coefficients of a message are encoded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from detonation.core.codec.zeros import is_negative
from detonation.core.compute.bitpack import pack, packed_bytes
from detonation.core.compute.value_blocks import blocked, decoded, line_of, ones

if TYPE_CHECKING:
    from torch import Tensor


class Precision(Protocol):
    """A pure encoding of values: receivers read `decode(encode(values), rows, k)`; of several messages at once, too.

    It is odd: the negated values, with the other sign of zeros, read as the negated result. Otherwise values that are
    zero, or noise around zero, would move a parameter in one direction.
    """

    @property
    def summable(self) -> bool:
        """True if an all-reduce can add encoded values."""
        ...

    @property
    def block(self) -> int:
        """The number of values that are encoded together: a message may be cut between blocks."""
        ...

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        """Encodes values.

        Args:
            negative_zeros: The sign of zeros, where no code stands for zero: see `zeros_are_negative`.

        Shapes: `[..., rows, k]` fp32 -> one tensor that owns its memory.
        """
        ...

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor: ...  # -> [..., rows, k] fp32

    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        """The bytes of each part of an encoding; between two blocks every part can be cut."""
        ...

    def nbytes(self, rows: int, k: int) -> int: ...

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[Tensor | None, Tensor]:
        """True if `encode` can produce the statistics (None if there are none), and the norm of the values.

        The norm may be an upper bound by the statistics. It is not finite where a value is not.

        Shapes: the output of `encode` -> `[...]` bool, `[...]` fp32.
        """
        ...


@dataclass(frozen=True)
class Float:
    """Values in a floating-point type of torch, of `size` bytes; named, so that bytes are known without torch."""

    name: str
    size: int
    summable: bool = True
    block: ClassVar[int] = 1

    @cached_property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.name)  # type: ignore[no-any-return]

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        # [..., rows, k] fp32 -> [..., rows, k] of `dtype`
        return values.to(self.dtype, copy=True)

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:  # [..., rows, k] of `dtype` -> [..., rows, k] fp32
        return encoded.to(torch.float32)

    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        return (self.nbytes(rows, k),)

    def nbytes(self, rows: int, k: int) -> int:
        return rows * k * self.size

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[None, Tensor]:  # [..., rows, k] of `dtype`
        return None, torch.linalg.vector_norm(encoded, dim=(-2, -1), dtype=torch.float32)


@dataclass(frozen=True)
class BlockCodebook:
    """The base of the codebooks: a packed code of `width` bits per value, and a few statistics per block of values.

    The statistics are sent in bf16, and the sender decodes its own message from them as every receiver does.
    """

    width: ClassVar[int]
    statistics: ClassVar[int]  # numbers per block
    block: ClassVar[int] = 1024
    summable: ClassVar[bool] = False

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        # [..., rows, k] fp32 -> [..., nbytes] uint8
        messages, count = values.shape[:-2], values.shape[-2] * values.shape[-1]
        blocks, counts = blocked(values.reshape(*messages, count), self.block)
        codes, statistics = self.quantise(blocks, counts, negative_zeros)
        packed = pack(line_of(codes, messages)[..., :count], self.width)
        return torch.cat([packed, line_of(statistics.to(torch.bfloat16), messages).view(torch.uint8)], -1)

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:  # [..., nbytes] uint8 -> [..., rows, k] fp32
        packed, statistics = torch.split(encoded, list(self.lengths(rows, k)), -1)
        return decoded(packed, self.all_levels(statistics), 0, (rows, k), self.width, self.block)

    def all_levels(self, statistics: Tensor) -> Tensor:
        """The levels of all blocks of each message, from the bytes of their statistics.

        Shapes: `[..., nbytes]` uint8 -> `[..., blocks, 2**width]` fp32.
        """
        levels = self.levels(self._statistics(statistics))
        return levels.view(
            *statistics.shape[:-1], len(levels) // max(1, math.prod(statistics.shape[:-1])), 2**self.width
        )

    @lru_cache(maxsize=256)  # noqa: B019 (a codebook is a value of a fixed table)
    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        count = rows * k
        return packed_bytes(count, self.width), 2 * self.statistics * -(-count // self.block)

    @lru_cache(maxsize=256)  # noqa: B019 (as above)
    def nbytes(self, rows: int, k: int) -> int:
        return sum(self.lengths(rows, k))

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:  # [..., nbytes] uint8
        statistics, messages = self._statistics(encoded[..., self.lengths(rows, k)[0] :]), encoded.shape[:-1]
        largest = line_of(statistics.abs().amax(1), messages)
        norms: Tensor = torch.linalg.vector_norm(largest, dim=-1)
        return line_of(self.allowed(statistics), messages).all(-1), norms.mul_(min(self.block, rows * k) ** 0.5)

    def _statistics(self, octets: Tensor) -> Tensor:  # [..., nbytes] uint8 -> [blocks of all messages, statistics] fp32
        line = octets.reshape(-1)
        if line.device.type == "cpu" or line.storage_offset() % 2:  # torch reads numbers at their own addresses only
            line = line.clone()
        return line.view(torch.bfloat16).float().view(-1, self.statistics)

    def quantise(self, blocks: Tensor, counts: Tensor, negative_zeros: bool) -> tuple[Tensor, Tensor]:
        """The code of each value, and the statistics of each block.

        Args:
            counts: The values of each block; those after them are padding, and zeros.
            negative_zeros: The sign of zeros, where no code stands for zero.

        Shapes: blocks `[blocks, block]`, counts `[blocks, 1]` fp32 -> codes `[blocks, block]` integer, `[blocks,
        statistics]` fp32.
        """
        raise NotImplementedError

    def levels(self, statistics: Tensor) -> Tensor:
        """The value that each code of a block stands for.

        Shapes: `[blocks, statistics]` fp32 -> `[blocks, 2**width]` fp32.
        """
        raise NotImplementedError

    def allowed(self, statistics: Tensor) -> Tensor:
        """True for each finite statistic that `quantise` can return.

        Shapes: `[blocks, statistics]` fp32 -> `[blocks, statistics]` bool.
        """
        return statistics >= 0


@dataclass(frozen=True)
class Sign(BlockCodebook):
    """One bit: the sign, times the mean magnitude of its block (Karimireddy et al., arXiv 1901.09847)."""

    width = 1
    statistics = 1

    def quantise(self, blocks: Tensor, counts: Tensor, negative_zeros: bool) -> tuple[Tensor, Tensor]:
        magnitude = blocks.abs().sum(1, keepdim=True) / counts
        return is_negative(blocks, magnitude, negative_zeros).to(torch.uint8), magnitude

    def levels(self, statistics: Tensor) -> Tensor:
        return torch.cat([statistics, -statistics], 1)


@dataclass(frozen=True)
class TwoBit(BlockCodebook):
    """Two bits: values are split at 0 and at one standard deviation, and each part is decoded as its mean.

    MuLoCo (arXiv 2505.23725) finds that two bits need the means of the parts, not evenly spaced levels. The two parts
    next to 0 share the mean of their magnitudes, so that a zero reads as one magnitude under either sign.
    """

    width = 2
    statistics = 4

    def quantise(self, blocks: Tensor, counts: Tensor, negative_zeros: bool) -> tuple[Tensor, Tensor]:
        size = blocks.abs()
        deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
        large, negative = size > deviation, is_negative(blocks, deviation, negative_zeros)
        tails = blocks * large  # summed line by line: scatter_add would add in any order on an accelerator
        over, under = (part.sum(1, keepdim=True) for part in (tails.clamp(min=0), tails.clamp(max=0)))
        far, above = large.sum(1, keepdim=True, dtype=size.dtype), (tails > 0).sum(1, keepdim=True, dtype=size.dtype)
        small = size.masked_fill_(large, 0.0).sum(1, keepdim=True) / (counts - far).clamp_(min=1)
        over, under = over / above.clamp(min=1), under / (far - above).clamp_(min=1)
        return large.to(torch.uint8).add_(negative, alpha=2), torch.cat([small, over, -small, under], 1)

    def levels(self, statistics: Tensor) -> Tensor:
        return statistics

    def allowed(self, statistics: Tensor) -> Tensor:
        return statistics * _signs(statistics.device) >= 0


@dataclass(frozen=True)
class E3M0(BlockCodebook):
    """Four bits: a sign and seven powers of two, from the block's largest magnitude down (arXiv 2501.18512).

    As in every floating-point format, the smallest exponent stands for zero.
    """

    width = 4
    statistics = 1
    block = 256

    def quantise(self, blocks: Tensor, counts: Tensor, negative_zeros: bool) -> tuple[Tensor, Tensor]:
        size = blocks.abs()
        largest = size.amax(1, keepdim=True).to(torch.bfloat16).float()
        tiny = size <= largest / 128
        octaves = torch.div(largest, size, out=size).log2_().round_().clamp_(0, 6).masked_fill_(tiny, 7)
        return octaves.to(torch.uint8).add_(blocks < 0, alpha=8), largest

    def levels(self, statistics: Tensor) -> Tensor:
        falling = _powers(statistics.device)
        return torch.cat([statistics * falling, -statistics * falling], 1)


@dataclass(frozen=True)
class Int8(BlockCodebook):
    """Eight bits: 255 bins over six standard deviations on either side of 0, each decoded as its mean.

    As in INTELLECT-1 (arXiv 2412.01152), with one codebook per 65,536 values. The bins are centred on 0 instead of on
    the mean of the values, and the bin that contains 0 is decoded as 0.
    """

    width = 8
    statistics = 256
    block = 65536

    def quantise(self, blocks: Tensor, counts: Tensor, negative_zeros: bool) -> tuple[Tensor, Tensor]:
        deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
        bins = deviation.clamp_(min=1e-30) * (12 / 256)
        scaled = blocks / bins
        codes = scaled.round().clamp_(-127, 127).to(torch.int64).add_(128)
        # a sum of whole numbers is exact, so its order, which an accelerator does not fix, does not matter
        sizes = torch.zeros(len(blocks), 256, dtype=torch.float32, device=blocks.device)
        sizes.scatter_add_(1, codes, ones(len(blocks), blocks.device).expand_as(codes))
        sizes[:, 128:129] -= self.block - counts  # padding is zeros
        units = scaled.mul_(_FIXED_POINT).round_().double()
        totals = torch.zeros_like(sizes, dtype=torch.float64).scatter_add_(1, codes, units)
        totals[:, 128] = 0
        return codes, totals.float() / sizes.clamp_(min=1) * (bins / _FIXED_POINT)

    def levels(self, statistics: Tensor) -> Tensor:
        return statistics

    def allowed(self, statistics: Tensor) -> Tensor:
        return torch.ones_like(statistics, dtype=torch.bool)


_FIXED_POINT = 4096
"""Units in the width of a bin: the sum of a block is at most 2**41 of them, and fp64 holds each up to 2**53."""


FP32 = Float("float32", 4)

PRECISIONS: dict[str, Precision] = {
    "fp32": FP32,
    "bf16": Float("bfloat16", 2),
    "int8": Int8(),
    "4bit": E3M0(),
    "2bit": TwoBit(),
    "sign": Sign(),
}


@lru_cache(maxsize=8)
def _powers(device: torch.device) -> Tensor:
    """The share of the largest magnitude that each code of `E3M0` stands for."""
    falling = torch.ones(8, dtype=torch.float32, device=device)
    for exponent in range(1, 8):
        falling[exponent:] *= 0.5  # a library's `exp2` is exact on some processors alone
    falling[7] = 0
    return falling


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    """Of the four levels of two bits."""
    signs = torch.ones(4, dtype=torch.float32, device=device)
    signs[2:].neg_()
    return signs
