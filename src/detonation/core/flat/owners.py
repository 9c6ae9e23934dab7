"""Row owners: which replica aggregates which rows for all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from detonation.core.flat.layout import copy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RowOwners:
    """Assigns `rows` rows to `replicas`: runs of `run` rows round robin, and the remainder in equal
    parts.

    A bucket that begins and ends at full rounds therefore has the same owners as its rows have in
    the whole flat.
    """

    rows: int
    replicas: int
    run: int

    @cached_property
    def owned(self) -> int:
        """Number of rows that each replica owns. The last ones may be padding."""
        return -(-self.rows // self.replicas)

    @property
    def in_turns(self) -> int:
        """Number of rows of each replica that are assigned round robin."""
        return self._turns * self.run

    def of_bucket(self, rows: int) -> RowOwners:
        """The owners of a bucket of `rows` rows that begins at a full round."""
        if rows == self.rows:
            return self
        return RowOwners(rows, self.replicas, self.run)

    @cached_property
    def missing(self) -> int:
        """Number of padding rows."""
        return self.owned * self.replicas - self.rows

    def deal(self, lines: Tensor, padding: Tensor | None = None) -> Tensor:
        """The rows of `lines` grouped by owner, in order.

        Shapes: lines `[rows, n]`, padding `[n]` (None: zeros) -> `[replicas, owned, n]`.
        """
        return self.deal_each([(lines, padding)])[0]

    def deal_each(self, lines: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """`deal` for several matrices, each with its own padding, in one operation.

        Shapes: as in `deal`, for each.
        """
        matrices = [each for each, _ in lines]
        found = [each.new_empty(self.replicas, self.owned, each.shape[1]) for each in matrices]
        pairs = self._pairs(matrices, found)
        if self.missing:
            for (each, padding), parts in zip(lines, found, strict=True):
                if padding is None:
                    padding = each.new_zeros(each.shape[1])
                pairs += [(free, padding.expand_as(free)) for free in self._free(parts)]
        copy([target for target, _ in pairs], [source for _, source in pairs])
        return found

    def collect(self, parts: Tensor | Sequence[Tensor]) -> Tensor:
        """The inverse of `deal`, without the padding.

        Shapes: `[replicas, owned, n]`, or `[owned, n]` of each owner -> `[rows, n]`.
        """
        if not isinstance(parts, torch.Tensor):
            parts = torch.stack(list(parts))
        return self.collect_each([parts])[0]

    def collect_each(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """`collect` for several matrices, in one operation.

        Shapes: `[replicas, owned, n]` -> `[rows, n]`, for each.
        """
        found = [each.new_empty(self.rows, each.shape[2]) for each in parts]
        pairs = self._pairs(found, parts)
        copy([lines for _, lines in pairs], [part for part, _ in pairs])
        return found

    def _pairs(
        self, matrices: Sequence[Tensor], dealt: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views of `dealt` and `matrices` with the same shape and content: the rows
        assigned round robin, followed by the owners' remainders.
        """
        pairs = []
        own = self._turns * self.run
        begin = self.replicas * own
        rest = self.owned - own  # rows of each owner in the remainder
        whole, left = self._remainder
        end = begin + whole * rest
        for lines, parts in zip(matrices, dealt, strict=True):
            n = lines.shape[1]
            turns = lines[:begin].view(self._turns, self.replicas, self.run, n).transpose(0, 1)
            pairs.append((parts[:, :own].view(self.replicas, self._turns, self.run, n), turns))
            pairs.append((parts[:whole, own:], lines[begin:end].view(whole, rest, n)))
            if left:
                pairs.append((parts[whole, own : own + left], lines[end:]))
        return pairs

    def _free(self, parts: Tensor) -> list[Tensor]:
        """The padding of `parts`."""
        own = self._turns * self.run
        whole, left = self._remainder
        return [parts[whole, own + left :], parts[whole + 1 :, own:]]

    @cached_property
    def _remainder(self) -> tuple[int, int]:
        """Number of owners with a full part of the remainder, and number of rows of the next
        owner.
        """
        own = self._turns * self.run
        if own == self.owned:
            return 0, 0
        return divmod(self.rows - self.replicas * own, self.owned - own)

    @cached_property
    def _turns(self) -> int:
        """Number of full rounds."""
        return self.rows // (self.replicas * self.run)
