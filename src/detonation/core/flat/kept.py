"""Kept rows: a copy of rows of a memory before a step, with which the step can be undone."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class KeptRows:
    """A copy of rows of `memory`.

    Args:
        memory: `[rows, n]`.
        numbers: Number of the parameter of each row, below 0 for a row that is not copied; `[rows]`
            int64 on the host.
    """

    def __init__(self, memory: Tensor, numbers: Tensor) -> None:
        self._memory = memory
        self._rows = (numbers >= 0).nonzero().view(-1)
        self._numbers = numbers[self._rows]
        self._kept = memory[self._rows.to(memory.device)]
        self._is_change = False

    def become_change(self) -> None:
        """Replaces the copy by the change since it was made, for the case that further steps change
        the rows before `restore`.
        """
        self._kept = self._kept - self._memory[self._rows.to(self._memory.device)]
        self._is_change = True

    def restore(self, parameters: Collection[int]) -> None:
        """Undoes the change in the rows of `parameters`."""
        if not parameters:
            return
        chosen = torch.isin(self._numbers, _on_host(parameters))
        rows = self._rows[chosen].to(self._memory.device)
        kept = self._kept[chosen.to(self._memory.device)]
        if self._is_change:
            self._memory.index_add_(0, rows, kept)
        else:
            self._memory.index_copy_(0, rows, kept)

    def forget(self) -> None:
        """Drops all rows."""
        self._rows = self._rows[:0]
        self._numbers = self._numbers[:0]
        self._kept = self._kept[:0]


def _on_host(numbers: Collection[int]) -> Tensor:
    """The numbers in rising order.

    Shapes: -> `[n]` int64 on the host.
    """
    return torch.tensor(sorted(numbers), dtype=torch.int64, device="cpu")
