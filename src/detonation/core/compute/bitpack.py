"""Bit packing: small whole numbers without gaps, in a number of bytes that is known in advance."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from detonation.core.compute import kernel_library


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` numbers of `width` bits take.

    >>> packed_bytes(4, 6), packed_bytes(5, 6)
    (3, 4)
    """
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Packs numbers of `width` bits, lowest bits first.

    Args:
        numbers: Each from 0 to below 2**width.
        width: From 1 to 16.

    Shapes: `[n]` integer -> `[packed_bytes(n, width)]` uint8.
    """
    return pack_all([numbers], width)[0]


def pack_all(lines: Sequence[Tensor], width: int) -> list[Tensor]:
    """`pack` of each of `lines`.

    Shapes: `[n]` integer each -> `[packed_bytes(n, width)]` uint8 each.
    """
    if all(numbers.device.type == "cpu" for numbers in lines):
        kernel = kernel_library.load_library()  # exact, so it does not matter which replicas have it
        if kernel:
            return [kernel.pack(n.to(torch.int64).contiguous(), width, -(-len(n) * width // 8)) for n in lines]
    return [_pack(numbers, width) for numbers in lines]


def unpack(packed: Tensor, count: int, width: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """The inverse of `pack`.

    Shapes: `[packed_bytes(count, width)]` uint8 -> `[count]` of `dtype`.
    """
    return unpack_all([packed], count, width, dtype)[0]


def unpack_all(lines: Sequence[Tensor], count: int, width: int, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    """`unpack` of each of `lines`.

    Shapes: `[packed_bytes(count, width)]` uint8 each -> `[count]` of `dtype` each.
    """
    if all(packed.device.type == "cpu" and packed.is_contiguous() for packed in lines):
        kernel = kernel_library.load_library()
        if kernel:
            return [kernel.unpack(packed, count, width).to(dtype) for packed in lines]
    return [_unpack(packed, count, width, dtype) for packed in lines]


def _pack(numbers: Tensor, width: int) -> Tensor:
    lane = 8 if width <= 8 else 16
    filled = pad(numbers, (0, -len(numbers) % 8)).to(_UNITS[lane // 8])
    words = filled.view(torch.int64)
    for shift, low, high in reversed(_moves(width, lane)):
        stays = words & low
        words.bitwise_right_shift_(shift).bitwise_and_(high).bitwise_or_(stays)
    if lane == 8:
        unit = math.gcd(width, 8)
        octets = words.view(_UNITS[unit]).view(-1, 8 // unit)[:, : width // unit].contiguous()
    else:
        first, second = torch.split(words.view(-1, 2), 1, 1)
        begins, ends = (first | second << 4 * width), second << 64 - 4 * width
        octets = torch.cat([begins.view(torch.uint8), ends.view(torch.uint8)[:, 16 - width :]], 1)
    return octets.view(-1).view(torch.uint8)[: packed_bytes(len(numbers), width)]


def _unpack(packed: Tensor, count: int, width: int, dtype: torch.dtype) -> Tensor:
    if width == 1:
        octets = _octets(packed.device).index_select(0, packed.to(torch.int32))
        return octets.view(torch.uint8)[:count].to(dtype)
    octets = pad(packed, (0, -(-count // 8) * width - len(packed)))
    if width <= 8:
        lane, unit = 8, math.gcd(width, 8)
        words = pad(octets.view(_UNITS[unit]).view(-1, width // unit), (0, (8 - width) // unit)).view(torch.int64)
    else:
        lane, octets = 16, octets.view(-1, width)  # four numbers are in the first eight bytes, four in the last
        words = torch.cat([octets[:, :8], octets[:, width - 8 :]], 1).view(torch.int64)
        words[:, 1] >>= 64 - 4 * width
        words &= signed(2 ** (4 * width) - 1)
    for shift, _, high in _moves(width, lane):
        words.add_(words & high, alpha=2**shift - 1)
    return words.view(torch.uint8 if lane == 8 else torch.uint16).view(-1)[:count].to(dtype)


_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type of each size in bytes."""


@lru_cache(maxsize=16)
def _moves(width: int, lane: int) -> list[tuple[int, int, int]]:
    """The moves that place packed numbers of `width` bits `lane` bits apart in a word, all at once, half by half.

    Each move is the shift in bits, the mask of the bits that stay, and the mask of the bits that move up.
    """
    moves = []
    for half in (4, 2, 1) if lane == 8 else (2, 1):  # numbers that go together
        low = sum((2 ** (half * width) - 1) << at for at in range(0, 64, 2 * half * lane))
        moves.append((half * (lane - width), signed(low), signed(low << half * width)))
    return moves


def signed(word: int) -> int:
    """The 64 bits of `word` as torch reads them in int64.

    >>> signed(2**64 - 1)
    -1
    """
    return (word + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=8)
def _octets(device: torch.device) -> Tensor:
    """For every byte, its eight bits as the eight bytes of a word."""  # [256] int64
    numbers, shifts = (torch.arange(n, dtype=torch.int64, device=device) for n in (256, 8))
    bits = numbers.unsqueeze(1) >> shifts & 1
    return bits.to(torch.uint8).view(torch.int64).view(-1)
