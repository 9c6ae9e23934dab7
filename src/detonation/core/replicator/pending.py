"""Updates of steps whose messages may still be on their way."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.compute.kernel_library import SignRate
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.tensors import gradients_to_fill
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.signsgd import SignSGD
from detonation.core.replicator.transfer import Transfer


@dataclass(frozen=True)
class Flat:
    """An update that lies in memory, `[rows, chunk]` fp32: zeros before the first message, or of a checkpoint."""

    layout: Layout
    of_rows: Tensor

    def receive(self) -> "Flat":
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
        self._updates: deque[Transfer | Flat] = deque(Flat(layout, layout.zeros(device)) for _ in range(delay))

    def exchange(self, update: Transfer) -> Transfer | Flat:
        """Puts in an update, and takes out the one that is due."""
        self._updates.append(update)
        return self._updates.popleft()

    def wait(self, index: int) -> Tensor:
        """Waits for update `index`, counted from the oldest; from now on it lies in memory.

        Shapes: -> `[rows, chunk]` fp32.
        """
        arrived = self._updates[index] = Flat(self._layout, self._updates[index].receive().flat())
        return arrived.of_rows

    def arrived(self) -> list[Tensor]:
        """All updates, after waiting for the ones in flight.

        Shapes: `[rows, chunk]` each.
        """
        return [self.wait(index) for index in range(len(self._updates))]

    def step_on(self, parameters: Mapping[str, Tensor], base: BaseStep) -> None:
        """Lets `base` step on each update, and on `parameters` only, and replaces all updates by zeros.

        The gradients do not change, because a backward pass may come next and add to them.
        """
        everyone = [parameter for group in base.optimizer.param_groups for parameter in group["params"]]
        kept = [parameter.grad for parameter in everyone]
        for parameter in everyone:
            parameter.grad = None
        signs = base.optimizer if isinstance(base.optimizer, SignSGD) else None  # which needs no gradients
        for index in range(len(self._updates)):
            update = self._updates[index].receive()
            if not (signs and signs.take(list(parameters.values()), update)):
                update.write(gradients_to_fill(parameters))
            base()
            self._updates[index] = Flat(self._layout, self._layout.zeros(self._device))
        for parameter, gradient in zip(everyone, kept, strict=True):
            parameter.grad = gradient
