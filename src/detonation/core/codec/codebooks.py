"""Codebooks: number formats that send a short code for each value, and for each block of values the
statistics that decode its codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import pack, packed_bytes, unpack

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockCodebook:
    """Base class of number formats that send a packed code of `width` bits for each value, and
    `statistics` numbers for each block of values.

    Statistics are sent in bf16. The sender decodes its own message from these rounded statistics,
    as every receiver does.
    """

    width: ClassVar[int]
    statistics: ClassVar[int]  # number of statistics per block
    block: ClassVar[int] = 1024
    summable: ClassVar[bool] = False

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        # [..., rows, k] fp32 -> [..., nbytes] uint8
        *messages, rows, k = values.shape
        count = rows * k
        blocks, counts = blocked(values.reshape(*messages, count), self.block)
        codes, statistics = self.quantise(blocks, counts, negative_zeros)
        of_each = -(-count // self.block)
        line = codes.view(*messages, of_each * self.block)[..., :count]
        stated = statistics.to(torch.bfloat16).view(*messages, of_each * self.statistics)
        return torch.cat([pack(line, self.width), stated.view(torch.uint8)], -1)

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:
        # [..., nbytes] uint8 -> [..., rows, k] fp32
        packed, statistics = torch.split(encoded, list(self.lengths(rows, k)), -1)
        return decoded(packed, self.all_levels(statistics), 0, (rows, k), self.width, self.block)

    def all_levels(self, statistics: Tensor) -> Tensor:
        """The values that the codes stand for (levels), for each block of each message. They are
        computed from the bytes of the statistics.

        Shapes: `[..., nbytes]` uint8 -> `[..., blocks, 2**width]` fp32.
        """
        stated = self._statistics(statistics)
        return self.levels(stated.flatten(0, -2)).view(*stated.shape[:-1], 2**self.width)

    @lru_cache(maxsize=256)  # noqa: B019 (a codebook is a value of a fixed table)
    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        count = rows * k
        return packed_bytes(count, self.width), 2 * self.statistics * -(-count // self.block)

    @lru_cache(maxsize=256)  # noqa: B019 (as above)
    def nbytes(self, rows: int, k: int) -> int:
        return sum(self.lengths(rows, k))

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:
        # [..., nbytes] uint8
        statistics = self._statistics(encoded[..., self.lengths(rows, k)[0] :])
        norms: Tensor = torch.linalg.vector_norm(statistics.abs().amax(-1), dim=-1)
        allowed = self.allowed(statistics.flatten(0, -2)).view_as(statistics)
        return allowed.flatten(-2).all(-1), norms.mul_(min(self.block, rows * k) ** 0.5)

    def _statistics(self, octets: Tensor) -> Tensor:
        # [..., nbytes] uint8 -> [..., blocks, statistics] fp32
        line = octets.reshape(-1)
        if line.device.type == "cpu" or line.storage_offset() % 2:
            # copied, because torch reads bf16 only from aligned addresses
            line = line.clone()
        blocks = octets.shape[-1] // (2 * self.statistics)
        return line.view(torch.bfloat16).float().view(*octets.shape[:-1], blocks, self.statistics)

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        """The code of each value and the statistics of each block.

        Args:
            blocks: Values, with zeros as padding after the last one of a block.
            counts: Number of values in each block, without the padding.
            negative_zeros: Whether zeros are sent as negative, if no code stands for zero.

        Shapes: blocks `[blocks, block]`, counts `[blocks, 1]` fp32 -> codes `[blocks, block]`
        integer, `[blocks, statistics]` fp32.
        """
        raise NotImplementedError

    def levels(self, statistics: Tensor) -> Tensor:
        """The value that each code stands for, in each block. By default these values are the
        statistics themselves.

        Shapes: `[blocks, statistics]` fp32 -> `[blocks, 2**width]` fp32.
        """
        return statistics

    def allowed(self, statistics: Tensor) -> Tensor:
        """True for each finite statistic that `quantise` can return; any other statistic comes from
        a damaged message. NaN and infinity are found by the norm in `check`.

        Shapes: `[blocks, statistics]` fp32 -> the same in bool.
        """
        return statistics >= 0


@dataclass(frozen=True)
class Sign(BlockCodebook):
    """One bit per value: its sign. A value decodes to its sign times the mean magnitude of its
    block (Karimireddy et al., arXiv 1901.09847)."""

    width = 1
    statistics = 1

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        magnitude = blocks.abs().sum(1, keepdim=True) / counts
        return is_negative(blocks, magnitude, negative_zeros).to(torch.uint8), magnitude

    def levels(self, statistics: Tensor) -> Tensor:
        return torch.cat([statistics, -statistics], 1)


@dataclass(frozen=True)
class TwoBit(BlockCodebook):
    """Two bits per value: the values of a block are divided into four ranges at 0 and at plus and
    minus one standard deviation. A value decodes to the mean of its range.

    MuLoCo (arXiv 2505.23725) found that a code of two bits needs the means of the ranges instead
    of evenly spaced values. The two ranges next to 0 share the mean of their magnitudes. So a zero
    decodes to the same magnitude, whether it is sent as positive or as negative.
    """

    width = 2
    statistics = 4

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        size = blocks.abs()
        deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
        large = size > deviation
        negative = is_negative(blocks, deviation, negative_zeros)
        # sum along rows, because scatter_add has no fixed order on an accelerator
        tails = blocks * large
        over = tails.clamp(min=0).sum(1, keepdim=True)
        under = tails.clamp(max=0).sum(1, keepdim=True)
        far = large.sum(1, keepdim=True, dtype=size.dtype)
        above = (tails > 0).sum(1, keepdim=True, dtype=size.dtype)
        small = size.masked_fill_(large, 0.0).sum(1, keepdim=True) / (counts - far).clamp_(min=1)
        over = over / above.clamp(min=1)
        under = under / (far - above).clamp_(min=1)
        codes = large.to(torch.uint8).add_(negative, alpha=2)
        return codes, torch.cat([small, over, -small, under], 1)

    def allowed(self, statistics: Tensor) -> Tensor:
        return torch.cat([statistics[:, :2], -statistics[:, 2:]], 1) >= 0


@dataclass(frozen=True)
class E3M0(BlockCodebook):
    """Four bits per value: a sign, and one of eight exponents. Seven exponents stand for the
    block's largest magnitude divided by 1, 2, 4 and so on to 64 (arXiv 2501.18512).

    The smallest exponent stands for zero, as in every floating-point format.
    """

    width = 4
    statistics = 1
    block = 256

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        kernel = _exact_kernel(values)
        if kernel is None:
            return super().encode(values, negative_zeros)
        nbytes = self.nbytes(values.shape[-2], values.shape[-1])
        return kernel.encode_powers(values.flatten(-2), octave_limits(), nbytes)

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        size = blocks.abs()
        largest = size.amax(1, keepdim=True).to(torch.bfloat16).float()
        tiny = size <= largest / 128
        octaves = torch.div(largest, size, out=size).log2_().round_()
        octaves.clamp_(0, 6).masked_fill_(tiny, 7)
        return octaves.to(torch.uint8).add_(blocks < 0, alpha=8), largest

    def levels(self, statistics: Tensor) -> Tensor:
        falling = _powers(statistics.device)
        return torch.cat([statistics * falling, -statistics * falling], 1)


@dataclass(frozen=True)
class Int8(BlockCodebook):
    """Eight bits per value: 255 bins of equal width, which reach six standard deviations to either
    side of 0. A value decodes to the mean of all values in its bin.

    INTELLECT-1 (arXiv 2412.01152) has the same bins, with one codebook per 65,536 values. In this
    class the bins are centred on 0 instead of on the mean of the values, and the bin that contains
    0 decodes to 0.
    """

    width = 8
    statistics = 256
    block = 65536

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
        bins = deviation.clamp_(min=1e-30) * (12 / 256)
        scaled = blocks / bins
        codes = scaled.round().clamp_(-127, 127).to(torch.int64).add_(128)
        # sums of whole numbers are exact, so the order of scatter_add does not matter
        sizes = torch.zeros(len(blocks), 256, dtype=torch.float32, device=blocks.device)
        sizes.scatter_add_(1, codes, ones(len(blocks), blocks.device).expand_as(codes))
        # the zeros of the padding were counted in the bin of 0
        sizes[:, 128:129] -= self.block - counts
        units = scaled.mul_(_FIXED_POINT).round_().double()
        totals = torch.zeros_like(sizes, dtype=torch.float64).scatter_add_(1, codes, units)
        totals[:, 128] = 0
        return codes, totals.float() / sizes.clamp_(min=1) * (bins / _FIXED_POINT)

    def allowed(self, statistics: Tensor) -> Tensor:
        return torch.ones_like(statistics, dtype=torch.bool)


_FIXED_POINT = 4096
"""Number of fixed-point units in the width of a bin. The sum of a block is at most 2**41 units, so
it is exact in fp64, which holds every integer up to 2**53.
"""


def is_negative(blocks: Tensor, scale: Tensor, negative_zeros: bool) -> Tensor:
    """True for values that are sent as negative. A value counts as zero if it is no larger than the
    rounding error of values of size `scale`.

    A momentum that gets no new gradients never becomes exactly 0: rounding errors of the transform
    remain in it, and later denormal numbers, which the decay does not reduce.

    Shapes: `[blocks, block]` and `[blocks, 1]` fp32 -> `[blocks, block]` bool.
    """
    zero = scale * 2**-18
    if negative_zeros:
        return blocks <= zero
    return blocks < -zero


def blocked(lines: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Cuts lines of values into blocks; zeros fill the last block of a line. Also returns the
    number of values per block.

    Shapes: `[..., n]` -> `[blocks, block]` and `[blocks, 1]` fp32.
    """
    missing = -lines.shape[-1] % block
    if missing:
        lines = torch.nn.functional.pad(lines, (0, missing))
    blocks = lines.reshape(-1, block)  # all blocks of the first line come before those of the next
    of_a_line = lines.shape[-1] // block
    return blocks, _counts(len(blocks), of_a_line, block - missing, block, lines.device)


