"""Signed integers with one scale per block, for differences of weights and for gradients."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from detonation.core.compute.bitpack import pack, packed_bytes, unpack
from detonation.wire.wire import BLOCK, quantized_bytes


@dataclass(frozen=True)
class BlockIntegers:
    """`width` bits per number: evenly spaced levels from minus to plus the largest magnitude of a block of 128.

    A message is its packed integers and then the scales of its blocks in bf16; the last block is filled up with zeros.
    A block that holds a number that is not finite decodes to numbers that are not finite. It is odd, as every
    precision: see `codec.precision`.

    Args:
        width: 4 or 8.
        rotate: Blocks are multiplied by an orthonormal Hadamard matrix before they are quantized, and after.
    """

    width: int
    rotate: bool = False
    block: ClassVar[int] = BLOCK

    @property
    def largest(self) -> int:
        """The largest integer: 7 or 127."""
        return (1 << self.width - 1) - 1

    def nbytes(self, count: int) -> int:
        """The bytes of `count` numbers.

        >>> BlockIntegers(4).nbytes(256), BlockIntegers(8).nbytes(1)
        (132, 130)
        """
        return quantized_bytes(count, self.width)

    def encode(self, values: Tensor) -> Tensor:
        """Quantizes each line.

        Shapes: `[..., n]` fp32 -> `[..., nbytes(n)]` uint8.
        """
        missing = -values.shape[-1] % self.block
        lines = pad(values, (0, missing)) if missing else values.contiguous()
        blocks = self._rotated(lines.view(*lines.shape[:-1], -1, self.block))  # [..., blocks, block]
        largest = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())  # [..., blocks]
        scales = (largest / self.largest).to(torch.bfloat16)
        # a scale that is 0 or not finite makes numbers that are not finite of some; the mask keeps them in their block
        per_step = scales.float().clamp_(min=torch.finfo(torch.float32).tiny).reciprocal_().unsqueeze(-1)
        codes = (blocks * per_step).round_().clamp_(-self.largest, self.largest).add_(self.largest + 1)
        whole = codes.to(torch.uint8).bitwise_and_((1 << self.width) - 1)
        packed = pack(whole.flatten(-2), self.width)
        return torch.cat([packed, scales.view(torch.uint8)], -1)

    def decode(self, encoded: Tensor, count: int) -> Tensor:
        """Reads messages of `count` numbers each.

        Shapes: `[..., nbytes(count)]` uint8 -> `[..., count]` fp32.
        """
        blocks = -(-count // self.block)
        split = packed_bytes(blocks * self.block, self.width)
        codes = unpack(encoded[..., :split], blocks * self.block, self.width, torch.float32).sub_(self.largest + 1)
        scales = encoded[..., split:].contiguous().view(torch.bfloat16).float().unsqueeze(-1)  # [..., blocks, 1]
        values = codes.view(*codes.shape[:-1], blocks, self.block).mul_(scales)
        return self._rotated(values).flatten(-2)[..., :count]

    def _rotated(self, blocks: Tensor) -> Tensor:  # [..., blocks, block] -> the same
        return blocks @ _hadamard(self.block, blocks.device) if self.rotate else blocks


@lru_cache(maxsize=4)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix of a power of two, in Sylvester's order."""  # [size, size]
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div_(size**0.5)
