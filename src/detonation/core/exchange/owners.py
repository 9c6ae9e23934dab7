"""Row owners: the rows that each replica aggregates for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.codec.form import Dealt


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

    @property
    def dealt(self) -> Dealt:
        """The same division, as kernels compute it."""
        return Dealt(self.replicas, self._turns * self.run, self.run)

    @property
    def missing(self) -> int:
        """The rows of padding."""
        return self.owned * self.replicas - self.rows

    def deal(self, lines: Tensor, padding: Tensor | None = None) -> Tensor:
        """The lines of each owner, in order.

        Shapes: lines `[rows, n]`, padding `[n]`, zeros where it is None -> `[replicas, owned, n]`.
        """
        n, dealt = lines.shape[1], self._turns * self.replicas * self.run
        turns = lines[:dealt].view(self._turns, self.replicas, self.run, n).transpose(0, 1).contiguous()
        if dealt == self.rows:
            return turns.view(self.replicas, self.owned, n)
        rest = lines[dealt:]
        if self.missing:
            filled = lines.new_zeros(n) if padding is None else padding
            rest = torch.cat([rest, filled.expand(self.missing, -1)])
        return torch.cat([turns.view(self.replicas, -1, n), rest.view(self.replicas, -1, n)], 1)

    def collect(self, parts: Tensor | Sequence[Tensor]) -> Tensor:
        """The inverse of `deal`, without the padding.

        Shapes: `[replicas, owned, n]`, or `[owned, n]` of each owner -> `[rows, n]`.
        """
        parts, own = parts if isinstance(parts, Tensor) else torch.stack(list(parts)), self._turns * self.run
        n = parts.shape[2]
        turns = parts[:, :own].view(self.replicas, self._turns, self.run, n).transpose(0, 1).contiguous().view(-1, n)
        if len(turns) == self.rows:
            return turns
        return torch.cat([turns, parts[:, own:].contiguous().view(-1, n)])[: self.rows]

    @cached_property
    def _turns(self) -> int:
        return self.rows // (self.replicas * self.run)
