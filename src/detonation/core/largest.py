"""Largest: which coefficients of every row are the largest, by a sorting network over whole columns.

On a CPU torch.topk sorts row by row; a network of minima and maxima works on all rows at once, in operations of which
each takes many columns.
"""

import torch
from torch import Tensor

from detonation.core.columns import listed

CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
FEW = 8


def largest(coefficients: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest magnitudes of every row, rising.

    Magnitudes that agree but for `chunk` units in the last place count as equal: the lowest bits of a key are its
    column, so that one comparison orders both.
    """  # [rows, chunk] fp32, chunk one of CHUNKS -> [rows, count] int64
    chunk = coefficients.shape[1]
    falling = torch.arange(chunk - 1, -1, -1, dtype=torch.int32, device=coefficients.device)
    lines = coefficients.t().contiguous().view(torch.int32)  # [chunk, rows]
    keys = lines.bitwise_and(0x7FFFFFFF & -chunk).bitwise_or_(falling.unsqueeze(1))
    best = _best(keys, 1 << (count - 1).bit_length())
    if count > FEW:
        return listed((keys >= best[:count].amin(0)).t().contiguous(), count)
    ranks = best.bitwise_and_(chunk - 1)
    ranks[count:] = -1
    return _sorted(ranks)[:count].neg_().add_(chunk - 1).t().to(torch.int64)


def _best(keys: Tensor, size: int) -> Tensor:
    """The `size` largest of each column, the largest first: groups are sorted, every second one the other way round."""
    keys = _sorted(keys, size)  # [chunk, rows] -> [size, rows]
    while len(keys) > size:  # of one that falls and one that rises the larger of each pair: that falls and rises
        pairs = keys.view(-1, 2, size, keys.shape[1])
        keys = _merged(torch.maximum(pairs[:, 0], pairs[:, 1]).view(-1, keys.shape[1]), size)
    return keys


def _sorted(keys: Tensor, size: int = 0) -> Tensor:
    """Runs of `size`, or all, sorted: the first falling, the next rising, and so on (Batcher, 1968)."""
    length = 2
    while length <= (size or len(keys)):
        keys = _merged(keys, length)
        length *= 2
    return keys


def _merged(keys: Tensor, length: int) -> Tensor:
    """The same of runs of `length` that fall and then rise, or rise and then fall."""
    step, ways = length // 2, 2 if len(keys) > length else 1
    while step:
        shape = (len(keys) // (ways * length), ways, length // (2 * step), 2, step, keys.shape[1])
        before, after = keys.view(shape), torch.empty(shape, dtype=keys.dtype, device=keys.device)
        for way, (high, low) in enumerate([(torch.maximum, torch.minimum), (torch.minimum, torch.maximum)][:ways]):
            pair = before[:, way, :, 0], before[:, way, :, 1]
            high(*pair, out=after[:, way, :, 0])
            low(*pair, out=after[:, way, :, 1])
        keys, step = after.view_as(keys), step // 2
    return keys
