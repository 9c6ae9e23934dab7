"""The outer optimizer that moves the anchor."""

import torch
from torch import Tensor

from detonation.core.schemes.scheme import Outer


class OuterSGD:
    """A flat, and the SGD that moves it by the updates that arrive, some rows at a time; its
    momentum begins with zero.

    Its arithmetic is that of `torch.optim.SGD`, in place, without fused multiply-add.

    Shapes: `[rows, chunk]` fp32.
    """

    def __init__(self, flat: Tensor, outer: Outer) -> None:
        self.flat, self._outer = flat, outer
        self._momentum = torch.zeros_like(flat) if outer.momentum else None

    def step(self, rows: slice, update: Tensor) -> None:
        """Takes one step of some rows on `update` as the gradient, which is changed.

        Shapes: `[len(rows), chunk]`.
        """
        self.flat[rows].sub_(
            torch.mul(self._direction(rows, update), self._outer.lr, out=update)
        )  # rounded one by one

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state by kind.

        Shapes: `[rows, chunk]` each.
        """
        return {} if self._momentum is None else {"momentum_buffer": self._momentum}

    def _direction(self, rows: slice, gradient: Tensor) -> Tensor:
        """The direction for a gradient of some rows, which is changed, to read."""
        # [len(rows), chunk] -> the same
        if self._momentum is None:
            return gradient
        momentum = self._momentum[rows].mul_(self._outer.momentum).add_(gradient)
        return gradient.add_(momentum * self._outer.momentum) if self._outer.nesterov else momentum
