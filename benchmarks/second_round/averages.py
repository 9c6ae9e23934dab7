"""The loss of an exponential average of the weights, beside that of the last weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

DECAY = 0.98
"""Of the average per step: a window of about 50 steps."""


class Averaging:
    """A recorder of a training that averages the weights, and validates the average after the last step.

    All replicas of gradient schemes have equal weights, which simulated replicas share. So each
    replica copies them before the first one writes the average into them.
    """

    def __init__(self, session: Any) -> None:
        self.records: list[Any] = []
        self.loss: float | None = None
        self._session = session
        self._weights: list[Tensor] = list(session.model.parameters())
        self._average: list[Tensor] = []

    def add(self, record: Any) -> None:
        self.records.append(record)
        if self._average:
            torch._foreach_lerp_(self._average, copies(self._weights), 1 - DECAY)
        else:
            self._average = copies(self._weights)
        if record.step == self._session.config.train.steps:
            self._validate()

    def _validate(self) -> None:
        """Validates the average, and writes the last weights back. Collective."""
        from detonation.train.loop.evaluate import validate

        last = copies(self._weights)
        self._wait()
        write(self._weights, self._average)
        self.loss = validate(self._session)["val_loss"]
        self._wait()
        write(self._weights, last)

    def _wait(self) -> None:
        """Waits until all replicas are here."""
        self._session.world.all_gather(torch.zeros(1))()


def copies(weights: Iterable[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def write(weights: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
