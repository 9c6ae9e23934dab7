"""Row owners: the rows that each replica aggregates for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOwners:
    """Assigns `rows` rows to `replicas` in turns of `run` rows each; the remainder is split into equal parts.

    The rows up to the end of any turn therefore have the same owners alone as in the whole.
    """

    rows: int
    replicas: int
    run: int

    @cached_property
    def owned(self) -> int:
        """The number of rows that each replica owns; the last ones may be padding."""
        return -(-self.rows // self.replicas)

    def deal(self, lines: Tensor, padding: Tensor) -> list[Tensor]:
        """The lines of each owner, in order.

        Shapes: lines `[rows, n]`, padding `[n]` -> replicas x `[owned, n]`.
        """
        missing = self.owned * self.replicas - self.rows
        full = torch.cat([lines, padding.expand(missing, -1)]) if missing else lines
        n, dealt = lines.shape[1], self._turns * self.replicas * self.run
        turns = full[:dealt].reshape(self._turns, self.replicas, self.run, n)
        rest = full[dealt:].reshape(self.replicas, self.owned - self._turns * self.run, n)
        return [torch.cat([turns[:, r].flatten(0, 1), rest[r]]) for r in range(self.replicas)]

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `deal`, without the padding.

        Shapes: replicas x `[owned, n]` -> `[rows, n]`.
        """
        own = self._turns * self.run
        turns = torch.stack([part[:own].reshape(self._turns, self.run, part.shape[1]) for part in parts], 1)
        return torch.cat([turns.flatten(0, 2), *[part[own:] for part in parts]])[: self.rows]

    @cached_property
    def _turns(self) -> int:
        return self.rows // (self.replicas * self.run)
