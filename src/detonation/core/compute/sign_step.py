"""The step of SignSGD: every weight moves by one distance against a sign."""

from collections.abc import Iterator

import torch
from torch import Tensor

from detonation.core.compute import kernel_library

GROUPS, SMALLEST_GROUP = 4, 2**18
"""The groups of neighbouring coordinates whose signs are in memory in turn, and the least coordinates of a group."""


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
    most = max(SMALLEST_GROUP, -(-sum(weight.numel() for weight in weights) // GROUPS))
    for moved, against in _groups(weights, directions, most):
        torch._foreach_add_(moved, torch._foreach_sign(against), alpha=-lr)


def _groups(weights: list[Tensor], directions: list[Tensor], most: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Weights and directions in groups of up to `most` coordinates; a larger tensor is cut where it is contiguous."""
    moved, against, room = list[Tensor](), list[Tensor](), most
    for weight, direction in zip(weights, directions, strict=True):
        if weight.numel() > most and weight.is_contiguous() and direction.is_contiguous():
            pieces = list(zip(torch.split(weight.view(-1), most), torch.split(direction.view(-1), most), strict=True))
        else:
            pieces = [(weight, direction)]
        for one, other in pieces:
            if moved and one.numel() > room:
                yield moved, against
                moved, against, room = [], [], most
            moved.append(one)
            against.append(other)
            room -= one.numel()
    if moved:
        yield moved, against
