"""Pending: updates that are on their way, and the look-ahead to where they are expected to lead."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.flat.layout import Layout, copy, local


class Pending:
    """The updates of the last `delay` steps, oldest first; before the first ones arrive there are zeros."""

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._updates: deque[Tensor | Callable[[], Tensor]] = deque(layout.zeros(device) for _ in range(delay))

    def exchange(self, update: Tensor | Callable[[], Tensor]) -> Tensor:
        """Puts in an update, or the waiter of one, and takes out the one that is due, waiting for it."""
        self._updates.append(update)
        due = self._updates.popleft()
        return due if isinstance(due, Tensor) else due()

    def landed(self) -> list[Tensor]:
        """All updates, waiting for those on their way."""
        self._updates = deque(u if isinstance(u, Tensor) else u() for u in self._updates)
        return [update for update in self._updates if isinstance(update, Tensor)]

    def clear(self) -> None:
        """Forgets all: there are zeros again."""
        self._updates = deque(self._layout.zeros(self._device) for _ in self._updates)


class LookAhead:
    """Takes the gradient where the replica expects to be once its own pending messages land, and moves exactly back.

    The base optimizer steps on what this replica told; the weights before are kept, so that nothing is rounded. The
    answer of DisTrO to waiting (as run by Psyche); it needs an optimizer without state, because a step on a guess must
    leave no trace.
    """

    def __init__(self, parameters: Mapping[str, Tensor], base: Optimizer, layout: Layout) -> None:
        self._parameters, self._base, self._layout = parameters, base, layout
        self._settled = [local(p).clone() for p in parameters.values()]
        self._ahead = False

    def move(self, told: Sequence[Tensor]) -> None:
        """From the settled weights to where the updates `told` would lead."""
        weights = [local(p) for p in self._parameters.values()]
        copy(self._settled, weights)
        apply(told, self._parameters, self._base, self._layout)
        if self._base.state:
            raise ValueError("look-ahead needs an optimizer without state: SignSGD or SGD without momentum")
        self._ahead = True

    def back(self) -> None:
        """To the settled weights, bit for bit."""
        if self._ahead:
            copy([local(p) for p in self._parameters.values()], self._settled)
        self._ahead = False


def apply(updates: Sequence[Tensor], parameters: Mapping[str, Tensor], base: Optimizer, layout: Layout) -> None:
    """Lets `base` step on each update, and on `parameters` only.

    Gradients stay as they were: a backward pass may come next, and would add to what is left in them.
    """
    everyone = [parameter for group in base.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in everyone]
    for parameter in everyone:
        parameter.grad = None
    for update in updates:
        copy(gradients(parameters), layout.parts(update))
        base.step()
    for parameter, gradient in zip(everyone, kept, strict=True):
        parameter.grad = gradient


def gradients(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The local gradient of each parameter, zeros made for one that has none."""
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [local(p.grad) for p in parameters.values() if p.grad is not None]
