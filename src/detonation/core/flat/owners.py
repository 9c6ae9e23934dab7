"""Row owners: the rows that each replica aggregates for all."""

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
    """Assigns `rows` rows to `replicas` in turns of `run` rows each; the remainder is split into
    equal parts.

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
    def in_turns(self) -> int:
        """The rows of each replica that are dealt in turns."""
        return self._turns * self.run

    def of_bucket(self, rows: int) -> RowOwners:
        """The owners of `rows` rows that begin where a round of turns begins."""
        return self if rows == self.rows else RowOwners(rows, self.replicas, self.run)

    @cached_property
    def missing(self) -> int:
        """The rows of padding."""
        return self.owned * self.replicas - self.rows

    def deal(self, lines: Tensor, padding: Tensor | None = None) -> Tensor:
        """The lines of each owner, in order.

        Shapes: lines `[rows, n]`, padding `[n]`, zeros where it is None -> `[replicas, owned, n]`.
        """
        return self.deal_each([(lines, padding)])[0]

    def deal_each(self, lines: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """`deal` for several matrices, each with its padding, in one operation.

        Shapes: as in `deal`, for each.
        """
        found = [each.new_empty(self.replicas, self.owned, each.shape[1]) for each, _ in lines]
        pairs = self._pairs([each for each, _ in lines], found)
        for (each, padding), parts in zip(lines, found, strict=True) if self.missing else ():
            filled = each.new_zeros(each.shape[1]) if padding is None else padding
            pairs += [(free, filled.expand_as(free)) for free in self._free(parts)]
        copy([target for target, _ in pairs], [source for _, source in pairs])
        return found

    def collect(self, parts: Tensor | Sequence[Tensor]) -> Tensor:
        """The inverse of `deal`, without the padding.

        Shapes: `[replicas, owned, n]`, or `[owned, n]` of each owner -> `[rows, n]`.
        """
        return self.collect_each(
            [parts if isinstance(parts, torch.Tensor) else torch.stack(list(parts))]
        )[0]

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
        """The dealt and the undealt rows, in the same shape: those in turns, and the remainders of
        the owners."""
        own, pairs = self._turns * self.run, []
        begin, rest = self.replicas * own, self.owned - own
        whole, left = divmod(self.rows - begin, rest) if rest else (0, 0)
        for lines, parts in zip(matrices, dealt, strict=True):
            n = lines.shape[1]
            turns = lines[:begin].view(self._turns, self.replicas, self.run, n).transpose(0, 1)
            pairs.append((parts[:, :own].view(self.replicas, self._turns, self.run, n), turns))
            pairs.append(
                (parts[:whole, own:], lines[begin : begin + whole * rest].view(whole, rest, n))
            )
            if left:
                pairs.append((parts[whole, own : own + left], lines[begin + whole * rest :]))
        return pairs

    def _free(self, parts: Tensor) -> list[Tensor]:
        """The padding of `parts`."""
        rest = self.owned - self._turns * self.run
        whole, left = divmod(self.rows - self.replicas * self._turns * self.run, rest)
        return [parts[whole, self.owned - rest + left :], parts[whole + 1 :, self.owned - rest :]]

    @cached_property
    def _turns(self) -> int:
        return self.rows // (self.replicas * self.run)
