"""Muon: matrices move in the nearest orthogonal direction; AdamW moves all other parameters."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from detonation.core.flat.tensors import local
from detonation.core.optim.wrapper import evaluated


class Muon(Optimizer):
    """`m = momentum * m + (1 - momentum) * gradient`; a matrix moves by `lr * 0.2 * sqrt(longer
    side) * orthogonal(m)`.

    The momentum is Nesterov's; with this scale the same lr suits matrices and all other parameters.
    AdamW moves parameters that are not matrices, and all parameters of groups with
    `orthogonal=False` (use it for embeddings and the output layer).

    The orthogonal direction depends on the whole matrix: each step gathers every sharded matrix
    inside the node, and each of its ranks computes the whole direction. `torch.optim.Muon` and
    `AdamW` together make the same steps on whole matrices; on shards torch 2.13 fails for a matrix
    with a single row, and starts 8 collectives per matrix.

    Args:
        params: Parameters or groups of them, as in torch; a group may set `orthogonal`.
        lr: At least 0.
        momentum: From 0 to below 1.
        weight_decay: Decoupled, at least 0.
        betas: The decay of AdamW's two moments, each from 0 to below 1.
        eps: Added to the denominator of AdamW.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Muon([weight], lr=1.0)
        >>> weight.grad = torch.tensor([[4.0, 0.0], [0.0, 0.5]])
        >>> optimizer.step()
        >>> weight.mul(10).round().tolist()
        [[-2.0, 0.0], [0.0, -2.0]]

    Reference: Jordan et al., Muon, 2024 (kellerjordan.github.io/posts/muon); the scale of Liu et
    al., arXiv 2502.16982.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr is {lr}, must be at least 0")
        if not all(0 <= share < 1 for share in (momentum, *betas)):
            raise ValueError(
                f"momentum and betas are {momentum}, {betas}, must be from 0 to below 1"
            )
        if weight_decay < 0:
            raise ValueError(f"weight_decay is {weight_decay}, must be at least 0")
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(params, {**settings, "orthogonal": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient; returns the value of `closure`."""
        loss = evaluated(closure)
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in present if p.ndim == 2 and group["orthogonal"]]
            for matrix in matrices:
                self._orthogonal_step(matrix, group)
            self._adamw_step([p for p in present if p.ndim != 2 or not group["orthogonal"]], group)
        return loss

    def _orthogonal_step(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        lr = float(group["lr"])
        gradient = matrix.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"])
        # the direction of the whole matrix, sharded like the matrix
        if isinstance(direction, DTensor):
            mesh = direction.device_mesh
            placements = direction.placements
            orthogonal = _newton_schulz(direction.full_tensor())
            direction = distribute_tensor(orthogonal, mesh, placements, src_data_rank=None)
        else:
            direction = _newton_schulz(direction)
        matrix.mul_(1 - lr * group["weight_decay"])
        matrix.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))

    def _adamw_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                step = torch.zeros((), dtype=torch.float32, device="cpu")
                self.state[p].update(
                    step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                )
        states = [self.state[p] for p in parameters]
        adamw(
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters if p.grad is not None],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _newton_schulz(matrix: Tensor) -> Tensor:
    """Approximates U V^T for the matrix U S V^T by five iterations of Jordan's quintic polynomial,
    which bring the singular values close to 1.

    Computes in bf16 on accelerators, and in fp32 on every CPU. CPUs without bf16 instructions
    multiply 16 to 35 times more slowly in bf16, and all CPUs must compute the same direction.
    """
    dtype = torch.bfloat16
    if matrix.device.type == "cpu":
        dtype = torch.float32
    x: Tensor = matrix.to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    if is_tall:
        x = x.T
    return x.to(matrix.dtype)
