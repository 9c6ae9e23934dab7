"""EMA-Nesterov (Yau et al., arXiv 2605.25395) around Muon: gradients are those ahead of the weights.

A recipe names the optimizer as `benchmarks.second_round.lookahead:muon`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from benchmarks.size_law.optimizers import groups
from torch import Tensor

import detonation as dt


class Lookahead(dt.Muon):
    """Muon whose gradients are taken `ahead * trend` ahead of the weights.

    `trend = decay * trend + (1 - decay) * movement`, where `movement` is that of the weights in one
    step. Muon steps from the weights ahead to the next weights. The movement contains the part
    ahead, so the trend grows without bound unless `ahead` is below 1; 1 / (1 - ahead) is the gain
    of a constant step.

    ahead: Number of mean steps, from 0 to below 1; from step `first` on and before step `last`,
        else 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        ahead: float,
        decay: float,
        first: int,
        last: int,
        **settings: Any,
    ) -> None:
        super().__init__(params, lr, **settings)
        self._ahead, self._decay = ahead, decay
        self._steps = range(first, last)
        self._taken = 0
        self._trends: list[Tensor] = []
        self._before: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        weights = [each for group in self.param_groups for each in group["params"]]
        if not self._trends:
            self._trends = [torch.zeros_like(each) for each in weights]
            self._before = [each.clone() for each in weights]
        loss = super().step(closure)
        self._taken += 1
        for weight, trend, before in zip(weights, self._trends, self._before, strict=True):
            trend.lerp_(weight - before, 1 - self._decay)
            before.copy_(weight)
            if self._taken in self._steps:
                weight.add_(trend, alpha=self._ahead)
        return loss


def muon(
    params: Iterable[dict[str, Any]],
    lr: float,
    ahead: float = 0.5,
    decay: float = 0.9,
    first: int = 20,
    last: int = 240,
    momentum: float = 0.8,
    weight_decay: float = 0.1,
) -> Lookahead:
    settings = {"momentum": momentum, "weight_decay": weight_decay}
    return Lookahead(groups(params, lr, 1.0), lr, ahead, decay, first, last, **settings)
