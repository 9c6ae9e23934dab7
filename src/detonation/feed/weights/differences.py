"""Exact differences between the weights of two steps, compressed without loss.

Weights are compared as integers. Each integer is a *pattern*: 16 bits of a weight. A weight of more
than two bytes has several patterns; a weight of one byte is widened to one pattern.

A difference stores two lists of integers: the distances between changed patterns (gaps), and the
changes of these patterns (deltas). Each list is split into byte planes: the lowest bytes of all
integers are one plane, the next bytes are another plane. zlib compresses each plane.

The lowest bytes of the gaps follow a geometric distribution, which a Huffman code compresses almost
to the entropy. Almost all deltas are +1 or -1, and need one bit each. If almost all bytes of a
plane are 0, zlib stores the plane in a few bytes. So a difference is small, whether 0.01 % or 100 %
of the weights have changed.
"""

import zlib
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from detonation.core.flat.tensors import octets

CHUNK = 1 << 22
"""Number of bit patterns (16 bits of a weight each) that are compared at a time, a multiple of 4.
The differences of so many patterns fit into a cache.
"""
MOST_PLANES = {"gaps": 5, "deltas": 2}
"""Largest number of byte planes of gaps and of deltas."""


def patterns_of(tensor: Tensor) -> Tensor:
    """Returns the bit patterns of `tensor`: a view if `tensor` is contiguous and its elements have
    more than one byte, otherwise a copy.

    Shapes: any -> `[patterns]` int16.

    Example:
        >>> patterns_of(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).tolist()
        [16256, 16384]
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() == 1:
        return flat.view(torch.uint8).to(torch.int16)
    return flat.view(torch.int16)


def tensor_of(patterns: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor with the bit patterns `patterns` and the dtype and shape of `like`. It is
    a view of `patterns` if its elements have more than one byte.
    """
    # from shape [patterns] int16 to the shape of `like`
    bits = patterns
    if like.element_size() == 1:
        bits = patterns.to(torch.uint8)
    return bits.view(like.dtype).view(like.shape)