@lru_cache(maxsize=64)
def _counts(
    blocks: int, blocks_of_a_line: int, last: int, block: int, device: torch.device
) -> Tensor:
    """Number of values in each block: `last` in the last block of each line, `block` in all other
    blocks.

    Shapes: -> `[blocks, 1]` fp32.
    """
    counts = torch.full((blocks, 1), float(block), dtype=torch.float32, device=device)
    if blocks:
        counts[blocks_of_a_line - 1 :: blocks_of_a_line].fill_(float(last))
    return counts


@lru_cache(maxsize=64)
def ones(count: int, device: torch.device) -> Tensor:
    """A column of ones, cached.

    Shapes: -> `[count, 1]` fp32.
    """
    return torch.ones(count, 1, dtype=torch.float32, device=device)


def decoded(
    packed: Tensor, levels: Tensor, first: int, shape: tuple[int, int], width: int, block: int
) -> Tensor:
    """Decodes the values of some rows from their codes, for one or several messages.

    Args:
        packed: Codes of `width` bits.
        levels: Values by code, for all blocks of each message.
        first: Number of the block with which the rows begin.
        shape: Number of rows, and values per row.

    Shapes: packed `[..., nbytes]` uint8, levels `[..., blocks, 2**width]` fp32 -> `[..., rows, k]`
    fp32.
    """
    messages = packed.shape[:-1]
    count = math.prod(shape)
    kernel = _exact_kernel(packed)
    if kernel and width <= 4:
        line = kernel.look_up(packed, levels, first, count, width, block)
        return line.view(*messages, *shape)
    codes = unpack(packed, count, width, torch.uint8)
    missing = -count % block
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    blocks = codes.shape[-1] // block
    codes = codes.view(*messages, blocks, block)
    read = slice(first, first + blocks)
    if codes.device.type == "cpu" and width == 1:
        values = torch.where(codes.view(torch.bool), levels[..., read, 1:], levels[..., read, :1])
    else:
        firsts = _firsts(levels.numel() // levels.shape[-1], levels.shape[-1], levels.device)
        # `_firsts` is int32 where possible, because int64 positions would need twice the memory
        positions = firsts.view(*levels.shape[:-1], 1)[..., read, :] + codes
        values = levels.view(-1).index_select(0, positions.view(-1)).view(codes.shape)
    return values.view(*messages, blocks * block)[..., :count].view(*messages, *shape)


@lru_cache(maxsize=64)
def _firsts(blocks: int, levels: int, device: torch.device) -> Tensor:
    """Index of the first level of each block in the flattened levels.

    Shapes: -> `[blocks, 1]` integer.
    """
    end = blocks * levels
    dtype = torch.int32
    if end >= 2**31:
        dtype = torch.int64
    return torch.arange(0, end, levels, dtype=dtype, device=device).unsqueeze(1)


def _exact_kernel(values: Tensor) -> kernel_library.Library | None:
    """The compiled kernels for `values` on a CPU; None on another device or without kernels. They
    compute the same bits as torch, so replicas with and without kernels get equal results.
    """
    if values.device.type != "cpu":
        return None
    return kernel_library.load_library()


@lru_cache(maxsize=1)
def octave_limits() -> Tensor:
    """For each number of octaves from 0 to 5, the largest ratio that `E3M0` rounds to it. The
    ratios follow torch's rounding of logarithms on this machine.

    Shapes: -> `[6]` fp32.
    """
    octaves = torch.arange(6, dtype=torch.float32, device="cpu").unsqueeze(1)
    nearest = torch.exp2(octaves + 0.5).view(torch.int32)
    steps = torch.arange(-16, 17, dtype=torch.int32, device="cpu")
    ratios = nearest.add(steps).view(torch.float32)
    is_below = ratios.log2().round_() <= octaves
    return ratios.masked_fill_(is_below.logical_not(), 0.0).amax(1)


@lru_cache(maxsize=8)
def _powers(device: torch.device) -> Tensor:
    """The value of each code of `E3M0`, relative to the block's largest magnitude."""
    falling = torch.ones(8, dtype=torch.float32, device=device)
    for exponent in range(1, 8):
        falling[exponent:] *= 0.5  # halved, because `exp2` is not exact on every processor
    falling[7] = 0
    return falling
