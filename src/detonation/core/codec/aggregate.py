"""Combine: how the coefficients that several replicas tell become one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from detonation.core.codec.indices import Packed, numbers, small

Combine = Literal["replicas", "senders", "majority", "clipped"]
COMBINES: tuple[str, ...] = get_args(Combine)


@dataclass(frozen=True)
class Agreed:
    """What replicas told, in replica order, and how it becomes one: the same on all of them.

    values: one `[rows, kept]` a replica; columns: theirs, or None where each tells whole rows. spent: to be called once
    it is decoded, where that is worth while.
    """

    values: Sequence[Tensor]
    columns: Sequence[Tensor | Packed | None]
    combine: Combine
    spent: Callable[[], None] | None = None

    @classmethod
    def one(cls, values: Tensor, columns: Tensor | Packed | None) -> "Agreed":
        """What one replica told, or what was combined already."""
        return cls([values], [columns], "replicas")

    def sparse(self, chunk: int) -> bool:
        """Whether it is a mean of few coefficients of each row."""
        told = sum(values.shape[1] for values in self.values)
        return self.combine == "replicas" and all(c is not None for c in self.columns) and told <= chunk // 4

    def split(self, rows: int) -> Iterator["Agreed"]:
        """The same, some rows at a time, where replicas chose their own coefficients."""
        for first in range(0, len(self.values[0]), rows):
            values = [v[first : first + rows] for v in self.values]
            columns = [small(c)[first : first + rows] for c in self.columns if c is not None]
            yield Agreed(values, columns, self.combine)

    def together(self) -> tuple[Tensor, Tensor]:
        """All coefficients that go into that mean, and their columns; one that several tell is there several times."""
        (rows, kept), count = self.values[0].shape, len(self.values)
        values = self.values[0].new_empty(rows, count, kept)
        columns = torch.empty(values.shape, dtype=torch.int32, device=values.device)
        told = [small(where) for where in self.columns if where is not None]
        for i in range(count):  # torch.cat takes longer with rows so narrow
            values[:, i], columns[:, i] = self.values[i], told[i]
        return values.flatten(1).div_(count), columns.flatten(1)  # 2 x [rows, told]


def combined(agreed: Agreed, chunk: int) -> Tensor:
    """All coefficients of the flat.

    replicas: the mean over all of them, 0 from those that tell nothing of a coefficient.
    senders: the mean over those that told one other than 0, as in the code published with DeMo.
    majority: the sign that most tell, times the mean magnitude; 0 where they are even.
    clipped: the mean over replicas, each scaled down to the median of their norms: one that is far too loud
    (or an attacker) does not drown the others (as in SparseLoCo, arXiv 2508.15706).

    Columns within a row are unique, so no two writes of one replica collide and every replica gets the same bits.
    """  # [rows, chunk]
    first = agreed.columns[0]
    if all(columns is first for columns in agreed.columns):  # a shared selection: combined first, spread once
        together = _combined(agreed.values, [None] * len(agreed.values), chunk, agreed.combine)
        return together if first is None else _sum([together], [numbers(first)], chunk)
    where = [columns if columns is None else numbers(columns) for columns in agreed.columns]
    return _combined(agreed.values, where, chunk, agreed.combine)


def _combined(values: Sequence[Tensor], columns: Sequence[Tensor | None], chunk: int, combine: Combine) -> Tensor:
    if combine == "majority":
        signs = _sum([v.sign() for v in values], columns, chunk).sign()
        return signs * _sum([v.abs() for v in values], columns, chunk) / len(values)
    if combine == "clipped":
        norms = torch.stack([v.norm() for v in values])
        silent = norms <= 0  # torch.nanmedian waits for a device to count them, in some versions
        rising = norms.masked_fill(silent, torch.inf).sort().values
        middle = rising.gather(0, silent.logical_not().sum(0, keepdim=True).sub_(1).clamp_(min=0) // 2)
        scales = (middle / norms).nan_to_num(1.0, posinf=1.0).clamp_(max=1.0)
        values = [v * scale for v, scale in zip(values, scales, strict=True)]
    total = _sum(values, columns, chunk)
    if combine == "senders":
        return total / _sum([(v != 0).to(v.dtype) for v in values], columns, chunk).clamp_(min=1)
    return total / len(values) if len(values) > 1 else total


def _sum(values: Sequence[Tensor], columns: Sequence[Tensor | None], chunk: int) -> Tensor:
    total: Tensor | None = None
    for told, where in zip(values, columns, strict=True):
        if where is None:
            total = told if total is None else total + told
        else:
            total = torch.zeros(len(told), chunk, device=told.device) if total is None else total
            total.scatter_add_(1, where, told)
    assert total is not None
    return total
