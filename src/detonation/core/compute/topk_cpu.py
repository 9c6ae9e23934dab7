"""Top-k of every row on a CPU in plain torch, whose own top-k sorts row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TOPK_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
_FEW = 8


def topk_indices(coefficients: Tensor, count: int, some: int) -> Tensor:
    """The indices of the `count` largest magnitudes of every row, rising; the chunk is one of
    `TOPK_CHUNKS`.

    Magnitudes that differ only in their lowest log2(chunk) bits count as equal: in a key the index
    replaces these bits, so that one comparison orders both. It takes `some` rows at a time, as many
    as fit in a cache.

    Shapes: `[rows, chunk]` fp32 -> `[rows, count]` int64.
    """
    rows, chunk = coefficients.shape
    falling = torch.arange(chunk - 1, -1, -1, dtype=torch.int32, device="cpu")
    found = torch.empty(rows, count, dtype=torch.int64, device="cpu")
    for part, indices in zip(
        torch.split(coefficients, some), torch.split(found, some), strict=True
    ):
        bits = (part if count > _FEW else part.t()).contiguous().view(torch.int32) & (
            0x7FFFFFFF & -chunk
        )
        if count > _FEW:
            places = bits.bitwise_or_(falling).topk(count, dim=1, sorted=False).indices
        else:
            places = _largest(bits.bitwise_or_(falling.unsqueeze(1)), count)
        indices.copy_(places.sort(1).values)
    return found


def _largest(keys: Tensor, count: int) -> Tensor:
    """The places of the largest keys of each row, one after the other: of many rows at once."""
    chunk, rows = keys.shape  # [chunk, rows] -> [rows, count]
    places = torch.empty(count, rows, dtype=torch.int64, device="cpu")
    for number in range(count):
        torch.sub(chunk - 1, keys.amax(0) & (chunk - 1), out=places[number])
        if number + 1 < count:
            keys.scatter_(0, places[number : number + 1], -1)
    return places.t()
