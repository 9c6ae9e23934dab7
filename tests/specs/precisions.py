"""Each precision: what a receiver reads of values that were sent in few bits.

The statistics of a block travel in bf16, so that their sums may round as they like. Here they are
the same calls of torch on the same shapes.
"""

import torch
from torch import Tensor

BLOCKS = {"int8": 65536, "4bit": 256, "2bit": 1024, "sign": 1024}
"""Values that share their statistics."""


def rounded(
    values: Tensor, precision: str, negative_zeros: bool = False, parts: Tensor | None = None
) -> Tensor:
    """`decode(encode(values))`: `[rows, k]` fp32.

    Args:
        negative_zeros: Whether zeros are sent as negative numbers, if no code stands for zero.
        parts: `[parts, n]`, the rows that are encoded together; all of them when left out.
    """
    if precision == "fp32":
        return values
    if precision == "bf16":
        return values.bfloat16().float()
    result = torch.empty_like(values)
    for rows in [torch.arange(len(values))] if parts is None else parts:
        line = values[rows].flatten()
        size = BLOCKS[precision]
        blocks = torch.nn.functional.pad(line, (0, -len(line) % size)).view(-1, size)
        counts = torch.full((len(blocks), 1), float(size))
        counts[-1] = len(line) - size * (len(blocks) - 1)  # without the zeros that fill it
        read = {"int8": int8, "4bit": four_bits, "2bit": two_bits, "sign": sign}[precision]
        decoded = read(blocks, counts, negative_zeros)
        result[rows] = decoded.flatten()[: len(line)].view(len(rows), -1)
    return result


def sign(blocks: Tensor, counts: Tensor, negative_zeros: bool) -> Tensor:
    """The mean magnitude of the block with the sign of each value."""
    exact = blocks.abs().sum(1, keepdim=True) / counts
    magnitude = exact.bfloat16().float()
    return torch.where(is_negative(blocks, exact, negative_zeros), -magnitude, magnitude)


def two_bits(blocks: Tensor, counts: Tensor, negative_zeros: bool) -> Tensor:
    """Four parts, divided at 0 and at one standard deviation: the mean of each of the outer two,
    and the mean magnitude of the inner two."""
    size = blocks.abs()
    deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
    outer = size > deviation
    tails = blocks * outer
    sums = [part.sum(1, keepdim=True) for part in (tails.clamp(min=0), tails.clamp(max=0))]
    far, above = [each.sum(1, keepdim=True).float() for each in (outer, tails > 0)]
    small = size.masked_fill(outer, 0.0).sum(1, keepdim=True) / (counts - far).clamp(min=1)
    over = sums[0] / above.clamp(min=1)
    under = sums[1] / (far - above).clamp(min=1)
    small, over, under = [each.bfloat16().float() for each in (small, over, under)]
    negative = is_negative(blocks, deviation, negative_zeros)
    return torch.where(negative, torch.where(outer, under, -small), torch.where(outer, over, small))


def four_bits(blocks: Tensor, counts: Tensor, negative_zeros: bool) -> Tensor:
    """A sign, and one of seven powers of two from the block's largest magnitude down, or 0."""
    size = blocks.abs()
    largest = size.amax(1, keepdim=True).bfloat16().float()
    octaves = (largest / size).log2().round().clamp(0, 6)
    magnitude = (largest * 0.5**octaves).masked_fill(size <= largest / 128, 0.0)
    return torch.where(blocks < 0, -magnitude, magnitude)


def int8(blocks: Tensor, counts: Tensor, negative_zeros: bool) -> Tensor:
    """255 bins over six standard deviations on either side of 0. A bin is read as the mean of its
    values, in units of 1 / 4096 of its width; that of 0 as 0."""
    deviation = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / counts.sqrt()
    width = deviation.clamp(min=1e-30) * (12 / 256)
    scaled = blocks / width
    codes = scaled.round().clamp(-127, 127).long() + 128
    units = (scaled * 4096).round().double()
    sums = torch.zeros(len(blocks), 256, dtype=torch.float64).scatter_add(1, codes, units)
    members = torch.zeros(len(blocks), 256).scatter_add(1, codes, torch.ones_like(blocks))
    means = sums.float() / members.clamp(min=1) * (width / 4096)
    means[:, 128] = 0
    return means.bfloat16().float().gather(1, codes)


def is_negative(blocks: Tensor, scale: Tensor, negative_zeros: bool) -> Tensor:
    """Values within rounding errors of `scale` count as zeros, and all zeros have one sign."""
    zero = scale * 2**-18
    return blocks <= zero if negative_zeros else blocks < -zero
