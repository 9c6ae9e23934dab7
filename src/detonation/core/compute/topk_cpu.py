"""Top-k of every row on a CPU in plain torch. torch's own top-k sorts one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TOPK_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
_FEW = 8


def topk_indices(coefficients: Tensor, count: int, some: int) -> Tensor:
    """The indices of the `count` largest magnitudes of every row, in rising order. The chunk is one
    of `TOPK_CHUNKS`.

    Magnitudes that differ only in their lowest log2(chunk) bits count as equal: the index replaces
    these bits in a key, so that one comparison orders both. `some` rows are processed at a time: as
    many as fit into a cache.

    Shapes: `[rows, chunk]` fp32 -> `[rows, count]` int64.
    """
    rows, chunk = coefficients.shape
    falling = torch.arange(chunk - 1, -1, -1, dtype=torch.int32, device="cpu")
    found = torch.empty(rows, count, dtype=torch.int64, device="cpu")
    for part, indices in zip(
        torch.split(coefficients, some), torch.split(found, some), strict=True
    ):
        magnitude = 0x7FFFFFFF & -chunk
        if count > _FEW:
            keys = part.contiguous().view(torch.int32) & magnitude
            places = keys.bitwise_or_(falling).topk(count, dim=1, sorted=False).indices
        else:
            keys = part.t().contiguous().view(torch.int32) & magnitude
            places = _largest(keys.bitwise_or_(falling.unsqueeze(1)), count)
        indices.copy_(places.sort(1).values)
    return found


def _largest(keys: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest keys of each row, found one after the other for many rows at
    once.
    """
    chunk, rows = keys.shape  # [chunk, rows] -> [rows, count]
    places = torch.empty(count, rows, dtype=torch.int64, device="cpu")
    for number in range(count):
        torch.sub(chunk - 1, keys.amax(0) & (chunk - 1), out=places[number])
        if number + 1 < count:
            keys.scatter_(0, places[number : number + 1], -1)
    return places.t()
