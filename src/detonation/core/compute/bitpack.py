"""Bit packing: stores small integers without gaps between their bits, in a number of bytes that is
known in advance."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from detonation.core.compute import kernel_library

if TYPE_CHECKING:
    from torch import Tensor


_LOOKED_UP = 1, 2, 4
"""Numbers of these widths lie within one byte, so a look-up table unpacks them."""


@lru_cache(maxsize=1024)
def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` packed numbers of `width` bits each.

    >>> packed_bytes(4, 6), packed_bytes(5, 6)
    (3, 4)
    """
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Packs numbers of `width` bits, lowest bits first. Each line (the last dimension) is packed
    separately.

    Args:
        numbers: Each from 0 to below 2**width.
        width: From 1 to 31.

    Shapes: `[..., n]` integer -> `[..., packed_bytes(n, width)]` uint8.
    """
    count = numbers.shape[-1]
    if numbers.device.type == "cpu":
        # the compiled kernel is exact, so replicas with and without kernels get equal bits
        kernel = kernel_library.load_library()
        if kernel:
            return kernel.pack(numbers, width, packed_bytes(count, width))
    if width > 16:  # wide numbers, such as indices in very large chunks, are packed bit by bit
        return pack((numbers.unsqueeze(-1) >> _bits(width, numbers) & 1).flatten(-2), 1)
    if count % 8:
        numbers = torch.nn.functional.pad(numbers, (0, -count % 8))
    *lines, padded = numbers.shape
    octets = _pack(numbers.reshape(-1), width).view(*lines, padded // 8 * width)
    return octets[..., : packed_bytes(count, width)]


def unpack(packed: Tensor, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Unpacks the numbers that `pack` has packed.

    Shapes: `[..., packed_bytes(count, width)]` uint8 -> `[..., count]` of `dtype`.
    """
    shape = packed.shape[:-1]
    if packed.device.type == "cpu":
        kernel = kernel_library.load_library()
        if kernel:
            return kernel.unpack(packed, count, width).to(dtype)
    if width > 16:
        bits = unpack(packed, count * width, 1, torch.int64).view(*shape, count, width)
        return (bits << _bits(width, bits)).sum(-1).to(dtype)
    missing = -(-count // 8) * width - packed.shape[-1]
    if missing:
        packed = torch.nn.functional.pad(packed, (0, missing))
    if width not in _LOOKED_UP:
        packed = packed.reshape(-1)
    numbers = _unpack(packed, width).view(*shape, -(-count // 8) * 8)
    return numbers[..., :count].to(dtype)


def _bits(width: int, like: Tensor) -> Tensor:
    """The positions of the bits of a number: 0 to `width` - 1.

    Shapes: -> `[width]` of the type of `like`.
    """
    return torch.arange(width, dtype=like.dtype, device=like.device)


def _pack(numbers: Tensor, width: int) -> Tensor:
    # shapes: [n] integer -> [n * width / 8] uint8, n a multiple of 8
    if numbers.device.type != "cpu" and width < 8:
        return _pack_at_once(numbers, width)
    if width in _LOOKED_UP:
        words = numbers.to(torch.uint8).view(unit_dtype(8 // width))
        shift = 8 - width
        while shift < 4 * words.itemsize:
            words = words | words >> shift
            shift *= 2
        return words.to(torch.uint8)
    lane = 16
    narrow = torch.int16
    if width <= 8:
        lane = 8
        narrow = torch.uint8
    words = numbers.to(narrow).view(torch.int64)
    for shift, low, high in reversed(_moves(width, lane)):
        stays = words & low
        words = words.bitwise_right_shift(shift).bitwise_and_(high).bitwise_or_(stays)
    if lane == 8:
        unit = math.gcd(width, 8)
        units = words.view(unit_dtype(unit)).view(-1, 8 // unit)[:, : width // unit]
        return units.contiguous().view(-1).view(torch.uint8)
    first, second = torch.split(words.view(-1, 2), 1, 1)
    begins = first | second << 4 * width
    ends = second << 64 - 4 * width
    octets = torch.cat([begins.view(torch.uint8), ends.view(torch.uint8)[:, 16 - width :]], 1)
    return octets.view(-1)


def _pack_at_once(numbers: Tensor, width: int) -> Tensor:
    """Computes the same bytes as `_pack` with fewer torch operations, for an accelerator."""
    if 8 % width == 0:
        octets = numbers.to(torch.uint8).view(-1, 8 // width)
        placed = octets.mul(_places(width, 8 // width, octets.dtype, octets.device))
        return placed.sum(1, dtype=torch.uint8)
    # eight packed numbers need `width` bytes: the first bytes of a word of eight bytes
    words = numbers.view(-1, 8).mul(_places(width, 8, torch.int64, numbers.device)).sum(1)
    return words.view(torch.uint8).view(-1, 8)[:, :width].contiguous().view(-1)


def _unpack(octets: Tensor, width: int) -> Tensor:
    # shapes: [n * width / 8] uint8 -> [n] integer; n is a multiple of 8
    # `octets` need not be contiguous, because the conversion to int32 copies them
    if width in _LOOKED_UP:
        return (
            _octets(octets.device, width)
            .index_select(0, octets.to(torch.int32).view(-1))
            .view(torch.uint8)
        )
    if width == 8:
        return octets
    if width < 8:
        lane = 8
        wide = torch.uint8
        unit = math.gcd(width, 8)
        if octets.storage_offset() % unit:
            octets = octets.clone()
        units = octets.view(unit_dtype(unit)).view(-1, width // unit)
        words = torch.nn.functional.pad(units, (0, (8 - width) // unit)).view(torch.int64)
        del octets, units  # frees the memory of these two tensors, if they are copies
    else:
        # Eight numbers of `width` bits each fill `width` bytes.
        # The first eight bytes contain numbers 0 to 3, and the last eight bytes numbers 4 to 7.
        lane = 16
        wide = torch.uint16
        octets = octets.view(-1, width)
        words = torch.cat([octets[:, :8], octets[:, width - 8 :]], 1).view(torch.int64)
        words[:, 1] >>= 64 - 4 * width
        words &= signed(2 ** (4 * width) - 1)
    for shift, _, high in _moves(width, lane):
        words.add_(words & high, alpha=2**shift - 1)
    return words.view(wide).view(-1)


def unit_dtype(size: int) -> torch.dtype:
    """The integer dtype of `size` bytes."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


@lru_cache(maxsize=16)
def _places(width: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Powers of two: multiplied by them, `count` numbers of `width` bits move to their positions in
    a word."""
    # [count]
    return (1 << width * torch.arange(count, dtype=torch.int64, device=device)).to(dtype)


@lru_cache(maxsize=16)
def _moves(width: int, lane: int) -> list[tuple[int, int, int]]:
    """The moves that unpack a word: they spread adjacent numbers of `width` bits, so that finally a
    number begins every `lane` bits.

    The first move shifts the upper half of the numbers, the next move the upper half of each half,
    and so on down to single numbers. A move is a tuple: the shift in bits, the mask of the lower
    halves, and the mask of the upper halves before the shift.
    """
    moves = []
    half = 32 // lane  # count of numbers that are shifted together
    while half:
        low = sum((2 ** (half * width) - 1) << at for at in range(0, 64, 2 * half * lane))
        moves.append((half * (lane - width), signed(low), signed(low << half * width)))
        half //= 2
    return moves


def signed(word: int) -> int:
    """The signed int64 that has the same 64 bits as the unsigned number `word`.

    >>> signed(2**64 - 1)
    -1
    """
    return (word + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=8)
def _octets(device: torch.device, width: int) -> Tensor:
    """Lookup table: maps a byte of packed numbers of `width` bits to a word with one byte for each
    number."""
    # [256] integer
    numbers, shifts = (
        torch.arange(0, stop, step, dtype=torch.int64, device=device)
        for stop, step in ((256, 1), (8, width))
    )
    parts = numbers.unsqueeze(1) >> shifts & (1 << width) - 1
    return parts.to(torch.uint8).view(unit_dtype(8 // width)).view(-1)


@lru_cache(maxsize=8)
def bit_counts(device: torch.device) -> Tensor:
    """Lookup table: the count of set bits of each byte value.

    Shapes: -> `[256]` uint8.
    """
    counts: Tensor = _octets(device, 1).view(torch.uint8).view(256, 8).sum(1, dtype=torch.uint8)
    return counts
