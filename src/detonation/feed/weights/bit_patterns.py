"""Bit patterns: tensors as integers, whose difference is exact, and small where a weight moved little.

A pattern has 16 bits; a wider element has several, and an element of one byte has one, which is widened.
"""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Patterns that are compared at a time, a multiple of 4: their differences stay in a cache."""


def patterns_of(tensor: Tensor) -> Tensor:
    """The bits of `tensor`: a view of it where it is contiguous and has more than one byte per element, else a copy.

    Shapes: any -> `[patterns]` int16.

    Example:
        >>> patterns_of(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).tolist()
        [16256, 16384]
    """
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).to(torch.int16) if flat.element_size() == 1 else flat.view(torch.int16)


def tensor_of(patterns: Tensor, like: Tensor) -> Tensor:
    """The tensor that has these bits, with the type and shape of `like`; a view of `patterns` where it can be.

    Shapes: `[patterns]` int16, any -> that of `like`.
    """
    bits = patterns.to(torch.uint8) if like.element_size() == 1 else patterns
    return bits.view(like.dtype).view(like.shape)


def starts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Where the patterns of each tensor begin, when all stand one after another; under "" their number.

    Shapes: any.
    """
    counts = [tensor.nbytes // min(2, tensor.element_size()) for tensor in tensors.values()]
    return dict(zip([*tensors, ""], accumulate(counts, initial=0), strict=True))


def changes(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Where two rows of patterns differ, and by how much, modulo 2**16.

    Shapes: `[patterns]` int16, `[patterns]` int16 -> `[changed]` int64 in rising order, `[changed]` int16.

    Example:
        >>> new, old = torch.tensor([5, 6, 9], dtype=torch.int16), torch.tensor([5, 7, 3], dtype=torch.int16)
        >>> [found.tolist() for found in changes(new, old)]
        [[1, 2], [-1, 6]]
    """
    found = [(torch.empty(0, dtype=torch.int64, device=new.device), new.new_empty(0))]
    room = new.new_zeros(min(CHUNK, -(-len(new) // 4) * 4))
    for at in range(0, len(new), CHUNK):
        positions, deltas = _changes_in(new[at : at + CHUNK], old[at : at + CHUNK], room)
        found.append((positions + at, deltas))
    return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])


def _changes_in(new: Tensor, old: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Four patterns are looked at as one word first: most of them have not changed, and a subtraction is vectorised."""
    torch.sub(new, old, out=room[: len(new)])
    room[len(new) :] = 0
    words = room.view(torch.int64)
    changed = words.nonzero().view(-1)
    deltas = words[changed].view(torch.int16)
    inside = deltas.nonzero().view(-1)
    return (changed[inside >> 2] << 2) + (inside & 3), deltas[inside]


@torch.no_grad()
def move(tensor: Tensor, positions: Tensor, deltas: Tensor) -> None:
    """Adds `deltas` to the patterns of `tensor` at `positions`, which occur once each.

    Shapes: any, `[changed]` int64, `[changed]` int16.
    """
    patterns = patterns_of(tensor)
    patterns[positions.to(patterns.device)] += deltas.to(patterns.device)
    if patterns.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        tensor.copy_(tensor_of(patterns, tensor))
