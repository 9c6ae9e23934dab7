"""Combine: how the coefficients that several replicas tell become one."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Combine = Literal["replicas", "senders", "majority", "clipped"]
COMBINES: tuple[str, ...] = get_args(Combine)


def combined(values: Sequence[Tensor], columns: Sequence[Tensor] | None, chunk: int, combine: Combine) -> Tensor:
    """All coefficients of the flat, from what each replica tells, in replica order.

    values: one `[rows, kept]` a replica; columns: theirs, or None where each tells whole rows.

    replicas: the mean over all of them, 0 from those that tell nothing of a coefficient.
    senders: the mean over those that told one other than 0, as in the code published with DeMo.
    majority: the sign that most tell, times the mean magnitude; 0 where they are even.
    clipped: the mean over replicas, each scaled down to the median of their norms: one that is far too loud
    (or an attacker) does not drown the others (as in SparseLoCo, arXiv 2508.15706).

    Columns within a row are unique, so no two writes of one replica collide and every replica gets the same bits.
    """  # [rows, chunk]
    if combine == "majority":
        signs = combined([v.sign() for v in values], columns, chunk, "replicas").sign()
        return signs * combined([v.abs() for v in values], columns, chunk, "replicas")
    if combine == "clipped":
        norms = torch.stack([v.norm() for v in values])
        scales = (norms.median() / norms).nan_to_num(1.0, posinf=1.0).clamp_(max=1.0)
        values = [v * scale for v, scale in zip(values, scales, strict=True)]
    total = _sum(values, columns, chunk)
    if combine == "senders":
        return total / _sum([(v != 0).to(v.dtype) for v in values], columns, chunk).clamp_(min=1)
    return total / len(values)


def _sum(values: Sequence[Tensor], columns: Sequence[Tensor] | None, chunk: int) -> Tensor:
    if columns is None:
        return sum(values[1:], start=values[0])
    total = torch.zeros(len(values[0]), chunk, device=values[0].device)
    for told, where in zip(values, columns, strict=True):
        total.scatter_add_(1, where, told)
    return total
