"""The outer optimizer that moves the anchor."""

import torch
from torch import Tensor

from detonation.core.schemes import Outer


class OuterSGD:
    """A flat and the SGD that moves it by received updates, a range of rows at a time. Its momentum
    starts at zero.

    It computes like `torch.optim.SGD`, in place and without fused multiply-add.

    Shapes: `[rows, chunk]` fp32.
    """

    def __init__(self, flat: Tensor, outer: Outer) -> None:
        self.flat = flat
        self._outer = outer
        self._momentum: Tensor | None = None
        if outer.momentum:
            self._momentum = torch.zeros_like(flat)

    def step(self, rows: slice, update: Tensor) -> None:
        """Steps a range of rows with `update` as the gradient. The update is overwritten.

        Shapes: `[len(rows), chunk]`.
        """
        direction = self._direction(rows, update)
        # the product and the sum are rounded separately
        moves = torch.mul(direction, self._outer.lr, out=update)
        self.flat[rows].sub_(moves)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state by kind.

        Shapes: `[rows, chunk]` each.
        """
        if self._momentum is None:
            return {}
        return {"momentum_buffer": self._momentum}

    def _direction(self, rows: slice, gradient: Tensor) -> Tensor:
        """The direction for a gradient of a range of rows; read-only. The gradient is
        overwritten.
        """
        # [len(rows), chunk] -> [len(rows), chunk]
        if self._momentum is None:
            return gradient
        momentum = self._momentum[rows].mul_(self._outer.momentum).add_(gradient)
        if self._outer.nesterov:
            return gradient.add_(momentum * self._outer.momentum)
        return momentum
