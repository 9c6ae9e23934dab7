"""Sums of sparse rows, added in replica order on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ONE_PASS_CHUNK = 256
"""The longest row whose coefficients an accelerator adds up in one pass, as weighted sums of unit vectors."""


def most_summed(chunk: int) -> int:
    """The most coefficients of a row, of all replicas together, whose inverse is `weighted_sum`; a product, of more.

    All engines draw the line here, because a product rounds differently. Beyond it the compiled product is faster.
    """
    return min(chunk // 2, 64)


def scatter_sum(
    values: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor | None] | None, chunk: int
) -> Tensor:
    """The sum of all messages, added in replica order; it may share memory with `values`.

    Shapes: values `[replicas, rows, k]`, indices `[replicas, rows, k]` integer, or None for whole rows; or one
    `[rows, k]` each per replica -> `[rows, chunk]`.
    """
    first = values[0]
    if indices is None or indices[0] is None:
        return _added(values)
    if len(values) > 1 and first.device.type != "cpu" and chunk <= ONE_PASS_CHUNK:
        # in one pass and in replica order: atomic additions, on which writes could collide, come in any order
        sent, where = beside_each_other(list(values), [i for i in indices if i is not None])
        return weighted_sum(_units(chunk, first.device), sent, where)
    total = torch.zeros(len(first), chunk, dtype=first.dtype, device=first.device)
    for value, where in zip(values, indices, strict=True):
        assert where is not None
        total.scatter_add_(1, where.to(torch.int64), value)
    return total


def beside_each_other(values: Sequence[Tensor], indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The values and the indices of all messages row by row, in replica order, on an accelerator.

    Shapes: per replica `[rows, k]` fp32 and `[rows, k]` integer -> `[rows, replicas * k]` fp32, and int32.
    """
    shape = len(values[0]), len(values), values[0].shape[1]
    sent = torch.empty(shape, dtype=torch.float32, device=values[0].device)
    where = torch.empty(shape, dtype=torch.int32, device=values[0].device)
    torch._foreach_copy_([*sent.unbind(1), *where.unbind(1)], [*values, *indices])
    return sent.flatten(1), where.flatten(1)


def weighted_sum(vectors: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """For each row the sum of `vectors`, weighted; an index may occur several times.

    It begins with zero and takes the weights in the order of the row, each by one fused multiply-add in fp32: what an
    embedding bag does on x86-64 and CUDA, and what every engine must do.

    Shapes: vectors `[chunk, n]`, weights `[rows, sent]` fp32, indices `[rows, sent]` integer -> `[rows, n]`.
    """
    where = indices if indices.dtype in (torch.int32, torch.int64) else indices.to(torch.int32)
    begins = _begins(*where.shape, where.dtype, where.device)
    return torch.embedding_bag(vectors, where.reshape(-1), begins, per_sample_weights=weights.reshape(-1))[0]


def _added(values: Tensor | Sequence[Tensor]) -> Tensor:
    """The sum of whole rows."""  # per replica [rows, k] -> [rows, k]
    if len(values) == 1:
        return values[0]
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        return values.sum(0)
    total = values[0] + values[1]
    for value in values[2:]:
        total += value
    return total


@lru_cache(maxsize=16)
def _units(chunk: int, device: torch.device) -> Tensor:
    return torch.eye(chunk, dtype=torch.float32, device=device)  # [chunk, chunk]


@lru_cache(maxsize=64)
def _begins(rows: int, sent: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The offset of each row in the flattened indices; torch computes it at every call for a matrix."""
    return torch.arange(0, rows * sent, sent, dtype=dtype, device=device)  # [rows]
