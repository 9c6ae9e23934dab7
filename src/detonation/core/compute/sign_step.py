"""The step of SignSGD: every weight moves by one distance against a sign."""

import torch
from torch import Tensor

from detonation.core.compute import kernel_library


def sign_step(weights: list[Tensor], directions: list[Tensor], lr: float, weight_decay: float) -> None:
    """`weights = (1 - lr * weight_decay) * weights - lr * sign(directions)`, in place.

    Shapes: each direction as its weight.
    """
    shrink = 1 - lr * weight_decay
    kernel = kernel_library.library_for(*weights, *directions)
    if kernel and all(tensor.dtype == torch.float32 for tensor in (*weights, *directions)):
        for weight, direction in zip(weights, directions, strict=True):
            kernel.sign_step(weight, direction, shrink, lr)  # one pass, and no temporary of the model's size
        return
    if weight_decay:
        torch._foreach_mul_(weights, shrink)
    torch._foreach_add_(weights, torch._foreach_sign(directions), alpha=-lr)
