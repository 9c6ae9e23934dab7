"""Codebooks: number formats that send a short code for each value, and statistics for each block of
values. Receivers use the statistics of a block to decode its codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    statistics: ClassVar[int]  # count of statistics of a block
    block: ClassVar[int] = 1024
    summable: ClassVar[bool] = False

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        # shapes: [..., rows, k] fp32 -> [..., nbytes] uint8
        *messages, rows, k = values.shape
        count = rows * k
        blocks, counts = blocked(values.reshape(*messages, count), self.block)
        codes, statistics = self.quantise(blocks, counts, negative_zeros)
        of_each = -(-count // self.block)
        line = codes.view(*messages, of_each * self.block)[..., :count]
        stated = statistics.to(torch.bfloat16).view(*messages, of_each * self.statistics)
        return torch.cat([pack(line, self.width), stated.view(torch.uint8)], -1)

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:
        # shapes: [..., nbytes] uint8 -> [..., rows, k] fp32
        packed, statistics = torch.split(encoded, list(self.lengths(rows, k)), -1)
        return self.read(packed, self.all_levels(statistics), 0, (rows, k))

    def read(
        self,
        packed: Tensor,
        levels: Tensor,
        first: int,
        shape: tuple[int, int],
        mean: bool = False,
    ) -> Tensor:
        """Decodes the codes of consecutive rows to values, for one or several messages.

        Args:
            packed: The codes.
            levels: Values by code, for all blocks of each message.
            first: Index of the first block of these rows.
            shape: Number of rows, and values per row.
            mean: Whether the mean of all messages may be returned, as if it were a single message.

        Shapes: packed `[..., nbytes]` uint8, levels `[..., blocks, 2**width]` fp32 -> `[..., rows,
        k]` fp32.
        """
        count = math.prod(shape)
        kernel = _exact_kernel(packed)
        if kernel and self.width <= 4:
            line = kernel.look_up(packed, levels, first, count, self.width, self.block, mean)
            return line.view(*line.shape[:-1], *shape)
        messages = packed.shape[:-1]
        blocks = -(-count // self.block)
        missing = packed_bytes(blocks * self.block, self.width) - packed.shape[-1]
        if missing:
            packed = torch.nn.functional.pad(packed, (0, missing))
        of_blocks = levels[..., first : first + blocks, :]
        if packed.device.type == "cpu":
            values = self.look_up(packed, of_blocks)
        else:
            values = BlockCodebook.look_up(self, packed, of_blocks)
        return values.view(*messages, blocks * self.block)[..., :count].view(*messages, *shape)

    def look_up(self, packed: Tensor, levels: Tensor) -> Tensor:
        """The level (decoded value) of each code, for whole blocks. Subclasses replace this method
        by a faster version for a CPU without kernels.

        Shapes: `[..., nbytes]` uint8, `[..., blocks, 2**width]` fp32 -> `[..., blocks, block]`.
        """
        codes = unpack(packed, levels.shape[-2] * self.block, self.width, torch.uint8)
        return _at_codes(levels, codes.view(*levels.shape[:-1], self.block))

    def all_levels(self, statistics: Tensor) -> Tensor:
        """The levels (the values that codes stand for) of each block of each message, computed from
        the bytes of the block's statistics.

        Shapes: `[..., nbytes]` uint8 -> `[..., blocks, 2**width]` fp32.
        """
        stated = self._statistics(statistics)
        return self.levels(stated.flatten(0, -2)).view(*stated.shape[:-1], 2**self.width)

    @lru_cache(maxsize=256)  # noqa: B019 (the cache keeps few codebooks alive)
    def lengths(self, rows: int, k: int) -> tuple[int, ...]:
        count = rows * k
        return packed_bytes(count, self.width), 2 * self.statistics * -(-count // self.block)

    @lru_cache(maxsize=256)  # noqa: B019 (the cache keeps few codebooks alive)
    def nbytes(self, rows: int, k: int) -> int:
        return sum(self.lengths(rows, k))

    def check(self, encoded: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:
        # [..., nbytes] uint8
        statistics = self._statistics(encoded[..., self.lengths(rows, k)[0] :])
        norms: Tensor = torch.linalg.vector_norm(statistics.abs().amax(-1), dim=-1)
        allowed = self.allowed(statistics.flatten(0, -2)).view_as(statistics)
        return allowed.flatten(-2).all(-1), norms.mul_(min(self.block, rows * k) ** 0.5)

    def _statistics(self, octets: Tensor) -> Tensor:
        # shapes: [..., nbytes] uint8 -> [..., blocks, statistics] fp32
        line = octets.reshape(-1)
        if line.device.type == "cpu" or line.storage_offset() % 2:
            # the bytes are copied, because torch reads bf16 only from aligned addresses
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
        """True for each statistic that `quantise` can return; False means that the message is
        damaged.

        This method need not find NaN and infinity. With such statistics, `check` returns a norm
        that is NaN or infinite, and the receiver refuses the message.

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
        return is_negative(blocks, magnitude, negative_zeros).to(torch.int32), magnitude

    def levels(self, statistics: Tensor) -> Tensor:
        return torch.cat([statistics, -statistics], 1)

    def look_up(self, packed: Tensor, levels: Tensor) -> Tensor:
        codes = unpack(packed, levels.shape[-2] * self.block, 1, torch.uint8).view(torch.bool)
        return torch.where(
            codes.view(*levels.shape[:-1], self.block), levels[..., 1:], levels[..., :1]
        )