def starts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the index at which the bit patterns (16 bits each) of each tensor begin, if the
    patterns of all tensors are concatenated. The key "" holds the count of all bit patterns.
    """
    counts = [tensor.nbytes // min(2, tensor.element_size()) for tensor in tensors.values()]
    return dict(zip([*tensors, ""], accumulate(counts, initial=0), strict=True))


def changes(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions at which two rows of 16-bit patterns differ, and the differences of the
    patterns modulo 2**16.

    Shapes: `[patterns]` int16, `[patterns]` int16 -> `[changed]` int64 in rising order, `[changed]`
    int16.

    Example:
        >>> new = torch.tensor([5, 6, 9], dtype=torch.int16)
        >>> old = torch.tensor([5, 7, 3], dtype=torch.int16)
        >>> [found.tolist() for found in changes(new, old)]
        [[1, 2], [-1, 6]]
    """
    found = [(torch.empty(0, dtype=torch.int64, device=new.device), new.new_empty(0))]
    buffer = new.new_zeros(min(CHUNK, -(-len(new) // 4) * 4))
    for at in range(0, len(new), CHUNK):
        end = at + CHUNK
        inside, moved = _changes_in(new[at:end], old[at:end], buffer)
        found.append((inside + at, moved))
    positions, deltas = zip(*found, strict=True)
    return torch.cat(positions), torch.cat(deltas)


def _changes_in(new: Tensor, old: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the changed bit patterns. First finds changed words of four bit patterns, because most
    patterns have not changed.
    """
    torch.sub(new, old, out=buffer[: len(new)])
    buffer[len(new) :] = 0
    words = buffer.view(torch.int64)
    changed = words.nonzero().view(-1)
    deltas = words[changed].view(torch.int16)
    inside = deltas.nonzero().view(-1)
    return (changed[inside >> 2] << 2) + (inside & 3), deltas[inside]


@torch.no_grad()
def move(tensor: Tensor, positions: Tensor, deltas: Tensor) -> None:
    """Adds `deltas` to the bit patterns of `tensor` at `positions`, which must be distinct."""
    # shapes: any, [changed] int64, [changed] int16
    patterns = patterns_of(tensor)
    patterns[positions.to(patterns.device)] += deltas.to(patterns.device)
    if patterns.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        tensor.copy_(tensor_of(patterns, tensor))


def encode_difference(positions: Tensor, deltas: Tensor) -> dict[str, Tensor]:
    """Returns the compressed byte planes of a difference, by name; an empty dictionary if no weight
    has changed. A byte plane has one byte of each gap, or one byte of each delta: all lowest bytes,
    or all second bytes, and so on.

    Shapes: `[changed]` int64 in rising order, `[changed]` int16 -> `[bytes]` uint8 each, on the
    host.

    Example:
        >>> deltas = torch.tensor([1, -1], dtype=torch.int16)
        >>> coded = encode_difference(torch.tensor([3, 700]), deltas)
        >>> list(coded), [each.tolist() for each in decode_difference(coded, 2, 1000)]
        (['gaps.0', 'gaps.1', 'deltas.0'], [[3, 700], [1, -1]])
    """
    if not len(positions):
        return {}
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    wide = deltas.to(torch.int32)
    zigzag = (wide << 1) ^ (wide >> 15)  # zigzag code: -1, 1, -2, 2 become 1, 2, 3, 4
    return {
        f"{name}.{number}": _compressed(plane)
        for name, numbers in (("gaps", gaps), ("deltas", zigzag))
        for number, plane in enumerate(_planes(numbers))
    }


def decode_difference(
    planes: Mapping[str, Tensor], count: int, patterns: int
) -> tuple[Tensor, Tensor]:
    """Returns the changed positions and the deltas that the compressed byte `planes` hold. `count`
    positions have changed. `patterns` is the count of all positions, one for each 16-bit pattern of
    the weights. The planes may come from an untrusted source.

    Raises `ValueError` if the planes do not hold `count` positions below `patterns`.

    Shapes: `[bytes]` uint8 each -> `[count]` int64 in rising order, `[count]` int16.
    """
    if not 0 <= count <= patterns:
        raise ValueError(f"a difference has {count} changes, must have from 0 to {patterns}")
    gaps, zigzag = (_numbers(planes, name, count) for name in ("gaps", "deltas"))
    # this sum overflows if a gap between two positions is too large, so check each gap, too
    positions = (gaps + 1).cumsum(0) - 1
    if count and max(int(gaps.max()), int(positions[-1])) >= patterns:
        raise ValueError("a difference changes a position beyond the last weight")
    return positions, ((zigzag >> 1) ^ -(zigzag & 1)).to(torch.int16)


def _planes(numbers: Tensor) -> list[Tensor]:
    """Returns the byte planes of nonnegative integers, the lowest bytes first. There are as many
    planes as the largest integer has bytes.
    """
    count = max(1, -(-int(numbers.max()).bit_length() // 8))
    octets = numbers.view(torch.uint8).view(len(numbers), -1)
    planes = octets[:, :count].t().contiguous()
    return list(planes.cpu())


def _compressed(plane: Tensor) -> Tensor:
    # Z_RLE searches for runs only. A search for other repetitions takes 4 times as long, in vain.
    coder = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    return torch.frombuffer(
        bytearray(coder.compress(octets(plane)) + coder.flush()), dtype=torch.uint8
    )


def _numbers(planes: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    numbers = torch.zeros(count, dtype=torch.int64)
    if not count:
        return numbers
    for number in range(MOST_PLANES[name]):
        plane = planes.get(f"{name}.{number}")
        if plane is not None:
            numbers |= _expanded(plane, count).to(torch.int64) << (8 * number)
    return numbers


def _expanded(plane: Tensor, count: int) -> Tensor:
    """Decompresses a byte plane (one byte of each gap or delta), which must have `count` bytes.
    Stops after `count` + 1 bytes, so that a larger plane takes no more RAM.
    """
    coder = zlib.decompressobj()
    try:
        content = coder.decompress(octets(plane), count + 1)
    except zlib.error as error:
        raise ValueError(f"a difference between two steps is damaged: {error}") from error
    if len(content) != count or not coder.eof:
        raise ValueError(
            f"a difference between two steps is damaged: a part of it does not have {count} bytes"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
