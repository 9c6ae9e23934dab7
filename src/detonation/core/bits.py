"""Bits: small whole numbers packed without gaps, in a number of bytes that is known beforehand."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from detonation.kernels import native


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` numbers of `width` bits take.

    >>> packed_bytes(4, 6), packed_bytes(5, 6)
    (3, 4)
    """
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """`numbers` (1-D, each from 0 to below 2**width, width from 1 to 16) as bytes, lowest bits first."""
    library = native.load_for(numbers)  # exact, so it does not matter which replicas have it
    if library:
        return library.pack(numbers.to(torch.int64), width, packed_bytes(len(numbers), width))
    if width == 1:
        octets = torch.nn.functional.pad(numbers, (0, -len(numbers) % 8)).to(torch.uint8)
        # eight bytes of 0 or 1 times this: each lands in the highest byte, at the bit of its place
        return (octets.view(torch.int64).mul(0x0102040810204080) >> 56).to(torch.uint8)
    split = _split(width, numbers.device)
    filled = torch.nn.functional.pad(numbers, (0, -len(numbers) % split.group))
    lines = filled.view(-1, split.group).t().to(torch.int32, memory_format=torch.contiguous_format)
    shifted, words = lines << split.shift, []
    for bit in range(0, 32 * split.words, 32):
        first, end = -(-bit // width), -(-(bit + 32) // width)  # the numbers that begin in this word
        words.append(shifted[first:end].sum(0, dtype=torch.int32))
        if bit % width:
            words[-1] |= lines[first - 1] >> bit - width * (first - 1)
    packed = torch.stack(words, 1).view(-1).view(torch.uint8)
    return packed[: packed_bytes(len(numbers), width)]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The `count` numbers that `pack` made bytes of, int64."""
    library = native.load_for(packed)
    if library:
        return library.unpack(packed, count, width)
    if width == 1:
        return marks(packed, count).to(torch.int64)
    split = _split(width, packed.device)
    filled = torch.nn.functional.pad(packed, (0, -len(packed) % (4 * split.words)))
    if filled.storage_offset() % 4:
        filled = filled.clone()
    words = filled.view(torch.int32).view(-1, split.words).t().contiguous()
    lines = (words.index_select(0, split.word) >> split.shift).bitwise_and_(split.low)
    lines |= (words.index_select(0, split.next) << split.rest).bitwise_and_(split.high)
    return lines.t().to(torch.int64, memory_format=torch.contiguous_format).view(-1)[:count]


def marks(packed: Tensor, count: int) -> Tensor:
    """The `count` numbers of one bit that `pack` made bytes of, a byte each."""  # [count] uint8
    octets = _octets(packed.device).index_select(0, packed.to(torch.int32))
    return octets.view(torch.uint8)[:count]


@dataclass(frozen=True)
class _Split:
    """How numbers of some bits lie in the fewest whole words of 32 bits; each `[group]` or `[group, 1]`.

    word: the one that each begins in, at bit `shift`. next: the one it ends in, with its bits from number `rest` on.
    low, high: which of its bits are in the one, and which in the other.
    """

    group: int
    words: int
    word: Tensor
    next: Tensor
    shift: Tensor
    rest: Tensor
    low: Tensor
    high: Tensor


@lru_cache(maxsize=32)
def _split(width: int, device: torch.device) -> _Split:
    bits = math.lcm(width, 32)
    at = torch.arange(0, bits, width)
    word, shift = at // 32, at % 32
    inside = (32 - shift).clamp(max=width)
    low = 2**inside - 1
    parts = [shift, (32 - shift).clamp(max=31), low, 2**width - 1 - low]
    shift, rest, low, high = [part.to(torch.int32).unsqueeze(1).to(device) for part in parts]
    following = (at + width - 1) // 32
    return _Split(bits // width, bits // 32, word.to(device), following.to(device), shift, rest, low, high)


@lru_cache(maxsize=8)
def _octets(device: torch.device) -> Tensor:
    """The eight bits of every byte, as eight bytes in one word."""  # [256] int64
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return bits.to(torch.uint8).view(torch.int64).view(-1)
