"""Updates of steps whose messages may still be on their way."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.compute.kernel_library import SignRate
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.tensors import gradients_to_fill
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.signsgd import SignedUpdate, SignSGD


class Decodable(SignedUpdate, Protocol):
    """An update that is decoded where it is needed: of the messages that arrived, or a flat."""

    def flat(self) -> Tensor:
        """The update as one matrix.

        Shapes: -> `[rows, chunk]` fp32.
        """
        ...

    def write(self, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`.

        Shapes: one local shape per parameter.
        """
        ...


class InTransit(Protocol):
    """An update that may still be on its way."""

    def receive(self) -> Decodable:
        """Waits for it."""
        ...


@dataclass(frozen=True)
class Flat:
    """An update that lies in memory, `[rows, chunk]` fp32: zeros before the first message, or of a checkpoint."""

    layout: Layout
    of_rows: Tensor

    def receive(self) -> Decodable:
        return self

    def flat(self) -> Tensor:
        return self.of_rows

    def write(self, targets: Sequence[Tensor]) -> None:
        copy(targets, self.layout.parts(self.of_rows))

    def can_apply_signs(self, weights: Sequence[Tensor]) -> bool:
        return False

    def apply_signs(self, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        raise NotImplementedError


class Pending:
    """The updates of the last `delay` steps, oldest first, as their messages; zeros before the first ones arrive."""

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._updates: deque[InTransit] = deque(Flat(layout, layout.zeros(device)) for _ in range(delay))

    def exchange(self, update: InTransit) -> InTransit:
        """Puts in an update, and takes out the one that is due."""
        self._updates.append(update)
        return self._updates.popleft()

    def wait(self, index: int) -> None:
        """Waits for update `index`, counted from the oldest; it stays."""
        self._updates[index] = Flat(self._layout, self._updates[index].receive().flat())

    def waiting(self) -> list[Decodable]:
        """All updates, as their messages."""
        return [update.receive() for update in self._updates]

    def arrived(self) -> list[Tensor]:
        """All updates, after waiting for the ones in flight: from now on they lie in memory.

        Shapes: `[rows, chunk]` each.
        """
        for index in range(len(self._updates)):
            self.wait(index)
        return [update.receive().flat() for update in self._updates]

    def clear(self) -> None:
        """Replaces all updates by zeros."""
        self._updates = deque(Flat(self._layout, self._layout.zeros(self._device)) for _ in self._updates)


def step_on(updates: Sequence[Decodable], parameters: Mapping[str, Tensor], base: BaseStep) -> None:
    """Lets `base` step on each update, and on `parameters` only.

    The gradients do not change, because a backward pass may come next and add to them.
    """
    everyone = [parameter for group in base.optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in everyone]
    for parameter in everyone:
        parameter.grad = None
    for update in updates:
        if not taken(update, parameters, base):
            update.write(gradients_to_fill(parameters))
        base()
    for parameter, gradient in zip(everyone, kept, strict=True):
        parameter.grad = gradient


def taken(update: Decodable, parameters: Mapping[str, Tensor], base: BaseStep) -> bool:
    """True if the next step of `base` takes `update` as it is, without gradients: SignSGD needs signs alone."""
    optimizer = base.optimizer
    return isinstance(optimizer, SignSGD) and optimizer.take(list(parameters.values()), update)
