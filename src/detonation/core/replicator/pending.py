"""Updates that are applied a number of steps after their messages were sent."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detonation.core.exchange.unused import Unused
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.tensors import gradients_to_fill
from detonation.core.integrity.missing import Missing
from detonation.core.optim.base_step import BaseStep
from detonation.core.replicator.channel import Transfer, Update

Applies = Callable[["Update | Flat", Collection[int]], None]
"""Applies an update in the next step; the given parameter numbers were not used."""


@dataclass(frozen=True)
class Flat:
    """An update as a tensor, `[rows, chunk]` fp32: zeros before the first message, or the update of
    a checkpoint.

    Once all replicas agree on the parameters that nobody used, their rows are set to infinity,
    which no other update contains. So this information is saved, and moves to other layouts with
    the update.
    """

    layout: Layout
    of_rows: Tensor
    missing: Missing | None = None

    def receive(self) -> "Flat":
        return self

    def flat(self) -> Tensor:
        return self.of_rows

    def apply(
        self,
        parameters: Mapping[str, Tensor],
        unused: Collection[int] = (),
        signs: object = None,
        weights: object = (),
    ) -> None:
        """Replaces the gradients by the update; see `Update.apply`."""
        copy(gradients_to_fill(parameters, unused), self.layout.parts(self.of_rows))

    def settle(self, unused: Unused) -> None:
        """Agrees on the parameters that nobody used. Collective."""
        if self.missing:
            numbers = unused.settle(self.missing, self.missing.step)
            rows = self.layout.row_numbers(numbers) >= 0
            self.of_rows[rows.to(self.of_rows.device)] = torch.inf

    def look(self, unused: Unused) -> "Flat":
        """This update, with its unused parameters read from the loaded `of_rows`.

        Waits for the device.
        """
        parts = self.layout.parts(self.of_rows)
        infinite = torch.stack([part.isinf().any() for part in parts]).tolist()
        numbers = [number for number, found in enumerate(infinite) if found]
        return replace(self, missing=unused.agreed(numbers) if numbers else None)


class Pending:
    """The updates of the last `delay` steps, oldest first, as messages.

    Before the first update arrives, and after `step_on`, the list holds blanks without a message:
    tensors of negative zeros, which a saved state distinguishes from an update of zeros.
    """

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._updates: deque[Transfer | Flat] = deque(self._blank() for _ in range(delay))

    def exchange(self, update: Transfer) -> Transfer | Flat:
        """Appends an update, and removes the one that is due."""
        self._updates.append(update)
        due = self._updates.popleft()
        if isinstance(due, Flat):
            due.of_rows.add_(0.0)  # adding 0.0 turns negative zeros into zeros
        return due

    def wait(self, index: int) -> Tensor:
        """Waits for update `index`, counted from the oldest, and keeps it in memory from then on.

        Shapes: -> `[rows, chunk]` fp32.
        """
        update = self._updates[index].receive()
        arrived = self._updates[index] = Flat(self._layout, update.flat(), update.missing)
        return arrived.of_rows

    def settle(self, index: int, unused: Unused) -> None:
        """Waits for update `index`, and agrees on the parameters that nobody used. Collective."""
        self.wait(index)
        settled = self._updates[index]
        assert isinstance(settled, Flat)
        settled.settle(unused)

    def look(self, unused: Unused) -> None:
        """Reads the unused parameters of all updates after they were loaded."""
        self._updates = deque(
            each.look(unused) if isinstance(each, Flat) else each for each in self._updates
        )

    def arrived(self) -> list[Tensor]:
        """All updates; waits for those in flight.

        Shapes: `[rows, chunk]` each.
        """
        return [self.wait(index) for index in range(len(self._updates))]

    def step_on(self, base: BaseStep, applies: Applies, unused: Unused, step: int) -> None:
        """Steps `base` on each update except blanks, and replaces them by blanks.

        Gradients are unchanged, because a following backward pass may add to them.

        Args:
            step: Of the oldest update.
        """
        due = [index for index, each in enumerate(self._updates) if not self._is_blank(each)]
        if not due:
            return
        everyone = [
            parameter for group in base.optimizer.param_groups for parameter in group["params"]
        ]
        kept = [parameter.grad for parameter in everyone]
        for parameter in everyone:
            parameter.grad = None
        for index in due:
            update = self._updates[index].receive()
            alone = unused.settle(update.missing, step + index)
            applies(update, alone)
            base()
            self._updates[index] = self._blank()
        for parameter, gradient in zip(everyone, kept, strict=True):
            parameter.grad = gradient

    def _blank(self) -> Flat:
        return Flat(self._layout, self._layout.zeros(self._device).fill_(-0.0))

    def _is_blank(self, update: Transfer | Flat) -> bool:
        """True if this entry has no message. Waits for the device."""
        if not isinstance(update, Flat):
            return False
        parts = self._layout.parts(update.of_rows)
        return all(bool((part.signbit() & (part == 0)).all()) for part in parts)
