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
    words = torch.nn.functional.pad(numbers, (0, -len(numbers) % group)).view(-1, group).to(torch.int64)
    if width * group <= 62:  # a whole group fits one word
        word = (words << _shifts(group, width, words.device)).sum(1, keepdim=True)
        packed = (word >> _shifts(per_group, 8, words.device)).bitwise_and_(255)
    else:
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
    padded = torch.nn.functional.pad(packed, (0, groups * per_group - len(packed)))
    octets = padded.view(groups, per_group).to(torch.int64)
    if width * group <= 62:
        word = (octets << _shifts(per_group, 8, octets.device)).sum(1, keepdim=True)
        numbers = (word >> _shifts(group, width, octets.device)).bitwise_and_(2**width - 1)
    else:
        bits = (octets.unsqueeze(2) >> _shifts(8, 1, octets.device)).bitwise_and_(1).view(groups, group, width)
        numbers = (bits << _shifts(width, 1, octets.device)).sum(2)
    return numbers.view(-1)[:count]


def _group(width: int) -> tuple[int, int]:
    """The fewest numbers of `width` bits that fill whole bytes, and how many bytes those are."""
    bits = math.lcm(width, 8)
    return bits // width, bits // 8


@lru_cache(maxsize=64)
def _shifts(count: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * step
