"""Pending updates, and the look-ahead to where they are expected to lead."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.tensors import gradients_to_fill, local
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.muon import Muon
from detonation.core.optim.signsgd import SignSGD


class Pending:
    """The updates of the last `delay` steps, oldest first; zeros before the first ones arrive.

    Shapes: `[rows, chunk]` per update.
    """

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._updates: deque[Tensor | Callable[[], Tensor]] = deque(layout.zeros(device) for _ in range(delay))

    def exchange(self, update: Tensor | Callable[[], Tensor]) -> Tensor:
        """Puts in an update, or the function that waits for it, and takes out the one that is due.

        Shapes: -> `[rows, chunk]`.
        """
        self._updates.append(update)
        due = self._updates.popleft()
        return due if isinstance(due, Tensor) else due()

    def wait(self, index: int) -> None:
        """Waits for update `index`, counted from the oldest; it stays."""
        update = self._updates[index]
        if not isinstance(update, Tensor):
            self._updates[index] = update()

    def arrived(self) -> list[Tensor]:
        """All updates, after waiting for the ones in flight.

        Shapes: `[rows, chunk]` each.
        """
        self._updates = deque(u if isinstance(u, Tensor) else u() for u in self._updates)
        return [update for update in self._updates if isinstance(update, Tensor)]

    def clear(self) -> None:
        """Replaces all updates by zeros."""
        self._updates = deque(self._layout.zeros(self._device) for _ in self._updates)


class LookAhead:
    """Takes the gradient where the replica expects to be when its own pending messages land, and moves exactly back.

    The base optimizer steps on this replica's own messages; the weights before are saved, so that nothing is rounded.
    This is DisTrO's answer to waiting (as run by Psyche). It needs an optimizer without state, because a step on a
    guess must leave no trace.
    """

    def __init__(self, parameters: Mapping[str, Tensor], base: BaseStep, layout: Layout) -> None:
        self._parameters, self._base, self._layout = parameters, base, layout
        self._agreed = [local(p).clone() for p in parameters.values()]
        self._ahead = False

    @torch.no_grad()
    def move(self, updates: Sequence[Tensor]) -> None:
        """Moves from the agreed weights to where this replica's own `updates` would lead.

        Shapes: `[rows, chunk]` each.
        """
        weights = [local(p) for p in self._parameters.values()]
        if self._base.optimizer.state:
            copy(weights, self._agreed)  # where they were before the first step
            raise _needs_state(self._base.optimizer)
        copy(self._agreed, weights)
        step_on(updates, self._parameters, self._base, self._layout)
        self._ahead = True

    @torch.no_grad()
    def back(self) -> None:
        """Moves to the agreed weights, bit for bit."""
        if self._ahead:
            copy([local(p) for p in self._parameters.values()], self._agreed)
        self._ahead = False


def require_stateless(base: Optimizer) -> None:
    """Raises `ValueError` if `base` is known to keep state between steps.

    An optimizer of another library shows it at the first step only; `LookAhead` refuses it then.
    """
    ours = {torch.optim.Optimizer, torch.optim.SGD, SignSGD}
    stateful = any(_is_known(kind) and kind not in ours for kind in type(base).__mro__)
    momentum = isinstance(base, torch.optim.SGD | SignSGD) and any(group["momentum"] for group in base.param_groups)
    if stateful or momentum or base.state:
        raise _needs_state(base)


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.") or kind is Muon


def _needs_state(base: Optimizer) -> ValueError:
    return ValueError(
        f"look-ahead needs an optimizer without state, and {type(base).__name__} keeps some: use SignSGD, or SGD "
        "without momentum, or a scheme with lookahead=False"
    )


def step_on(updates: Sequence[Tensor], parameters: Mapping[str, Tensor], base: BaseStep, layout: Layout) -> None:
    """Lets `base` step on each update, and on `parameters` only.

    The gradients do not change, because a backward pass may come next and add to them.

    Shapes: updates `[rows, chunk]` each.
    """
    everyone = [parameter for group in base.optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in everyone]
    for parameter in everyone:
        parameter.grad = None
    for update in updates:
        copy(gradients_to_fill(parameters), layout.parts(update))
        base()
    for parameter, gradient in zip(everyone, kept, strict=True):
        parameter.grad = gradient
