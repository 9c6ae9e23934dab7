"""SignSGD: every weight moves by lr in the direction of its update's sign."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.flat.layout import local
from detonation.core.optim.closure import evaluated
from detonation.kernels import native

Move = Callable[[Sequence[native.Pace]], None]
"""Moves parameters, given how each follows signs."""


class SignSGD(Optimizer):
    """`p = (1 - lr * weight_decay) * p - lr * sign(m)`, where `m = momentum * m + gradient`.

    Bernstein et al., arXiv 1802.04434. The optimizer of DeMo, whose momentum lives in the scheme: leave it 0 there.

    lr: at least 0, the distance that every weight moves in a step. momentum: from 0 to below 1.
    weight_decay: decoupled, at least 0.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr is {lr}, must be at least 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, must be from 0 to below 1")
        if weight_decay < 0:
            raise ValueError(f"weight_decay is {weight_decay}, must be at least 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._deferred: dict[int, tuple[Sequence[Tensor], Move]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._deferred = {}

    @property
    def plain(self) -> bool:
        """Whether the next step is signs alone, and nobody looks at the gradients before it."""
        return not self._optimizer_step_pre_hooks and not any(group["momentum"] for group in self.param_groups)

    def defer(self, parameters: Sequence[Tensor], move: Move) -> None:
        """Lets `move` be what the next step does to `parameters`, whatever their gradients are."""
        self._deferred[id(parameters[0])] = (parameters, move)  # instead of one that no step came for

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all parameters that have a gradient; returns what `closure` returns."""
        loss = evaluated(closure)
        moved = self._move_deferred()
        for group in self.param_groups:
            rest = [p for p in group["params"] if id(p) not in moved]
            parameters = [p for p in rest if p.grad is not None and local(p).numel()]
            if not parameters:
                continue
            directions = [local(p.grad) for p in parameters]
            if group["momentum"]:
                directions = self._momentum(parameters, directions, group["momentum"])
            _move([local(p) for p in parameters], directions, float(group["lr"]), group["weight_decay"])
        return loss

    def _move_deferred(self) -> set[int]:
        """Does what was deferred; returns the identities of the parameters that moved."""
        if not self._deferred:
            return set()
        groups = [(p, group) for group in self.param_groups for p in group["params"]]
        paces = {id(p): (1 - float(g["lr"]) * g["weight_decay"], float(g["lr"])) for p, g in groups}
        deferred, self._deferred = self._deferred, {}
        for parameters, move in deferred.values():
            move([paces[id(p)] for p in parameters])
        return {id(p) for parameters, _ in deferred.values() for p in parameters}

    def _momentum(self, parameters: list[Tensor], gradients: list[Tensor], momentum: float) -> list[Tensor]:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        return buffers


def _move(weights: list[Tensor], directions: list[Tensor], lr: float, weight_decay: float) -> None:
    """`weights` shrunk, then moved by lr against the sign of `directions`."""
    shrink = 1 - lr * weight_decay
    library = native.load_for(*weights, *directions)
    if library and all(tensor.dtype == torch.float32 for tensor in (*weights, *directions)):
        for weight, direction in zip(weights, directions, strict=True):
            library.sign_step(weight, direction, shrink, lr)  # one pass, and no temporary of the model's size
        return
    if weight_decay:
        torch._foreach_mul_(weights, shrink)
    torch._foreach_add_(weights, torch._foreach_sign(directions), alpha=-lr)
