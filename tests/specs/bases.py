"""Base optimizers in a few lines: each starts with weights, and returns its step on gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Step = Callable[[Tensors], None]
Base = Callable[[Tensors], Step]


def sgd(weights: Tensors, lr: float = 0.1, momentum: float = 0.9) -> Step:
    buffers: Tensors = {}

    def step(gradients: Tensors) -> None:
        for name, weight in weights.items():
            if name not in buffers:
                buffers[name] = torch.zeros_like(weight)
            buffers[name].mul_(momentum).add_(gradients[name])
            weight.add_(buffers[name], alpha=-lr)

    return step


def sign_sgd(weights: Tensors, lr: float = 0.01, weight_decay: float = 0.1) -> Step:
    def step(gradients: Tensors) -> None:
        for name, weight in weights.items():
            weight.mul_(1 - lr * weight_decay).sub_(lr * gradients[name].sign())

    return step


def adamw(weights: Tensors, lr: float = 0.01, weight_decay: float = 0.1) -> Step:
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    taken = 0

    def step(gradients: Tensors) -> None:
        nonlocal taken
        taken += 1
        for name, weight in weights.items():
            gradient = gradients[name]
            weight.mul_(1 - lr * weight_decay)
            means[name].lerp_(gradient, 1 - 0.9)
            squares[name].mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
            deviation = squares[name].sqrt() / (1 - 0.999**taken) ** 0.5 + 1e-8
            weight.addcdiv_(means[name], deviation, value=-lr / (1 - 0.9**taken))

    return step


def of(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Base:
    """The base of an optimizer class, for what takes more than a few lines."""

    def start(weights: Tensors) -> Step:
        optimizer = make(list(weights.values()))

        def step(gradients: Tensors) -> None:
            for name, weight in weights.items():
                weight.grad = gradients[name].clone()
            optimizer.step()

        return step

    return start
