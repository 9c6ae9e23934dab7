"""Optimizers with two learning rates: that of the matrices, and `ratio` times it for all the rest.

The rest is the embedding, the output layer and the norms of an `olmo2`, whose first and last
parameters are those two tables. A recipe names these functions as
`benchmarks.size_law.optimizers:NAME`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

import detonation as dt

Groups = list[dict[str, Any]]


def groups(given: Iterable[dict[str, Any]], lr: float, ratio: float) -> Groups:
    """The matrices at `lr`, and the rest at `ratio * lr`."""
    parameters = [parameter for group in given for parameter in group["params"]]
    tables = {id(parameters[0]), id(parameters[-1])}
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in tables]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in tables]
    found = {"params": matrices, "lr": lr}, {"params": rest, "lr": ratio * lr, "orthogonal": False}
    return [group for group in found if group["params"]]


def adamw(
    params: Iterable[dict[str, Any]],
    lr: float,
    ratio: float = 1.0,
    betas: Sequence[float] = (0.9, 0.95),
    weight_decay: float = 0.01,
) -> torch.optim.Optimizer:
    beta1, beta2 = betas
    return torch.optim.AdamW(
        groups(params, lr, ratio), lr, betas=(beta1, beta2), weight_decay=weight_decay
    )


def muon(
    params: Iterable[dict[str, Any]],
    lr: float,
    ratio: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.01,
) -> torch.optim.Optimizer:
    return dt.Muon(groups(params, lr, ratio), lr, momentum=momentum, weight_decay=weight_decay)


def signsgd(
    params: Iterable[dict[str, Any]],
    lr: float,
    ratio: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    return dt.SignSGD(groups(params, lr, ratio), lr, momentum=momentum, weight_decay=weight_decay)
