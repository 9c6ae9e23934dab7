"""SignSGD: moves every weight by lr, in the direction opposite to the sign of its update."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.choices import require_range
from detonation.core.compute import kernel_library
from detonation.core.compute.kernel_library import SignRate
from detonation.core.flat.tensors import local, reshard_gradients
from detonation.core.optim.base_step import unheard
from detonation.core.optim.wrapper import evaluated

GROUPS = 4
"""The number of groups into which the coordinates are divided. Only the signs of one group are in
memory at a time."""
SMALLEST_GROUP = 2**18
"""The smallest number of coordinates in a group."""


class Deferred(NamedTuple):
    """A movement of parameters by the signs of an update. The next step of SignSGD makes this
    movement instead of reading the gradients of these parameters.

    A movement is deferred only if SignSGD has no momentum, and no other code has registered hooks
    before or after its steps.

    move: Called with the weight decay factor and lr of each parameter. done: Called after `move`,
    if it is set.
    """

    parameters: Sequence[Tensor]
    move: Callable[[Sequence[SignRate]], object]
    done: Callable[[], object] | None


class SignSGD(Optimizer):
    """`p = (1 - lr * weight_decay) * p - lr * sign(m)`, where `m = momentum * m + gradient`: the
    optimizer of DeMo.

    With the scheme `demo`, leave `momentum` at 0, because the scheme itself has a momentum.

    Args:
        params: Parameters or groups of them, as in torch.
        lr: The distance that every weight moves per step, at least 0.
        momentum: From 0 to below 1.
        weight_decay: Decoupled, at least 0.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        >>> optimizer = SignSGD([weight], lr=0.5)
        >>> weight.grad = torch.tensor([0.3, -7.0, 0.0])
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, -1.5, 3.0]

    Reference: Bernstein et al., signSGD, arXiv 1802.04434.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.deferred: dict[int, Deferred] = {}
        """Movements that the next step makes, by the id of their first parameter. A later movement
        replaces an earlier movement of the same parameters."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as in torch. Raises `ValueError` if lr, momentum or weight_decay
        is out of range."""
        settings = {**self.defaults, **param_group}
        require_range("lr", settings["lr"])
        require_range("momentum", settings["momentum"], below=1)
        require_range("weight_decay", settings["weight_decay"])
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("deferred", {})  # a copy of an optimizer has no deferred movements

    @property
    def moves_by_signs_alone(self) -> bool:
        """True if a step reads only the signs of gradients, because no group has a momentum."""
        return not any(group["momentum"] for group in self.param_groups)

    @unheard
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the movements in `deferred`, moves all other parameters that have a gradient, and
        returns the value of `closure`."""
        loss = None
        if closure:
            loss = evaluated(closure)
        moved: set[int] = set()
        if self.deferred:
            rates: dict[int, SignRate] = {}
            for group in self.param_groups:
                lr = float(group["lr"])
                rate = (1 - lr * group["weight_decay"], lr)
                rates |= {id(p): rate for p in group["params"]}
            deferred = [*self.deferred.values()]
            self.deferred.clear()
            for each in deferred:
                each.move([rates[id(p)] for p in each.parameters])
                if each.done:
                    each.done()
                moved |= {id(p) for p in each.parameters}
        for group in self.param_groups:
            rest = [p for p in group["params"] if p.grad is not None and id(p) not in moved]
            if rest:
                self._move(rest, group)
        return loss

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Moves `parameters` by the signs of their gradients or, if the group has a momentum, by
        the signs of the momentum.
        """
        reshard_gradients(parameters)
        parameters = [p for p in parameters if local(p).numel()]
        if not parameters:
            return
        directions = [local(p.grad) for p in parameters if p.grad is not None]
        if group["momentum"]:
            directions = self._momentum(parameters, directions, group["momentum"])
        weights = [local(p) for p in parameters]
        _sign_step(weights, directions, float(group["lr"]), group["weight_decay"])

    def _momentum(
        self, parameters: list[Tensor], gradients: list[Tensor], momentum: float
    ) -> list[Tensor]:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        return buffers


def _sign_step(
    weights: list[Tensor], directions: list[Tensor], lr: float, weight_decay: float
) -> None:
    """`weights = (1 - lr * weight_decay) * weights - lr * sign(directions)`, in place.

    Shapes: each direction as its weight.
    """
    shrink = 1 - lr * weight_decay
    kernel = kernel_library.library_for(*weights, *directions)
    if kernel and all(tensor.dtype == torch.float32 for tensor in (*weights, *directions)):
        for weight, direction in zip(weights, directions, strict=True):
            # the kernel needs one pass and no temporary tensor as large as the weights
            kernel.sign_step(weight, direction, shrink, lr)
        return
    if weight_decay:
        torch._foreach_mul_(weights, shrink)
    most = max(SMALLEST_GROUP, -(-sum(weight.numel() for weight in weights) // GROUPS))
    for moved, against in _groups(weights, directions, most):
        torch._foreach_add_(moved, torch._foreach_sign(against), alpha=-lr)


def _groups(
    weights: list[Tensor], directions: list[Tensor], most: int
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Divides the weights and their directions into groups of up to `most` coordinates, and yields
    the groups. A contiguous tensor with more than `most` coordinates is cut into pieces.
    """
    moved: list[Tensor] = []
    against: list[Tensor] = []
    room = most
    for weight, direction in zip(weights, directions, strict=True):
        pieces = [(weight, direction)]
        if weight.numel() > most and weight.is_contiguous() and direction.is_contiguous():
            parts = torch.split(weight.view(-1), most)
            pieces = list(zip(parts, torch.split(direction.view(-1), most), strict=True))
        for one, other in pieces:
            if moved and one.numel() > room:
                yield moved, against
                moved = []
                against = []
                room = most
            moved.append(one)
            against.append(other)
            room -= one.numel()
    if moved:
        yield moved, against
