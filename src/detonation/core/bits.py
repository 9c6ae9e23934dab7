"""Bits: small whole numbers packed without gaps, in a number of bytes that is known beforehand."""

import math
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
    group, per_group = _group(width)
    words = torch.nn.functional.pad(numbers, (0, -len(numbers) % group)).view(-1, group)
    if width == 1:
        # eight bytes of 0 or 1 times this: each lands in the highest byte, at the bit of its place
        packed = words.to(torch.uint8).view(torch.int64).mul(0x0102040810204080) >> 56
    elif width * group <= 62:  # a whole group fits one word; column by column, as torch is slow in short rows
        word = _joined(words, width, width * group)
        packed = torch.empty(len(words), per_group, dtype=torch.uint8, device=words.device)
        for i in range(per_group):
            packed[:, i] = (word >> 8 * i) & 255
    else:
        words = words.to(torch.int64)
        bits = (words.unsqueeze(2) >> _shifts(width, 1, words.device)).bitwise_and_(1).view(len(words), per_group, 8)
        packed = (bits << _shifts(8, 1, words.device)).sum(2)
    return packed.to(torch.uint8).view(-1)[: packed_bytes(len(numbers), width)].clone()


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The `count` numbers that `pack` made bytes of, int64."""
    library = native.load_for(packed)
    if library:
        return library.unpack(packed, count, width)
    group, per_group = _group(width)
    groups = -(-count // group)
    octets = torch.nn.functional.pad(packed, (0, groups * per_group - len(packed))).view(groups, per_group)
    if width == 1:
        return marks(packed, count).to(torch.int64)
    if width * group <= 62:
        word = _joined(octets, 8, 8 * per_group)
        numbers = torch.empty(groups, group, dtype=torch.int64, device=octets.device)
        for i in range(group):
            numbers[:, i] = (word >> width * i) & (2**width - 1)
    else:
        octets = octets.to(torch.int64)
        bits = (octets.unsqueeze(2) >> _shifts(8, 1, octets.device)).bitwise_and_(1).view(groups, group, width)
        numbers = (bits << _shifts(width, 1, octets.device)).sum(2)
    return numbers.view(-1)[:count]


def marks(packed: Tensor, count: int) -> Tensor:
    """The `count` numbers of one bit that `pack` made bytes of, a byte each."""  # [count] uint8
    octets = _octets(packed.device).index_select(0, packed.to(torch.int32))
    return octets.view(torch.uint8)[:count]


def _joined(columns: Tensor, width: int, bits: int) -> Tensor:
    """Each row of small numbers in one word of at least `bits` bits, lowest first."""  # [rows, n] -> [rows]
    words = columns.to(torch.int32 if bits < 32 else torch.int64)
    joined = words[:, 0].clone()
    for i in range(1, words.shape[1]):
        joined |= words[:, i] << width * i
    return joined


def _group(width: int) -> tuple[int, int]:
    """The fewest numbers of `width` bits that fill whole bytes, and how many bytes those are."""
    bits = math.lcm(width, 8)
    return bits // width, bits // 8


@lru_cache(maxsize=8)
def _octets(device: torch.device) -> Tensor:
    """The eight bits of every byte, as eight bytes in one word."""  # [256] int64
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return bits.to(torch.uint8).view(torch.int64).view(-1)


@lru_cache(maxsize=64)
def _shifts(count: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * step
