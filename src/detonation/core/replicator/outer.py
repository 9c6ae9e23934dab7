"""The outer optimizer of a round: it moves the anchor, the parameters on which all replicas agreed
last.
"""

import torch
from torch import Tensor

from detonation.core.schemes import Outer


class OuterSGD:
    """The outer SGD. It holds the anchor as a matrix, and each step moves a range of rows of the
    anchor by a received update. The momentum starts at zero.

    It computes like `torch.optim.SGD`, in place and without fused multiply-add, so that the result
    has the same bits on all processors.

    Shapes: `[rows, chunk]` fp32.
    """

    def __init__(self, flat: Tensor, outer: Outer) -> None:
        self.flat = flat
        self._outer = outer
        self._momentum: Tensor | None = None
        if outer.momentum:
            self._momentum = torch.zeros_like(flat)

    def step(self, rows: slice, update: Tensor) -> None:
        """Makes one SGD step on a range of rows, with `update` as the gradient. The step overwrites
        `update`.

        Shapes: `[len(rows), chunk]`.
        """
        direction = self._direction(rows, update)
        # multiply and subtract separately, so that no processor fuses the two and rounds only once
        moves = torch.mul(direction, self._outer.lr, out=update)
        self.flat[rows].sub_(moves)

    def state(self) -> dict[str, Tensor]:
        """Returns the state of the outer SGD by name: the momentum, or nothing without a momentum.

        Shapes: `[rows, chunk]` each.
        """
        if self._momentum is None:
            return {}
        return {"momentum_buffer": self._momentum}

    def _direction(self, rows: slice, gradient: Tensor) -> Tensor:
        """Returns the direction in which SGD with momentum moves a range of rows. The caller must
        not change the result. This method overwrites `gradient`.
        """
        # shapes: [len(rows), chunk] -> the same
        if self._momentum is None:
            return gradient
        momentum = self._momentum[rows].mul_(self._outer.momentum).add_(gradient)
        if self._outer.nesterov:
            return gradient.add_(momentum * self._outer.momentum)
        return momentum
