"""Largest: which coefficients of every row are the largest, by a sorting network over whole columns.

On a CPU torch.topk sorts row by row; a network of minima and maxima works on all rows at once, and is faster where few
are wanted: its operations grow with their number.
"""

import torch
from torch import Tensor

CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
MOST = 8


def largest(coefficients: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest magnitudes of every row, the largest first.

    Magnitudes that agree but for `chunk` units in the last place count as equal: the lowest bits of a key are its
    column, so that one comparison orders both.
    """  # [rows, chunk] fp32, chunk one of CHUNKS -> [rows, count] int64
    chunk = coefficients.shape[1]
    falling = torch.arange(chunk - 1, -1, -1, dtype=torch.int32, device=coefficients.device)
    lines = coefficients.t().contiguous().view(torch.int32)  # [chunk, rows]
    keys = lines.bitwise_and(0x7FFFFFFF & -chunk).bitwise_or_(falling.unsqueeze(1))
    size = 1 << (count - 1).bit_length()
    best = _sorted(list(keys.view(size, chunk // size, -1).unbind(0)))
    groups = chunk // size
    while groups > 1:  # of two sorted groups the best: one from its front against the other from its back
        groups //= 2
        best = _cleaned([torch.maximum(a[:groups], b[groups:]) for a, b in zip(best, reversed(best), strict=True)])
    return torch.cat(best[:count]).bitwise_and_(chunk - 1).neg_().add_(chunk - 1).t().to(torch.int64)


def _sorted(lines: list[Tensor]) -> list[Tensor]:
    """The lines sorted, element by element, the largest first."""
    if len(lines) == 1:
        return lines
    half = len(lines) // 2
    return _cleaned(_sorted(lines[:half]) + _sorted(lines[half:])[::-1])


def _cleaned(lines: list[Tensor]) -> list[Tensor]:
    """The same for lines that fall and then rise, or rise and then fall (Batcher, 1968)."""
    if len(lines) == 1:
        return lines
    half = len(lines) // 2
    high = [torch.maximum(a, b) for a, b in zip(lines[:half], lines[half:], strict=True)]
    low = [torch.minimum(a, b) for a, b in zip(lines[:half], lines[half:], strict=True)]
    return _cleaned(high) + _cleaned(low)
