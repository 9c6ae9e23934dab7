"""Differences as few bytes: the gaps between positions and the deltas, in planes of bytes that zlib compresses.

The low bytes of gaps follow a geometric distribution, for which Huffman's code is close to the entropy; deltas are
almost all +1 and -1, a bit each. Planes that are almost all 0 vanish as runs. One form serves 0.01 % and 100 % alike.
"""

import ctypes
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

MOST_PLANES = {"gaps": 5, "deltas": 2}
"""The bytes that a number of each kind may have."""


def octets(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, which must live as long as this.

    Shapes: any.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)).cast("B")


def encode_difference(positions: Tensor, deltas: Tensor) -> dict[str, Tensor]:
    """The planes of a difference, by name; none where nothing changed.

    Shapes: `[changed]` int64 in rising order, `[changed]` int16 -> `[bytes]` uint8 each, on the host.

    Example:
        >>> coded = encode_difference(torch.tensor([3, 700]), torch.tensor([1, -1], dtype=torch.int16))
        >>> list(coded), [each.tolist() for each in decode_difference(coded, 2, 1000)]
        (['gaps.0', 'gaps.1', 'deltas.0'], [[3, 700], [1, -1]])
    """
    if not len(positions):
        return {}
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    wide = deltas.to(torch.int32)
    zigzag = (wide << 1) ^ (wide >> 15)  # 1, 2, 3, 4 for -1, 1, -2, 2
    return {
        f"{name}.{number}": _compressed(plane)
        for name, numbers in (("gaps", gaps), ("deltas", zigzag))
        for number, plane in enumerate(_planes(numbers))
    }


def decode_difference(planes: Mapping[str, Tensor], count: int, patterns: int) -> tuple[Tensor, Tensor]:
    """The positions and deltas of a difference.

    Args:
        planes: Made by `encode_difference`, perhaps by a stranger.
        count: Of the changed patterns.
        patterns: Of the weights.

    Shapes: `[bytes]` uint8 each -> `[count]` int64 in rising order, `[count]` int16.

    Raises:
        ValueError: They do not hold `count` positions below `patterns`.
    """
    if not 0 <= count <= patterns:
        raise ValueError(f"a difference has {count} changes of {patterns} patterns")
    gaps, zigzag = (_numbers(planes, name, count) for name in ("gaps", "deltas"))
    if count and int(gaps.max()) >= patterns:
        raise ValueError("a difference goes beyond the weights")
    positions = (gaps + 1).cumsum(0) - 1
    if count and int(positions[-1]) >= patterns:
        raise ValueError("a difference goes beyond the weights")
    return positions, ((zigzag >> 1) ^ -(zigzag & 1)).to(torch.int16)


def _planes(numbers: Tensor) -> list[Tensor]:
    """The bytes of numbers that are not negative, the lowest first, up to the last that any of them has."""
    count = max(1, -(-int(numbers.max()).bit_length() // 8))
    return list(numbers.view(torch.uint8).view(len(numbers), -1)[:, :count].t().contiguous().cpu())


def _compressed(plane: Tensor) -> Tensor:
    # runs and Huffman's code: a search for longer repetitions takes 4 times as long, and finds nothing in noise
    coder = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    return torch.frombuffer(bytearray(coder.compress(octets(plane)) + coder.flush()), dtype=torch.uint8)


def _numbers(planes: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    numbers = torch.zeros(count, dtype=torch.int64)
    for number in range(MOST_PLANES[name] if count else 0):
        plane = planes.get(f"{name}.{number}")
        if plane is not None:
            numbers |= _expanded(plane, count).to(torch.int64) << (8 * number)
    return numbers


def _expanded(plane: Tensor, count: int) -> Tensor:
    """The bytes of a plane, whose number is bounded before memory is taken."""
    coder = zlib.decompressobj()
    try:
        content = coder.decompress(octets(plane), count + 1)
    except zlib.error as error:
        raise ValueError(f"a plane of a difference is damaged: {error}") from error
    if len(content) != count or not coder.eof:
        raise ValueError(f"a plane of a difference has not {count} bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
