"""Precisions: how the coefficients of a message are encoded."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from detonation.core.compute.bitpack import pack, packed_bytes, unpack


class Precision(Protocol):
    """A pure encoding of values: receivers read `decode(encode(values), rows, k)`."""

    @property
    def summable(self) -> bool:
        """True if an all-reduce can add encoded values."""
        ...

    @property
    def block(self) -> int:
        """The number of values that are encoded together: a message may be cut between blocks."""
        ...

    def encode(self, values: Tensor) -> Tensor: ...  # [rows, k] fp32 -> one tensor that owns its memory

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor: ...  # -> [rows, k] fp32

    def nbytes(self, rows: int, k: int) -> int: ...

    def lawful(self, encoded: Tensor, rows: int, k: int) -> Tensor:
        """True if `encode` can produce the statistics; the values are not checked.

        Shapes: the output of `encode` -> `[]` bool.
        """
        ...


@dataclass(frozen=True)
class Float:
    """Values in a floating-point type."""

    dtype: torch.dtype
    summable: bool = True
    block: ClassVar[int] = 1

    def encode(self, values: Tensor) -> Tensor:  # [rows, k] fp32 -> [rows, k] of `dtype`
        return values.to(self.dtype, copy=True)

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:  # [rows, k] of `dtype` -> [rows, k] fp32
        return encoded.to(torch.float32)

    def nbytes(self, rows: int, k: int) -> int:
        return rows * k * self.dtype.itemsize

    def lawful(self, encoded: Tensor, rows: int, k: int) -> Tensor:  # [rows, k] of `dtype` -> [] bool
        return torch.ones((), dtype=torch.bool, device=encoded.device)


@dataclass(frozen=True)
class BlockCodebook:
    """The base of the codebooks: a packed code of `width` bits per value, and a few statistics per block of values.

    The statistics are sent in bf16, and the sender decodes its own message from them as every receiver does.
    """

    width: ClassVar[int]
    statistics: ClassVar[int]  # numbers per block
    block: ClassVar[int] = 1024
    summable: ClassVar[bool] = False

    def encode(self, values: Tensor) -> Tensor:  # [rows, k] fp32 -> [nbytes] uint8
        blocks, real = _blocked(values.reshape(-1), self.block)
        codes, statistics = self.quantise(blocks, real)
        packed = pack(codes.reshape(-1)[: values.numel()], self.width)
        return torch.cat([packed, statistics.to(torch.bfloat16).view(-1).view(torch.uint8)])

    def decode(self, encoded: Tensor, rows: int, k: int) -> Tensor:  # [nbytes] uint8 -> [rows, k] fp32
        count = rows * k
        codes = _blocked(unpack(encoded[: packed_bytes(count, self.width)], count, self.width), self.block)[0]
        return self.levels(self._statistics(encoded, count)).gather(1, codes).view(-1)[:count].view(rows, k)

    def nbytes(self, rows: int, k: int) -> int:
        count = rows * k
        return packed_bytes(count, self.width) + 2 * self.statistics * -(-count // self.block)

    def lawful(self, encoded: Tensor, rows: int, k: int) -> Tensor:  # [nbytes] uint8 -> [] bool
        statistics = self._statistics(encoded, rows * k)
        return (statistics.isfinite() & self.allowed(statistics)).all()

    def _statistics(self, encoded: Tensor, count: int) -> Tensor:
        packed = packed_bytes(count, self.width)
        return encoded[packed:].clone().view(torch.bfloat16).view(-1, self.statistics).float()

    def quantise(self, blocks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The code of each value, and the statistics of each block; `real` is 0 at the padding of a block, else 1.

        Shapes: `[blocks, block]` fp32 each -> codes `[blocks, block]` integer, `[blocks, statistics]` fp32.
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

    def quantise(self, blocks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return (blocks < 0).to(torch.uint8), blocks.abs().sum(1, keepdim=True) / real.sum(1, keepdim=True)

    def levels(self, statistics: Tensor) -> Tensor:
        return torch.cat([statistics, -statistics], 1)


@dataclass(frozen=True)
class TwoBit(BlockCodebook):
    """Two bits: values are split at 0 and at one standard deviation, and each part is decoded as its mean.

    MuLoCo (arXiv 2505.23725) finds that two bits need the means of the parts, not evenly spaced levels.
    """

    width = 2
    statistics = 4

    def quantise(self, blocks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        deviation = (blocks.square().sum(1, keepdim=True) / real.sum(1, keepdim=True)).sqrt()
        codes = 2 * (blocks < 0).to(torch.int64) + (blocks.abs() > deviation).to(torch.int64)
        return codes, _bin_means(blocks, codes, real, 4)

    def levels(self, statistics: Tensor) -> Tensor:
        return statistics

    def allowed(self, statistics: Tensor) -> Tensor:
        positive, negative = statistics.chunk(2, 1)
        return torch.cat([positive >= 0, negative <= 0], 1)


@dataclass(frozen=True)
class E3M0(BlockCodebook):
    """Four bits: a sign and a power of two, from the block's largest magnitude down (arXiv 2501.18512)."""

    width = 4
    statistics = 1
    block = 256

    def quantise(self, blocks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        largest = blocks.abs().amax(1, keepdim=True).to(torch.bfloat16).float()
        octaves = (largest / blocks.abs()).log2().round().nan_to_num(7, posinf=7).clamp_(0, 7)
        return 8 * (blocks < 0).to(torch.int64) + octaves.to(torch.int64), largest

    def levels(self, statistics: Tensor) -> Tensor:
        falling = torch.exp2(-torch.arange(8, dtype=torch.float32, device=statistics.device))
        return torch.cat([statistics * falling, -statistics * falling], 1)


@dataclass(frozen=True)
class Int8(BlockCodebook):
    """Eight bits: 256 bins over six standard deviations on either side of the mean, each decoded as its mean.

    As in INTELLECT-1 (arXiv 2412.01152), with one codebook per 65,536 values.
    """

    width = 8
    statistics = 256
    block = 65536

    def quantise(self, blocks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        count = real.sum(1, keepdim=True)
        mean = blocks.sum(1, keepdim=True) / count
        deviation = (((blocks - mean) * real).square().sum(1, keepdim=True) / count).sqrt().clamp_(min=1e-30)
        codes = ((blocks - mean) / (12 * deviation) * 256 + 128).floor_().clamp_(0, 255).to(torch.int64)
        return codes, _bin_means(blocks, codes, real, 256)

    def levels(self, statistics: Tensor) -> Tensor:
        return statistics

    def allowed(self, statistics: Tensor) -> Tensor:
        return torch.ones_like(statistics, dtype=torch.bool)


PRECISIONS: dict[str, Precision] = {
    "fp32": Float(torch.float32),
    "bf16": Float(torch.bfloat16),
    "int8": Int8(),
    "4bit": E3M0(),
    "2bit": TwoBit(),
    "sign": Sign(),
}


def _blocked(line: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`line`, zero-padded, in rows of `block`, and a mask that is 0 at the padding, else 1."""  # 2 x [blocks, block]
    missing = -len(line) % block
    filled = torch.nn.functional.pad(line, (0, missing)).view(-1, block)
    real = torch.ones(len(filled), 1, dtype=torch.float32, device=line.device).expand(-1, block)
    if missing:
        real = real.clone()
        real[-1, block - missing :].zero_()
    return filled, real


def _bin_means(blocks: Tensor, codes: Tensor, real: Tensor, bins: int) -> Tensor:
    """The mean of the values of each code in each block; 0 for a code without values."""  # [blocks, bins]
    empty = blocks.new_zeros(len(blocks), bins)
    total = empty.scatter_add(1, codes, blocks)
    return total / empty.scatter_add(1, codes, real).clamp_(min=1)