@dataclass(frozen=True)
class TwoBit(BlockCodebook):
    """Two bits per value. The limits -r, 0 and r divide the values of a block into four ranges,
    where r is the root mean square of the block. A value decodes to the mean of the values in its
    range.

    MuLoCo (arXiv 2505.23725) found that a code of two bits needs these means instead of evenly
    spaced values. The two ranges next to 0 share the mean of their magnitudes. So a zero decodes to
    the same magnitude, whether it is sent as positive or as negative.
    """

    width = 2
    statistics = 4

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        size = blocks.abs()
        deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
        large = flags(torch.gt, size, deviation)
        negative = is_negative(blocks, deviation, negative_zeros)
        # values are summed along rows: scatter_add has no fixed order on an accelerator
        tails = blocks * large
        over = tails.clamp(min=0).sum(1, keepdim=True)
        under = tails.clamp(max=0).sum(1, keepdim=True)
        far = large.sum(1, keepdim=True, dtype=size.dtype)
        above = flags(torch.gt, tails, 0).sum(1, keepdim=True, dtype=size.dtype)
        small = size.addcmul_(size, large, value=-1).sum(1, keepdim=True)
        small = small / (counts - far).clamp_(min=1)
        over = over / above.clamp(min=1)
        under = under / (far - above).clamp_(min=1)
        codes = large.to(torch.int32).add_(negative.to(torch.int32), alpha=2)
        return codes, torch.cat([small, over, -small, under], 1)

    def look_up(self, packed: Tensor, levels: Tensor) -> Tensor:
        # Two codes of 2 bits are one index of 4 bits into `pairs`, the 16 pairs of decoded values.
        each = levels.unsqueeze(-2).expand(*levels.shape, 4)
        pairs = torch.stack([each, each.mT], -1).view(torch.int64).flatten(-3)
        codes = unpack(packed, levels.shape[-2] * self.block // 2, 4, torch.uint8)
        codes = codes.view(*levels.shape[:-1], self.block // 2)
        return _at_codes(pairs, codes).view(torch.float32)

    def allowed(self, statistics: Tensor) -> Tensor:
        return torch.cat([statistics[:, :2], -statistics[:, 2:]], 1) >= 0


@dataclass(frozen=True)
class E3M0(BlockCodebook):
    """Four bits per value: one bit for the sign, three bits for one of eight exponents. Seven
    exponents stand for the block's largest magnitude divided by 1, 2, 4 and so on to 64 (arXiv
    2501.18512). The smallest exponent stands for zero.
    """

    width = 4
    statistics = 1
    block = 256

    def encode(self, values: Tensor, negative_zeros: bool = False) -> Tensor:
        kernel = _exact_kernel(values)
        if kernel is None:
            return super().encode(values, negative_zeros)
        *messages, rows, k = values.shape
        lines = values.to(torch.float32).reshape(math.prod(messages), rows * k)
        lengths = self.lengths(rows, k)
        encoded = torch.empty(len(lines), sum(lengths), dtype=torch.uint8, device="cpu")
        packed, statistics = torch.split(encoded, list(lengths), 1)
        kernel.encode_powers(lines, octave_limits(), packed, statistics)
        return encoded.view(*messages, sum(lengths))

    def encode_rest(self, values: Tensor, parts: Sequence[Tensor]) -> bool:
        """Encodes `values` into the `parts` of a message, and leaves only the rounding errors in
        `values`, in one pass. Returns False, and does nothing, if there is no kernel.

        Shapes: `[rows, k]` fp32; `[1, length]` uint8 each.
        """
        kernel = _exact_kernel(values)
        if kernel:
            packed, statistics = parts
            kernel.encode_powers(values.view(1, -1), octave_limits(), packed, statistics, True)
        return kernel is not None

    def quantise(
        self, blocks: Tensor, counts: Tensor, negative_zeros: bool
    ) -> tuple[Tensor, Tensor]:
        size = blocks.abs()
        largest = size.amax(1, keepdim=True).to(torch.bfloat16).float()
        is_tiny = flags(torch.le, size, largest / 128)
        size.add_(is_tiny)  # prevents 0 / 0
        octaves = torch.div(largest, size, out=size).log2_().round_().clamp_(0, 6)
        octaves.add_(is_tiny, alpha=7).clamp_(max=7)
        octaves.add_(flags(torch.lt, blocks, 0), alpha=8)
        return octaves.to(torch.int32), largest

    def levels(self, statistics: Tensor) -> Tensor:
        falling = _powers(statistics.device)
        return torch.cat([statistics * falling, -statistics * falling], 1)

    def look_up(self, packed: Tensor, levels: Tensor) -> Tensor:
        # The table decodes both codes of a byte, relative to the largest magnitude of the block.
        # Code 0 decodes to this largest magnitude, so its level scales the values of the table.
        numbers = packed.reshape(-1).to(torch.int32)
        pairs = _pairs(packed.device).index_select(0, numbers).view(torch.float32)
        return pairs.view(*levels.shape[:-1], self.block).mul_(levels[..., :1])


@dataclass(frozen=True)
class Int8(BlockCodebook):
    """Eight bits per value: 255 bins of equal width between minus and plus six times the root mean
    square of the block. A value decodes to the mean of all values in its bin.

    The bins follow INTELLECT-1 (arXiv 2412.01152), with one codebook per 65,536 values. But in this
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
        # subtracts the zeros of the padding, which were counted in the bin of 0
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
    """1 for values that are sent as negative, else 0. A value counts as zero if its magnitude is at
    most the rounding error of values of size `scale`; `negative_zeros` gives the sign of zeros.

    Without new gradients, the momentum of a coordinate never becomes exactly 0. At first rounding
    errors of the transform remain, and later denormal numbers that the decay does not reduce.

    Shapes: `[blocks, block]` and `[blocks, 1]` fp32 -> `[blocks, block]`, see `flags`.
    """
    zero = scale * 2**-18
    if negative_zeros:
        return flags(torch.le, blocks, zero)
    return flags(torch.lt, blocks, -zero)


def flags(compare: Callable[..., Tensor], values: Tensor, limits: Tensor | float) -> Tensor:
    """The result of a comparison: bool on an accelerator, and the fp32 numbers 1 and 0 on a CPU,
    where torch writes bool four times as slowly.

    Shapes: `[blocks, block]` fp32, and what broadcasts to it -> `[blocks, block]`.
    """
    if values.device.type == "cpu":
        return compare(values, limits, out=torch.empty_like(values))
    return compare(values, limits)


def blocked(lines: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Cuts lines of values into blocks. Zeros fill up the last block of each line. Also returns how
    many values each block holds, without these zeros.

    Shapes: `[..., n]` -> `[blocks, block]` and `[blocks, 1]` fp32.
    """
    missing = -lines.shape[-1] % block
    if missing:
        lines = torch.nn.functional.pad(lines, (0, missing))
    blocks = lines.reshape(-1, block)  # first all blocks of line 0, then all blocks of line 1
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


def _at_codes(levels: Tensor, codes: Tensor) -> Tensor:
    """The level (decoded value) of each code in its block.

    Shapes: `[..., blocks, levels]` of any type, `[..., blocks, block]` uint8 -> `[..., blocks,
    block]`.
    """
    flat = levels.reshape(-1)  # a copy if `levels` is not contiguous
    of_each = levels.shape[-1]
    # positions are int32 if possible, because int64 would take twice the storage
    firsts = _firsts(len(flat) // of_each, of_each, flat.device)
    positions = firsts.view(*codes.shape[:-1], 1) + codes
    return flat.index_select(0, positions.view(-1)).view(codes.shape)


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
    """The compiled kernels for `values` on a CPU; None on another device or without kernels. These
    kernels compute the same bits as torch, so replicas with and without kernels get equal results.
    """
    if values.device.type != "cpu":
        return None
    return kernel_library.load_library()


@lru_cache(maxsize=1)
def octave_limits() -> Tensor:
    """For each n from 0 to 5, the largest ratio that `E3M0` rounds to 2**n. A ratio is the block's
    largest magnitude divided by the magnitude of a value. The limits are found with torch's
    logarithm, so that kernels round ratios as torch does on this machine.

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
    """The magnitude of each exponent of `E3M0`, relative to the largest magnitude of the block."""
    falling = torch.ones(8, dtype=torch.float32, device=device)
    for exponent in range(1, 8):
        falling[exponent:] *= 0.5  # halving is exact; `exp2` is not exact on every processor
    falling[7] = 0
    return falling


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """For each byte (two codes of `E3M0`), the two decoded values, relative to the block's largest
    magnitude. The bits of these two fp32 numbers are stored as one int64.

    Shapes: -> `[256]` int64.
    """
    falling = _powers(device)
    each = torch.cat([falling, -falling])
    return torch.stack([each.repeat(16), each.repeat_interleave(16)], 1).view(torch.int64).view(-1)
