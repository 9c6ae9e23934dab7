"""Updates that are applied some steps after their messages have left."""

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
"""Applies an update in the next step; the parameters with these numbers were not used."""


@dataclass(frozen=True)
class Flat:
    """An update in memory, `[rows, chunk]` fp32: zeros before the first message, or of a
    checkpoint.

    Once all agree on the parameters that nobody used, the rows of these are infinite, which no
    other update is. So they are saved, and move to other layouts with the rest.
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
        """Puts the update in the place of the gradients; see `Update.apply`."""
        copy(gradients_to_fill(parameters, unused), self.layout.parts(self.of_rows))

    def settle(self, unused: Unused) -> None:
        """Agrees on the parameters that nobody used. Collective."""
        if self.missing:
            numbers = unused.settle(self.missing, self.missing.step)
            rows = self.layout.row_numbers(numbers) >= 0
            self.of_rows[rows.to(self.of_rows.device)] = torch.inf

    def look(self, unused: Unused) -> "Flat":
        """The same update after `of_rows` was loaded. Waits for the device."""
        parts = self.layout.parts(self.of_rows)
        infinite = torch.stack([part.isinf().any() for part in parts]).tolist()
        numbers = [number for number, found in enumerate(infinite) if found]
        return replace(self, missing=unused.agreed(numbers) if numbers else None)


class Pending:
    """The updates of the last `delay` steps, oldest first, as their messages.

    Before the first ones arrive, and after `step_on`, blanks are there, of which no message is in
    flight: zeros with a minus, so that a saved state tells them from an update of zeros.
    """

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._updates: deque[Transfer | Flat] = deque(self._blank() for _ in range(delay))

    def exchange(self, update: Transfer) -> Transfer | Flat:
        """Puts in an update, and takes out the one that is due."""
        self._updates.append(update)
        due = self._updates.popleft()
        if isinstance(due, Flat):
            due.of_rows.add_(0.0)  # which takes the minus from zeros
        return due

    def wait(self, index: int) -> Tensor:
        """Waits for update `index`, counted from the oldest; from now on it lies in memory.

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
        """Takes in all updates after they were loaded."""
        self._updates = deque(
            each.look(unused) if isinstance(each, Flat) else each for each in self._updates
        )

    def arrived(self) -> list[Tensor]:
        """All updates, after waiting for the ones in flight.

        Shapes: `[rows, chunk]` each.
        """
        return [self.wait(index) for index in range(len(self._updates))]

    def step_on(self, base: BaseStep, applies: Applies, unused: Unused, step: int) -> None:
        """Lets `base` step on each update but blanks, and leaves blanks.

        The gradients do not change, because a backward pass may come next and add to them.

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
        """True where no message is in flight. Waits for the device."""
        if not isinstance(update, Flat):
            return False
        parts = self._layout.parts(update.of_rows)
        return all(bool((part.signbit() & (part == 0)).all()) for part in parts)
