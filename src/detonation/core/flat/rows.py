"""Rows of a flat: buckets of consecutive rows, the owners of rows, and copies of rows with which a
step can be undone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch

from detonation.core.flat.layout import Layout, copy

if TYPE_CHECKING:
    from torch import Tensor

    T = TypeVar("T", Tensor, Tensor | None)


BUCKETS = 4
"""Largest number of buckets of a flat, unless `SMALL_BUCKETS` applies. On an accelerator each
bucket costs kernel launches."""
SMALL_BUCKETS = 8
"""Largest number of buckets if an all-reduce adds the messages, or if messages are sent at the end
of a round. More and smaller buckets need less memory. They cost little here, because a sum needs
fewer kernel launches per bucket, and rounds end rarely.
"""


@dataclass(frozen=True)
class Span:
    """Coordinates `start` to `stop`, excluding `stop`, of the flattened local shard of the
    parameter with the index `index`.
    """

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive rows of a flat, from row `first` on. `layout` describes the parts of parameters
    in these rows.

    late: True if the gradients of these rows arrive only at the end of backward.
    """

    first: int
    layout: Layout
    pieces: tuple[Span, ...]
    is_whole: bool = False
    late: bool = False

    @classmethod
    def whole(cls, layout: Layout) -> Bucket:
        """A bucket with all rows of `layout`."""
        pieces = tuple(Span(i, 0, slot.numel) for i, slot in enumerate(layout.slots))
        return cls(0, layout, pieces, is_whole=True)

    @classmethod
    def of(cls, layout: Layout, first: int, end: int, late: bool = False) -> Bucket:
        """The bucket of rows `first` to `end`, excluding `end`, of `layout`."""
        pieces: list[Span] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for index, slot in enumerate(layout.slots):
            start = max(first - slot.row, 0) * layout.chunk
            stop = min((end - slot.row) * layout.chunk, slot.numel)
            if start < stop:
                pieces.append(Span(index, start, stop))
                shapes[slot.name] = (stop - start,)
                if stop - start == slot.numel:
                    shapes[slot.name] = slot.shape
        return cls(first, Layout.of(shapes, layout.chunk), tuple(pieces), late=late)

    @classmethod
    def strips(cls, layout: Layout, rows: int) -> list[Bucket]:
        """Cuts `layout` into buckets that each hold one parameter, or about `rows` tiles of one
        parameter; see `Slot.strips`.
        """
        found = []
        for index, slot in enumerate(layout.slots):
            for first, strip, start in slot.strips(rows):
                of_one = Layout(layout.chunk, (strip,), layout.tile)
                span = Span(index, start, start + strip.numel)
                found.append(cls(slot.row + first, of_one, (span,)))
        return found

    @cached_property
    def rows(self) -> slice:
        """The rows of the bucket in the whole flat."""
        return slice(self.first, self.first + self.layout.rows)

    @cached_property
    def parameters(self) -> frozenset[int]:
        """Indices of the parameters that have coordinates in the bucket."""
        return frozenset(piece.index for piece in self.pieces)

    def cut(self, tensors: Sequence[T]) -> Sequence[T]:
        """The parts of `tensors` that lie in this bucket. A part of a contiguous tensor shares
        memory with the tensor.

        Shapes: one local shape per parameter -> one per piece: the local shape, or `[n]` for a part
        of it.
        """
        if self.is_whole:
            return tensors
        found = []
        for piece in self.pieces:
            tensor = tensors[piece.index]
            if tensor is not None and tensor.numel() > piece.stop - piece.start:
                tensor = tensor.reshape(-1)[piece.start : piece.stop]
            found.append(tensor)
        return found


@dataclass(frozen=True)
class RowOwners:
    """Assigns each of `rows` rows to an owner, the replica that aggregates this row. First, groups
    of `run` consecutive rows are assigned to the owners round robin, so long as each owner gets a
    group. Then the remaining rows are divided in order: each owner gets an equal part until no row
    is left.

    So a row has the same owner in the whole flat and in a bucket, if the bucket begins and ends at
    multiples of `replicas` * `run` rows.
    """

    rows: int
    replicas: int
    run: int

    @cached_property
    def owned(self) -> int:
        """Number of rows that each replica owns, including padding rows at the end."""
        return -(-self.rows // self.replicas)

    @property
    def in_turns(self) -> int:
        """Number of rows that each replica owns by round robin, without its part of the remaining
        rows.
        """
        return self._turns * self.run

    def of_bucket(self, rows: int) -> RowOwners:
        """The owners of a bucket of `rows` rows that begins at a multiple of `replicas` * `run`
        rows."""
        if rows == self.rows:
            return self
        return RowOwners(rows, self.replicas, self.run)

    @cached_property
    def missing(self) -> int:
        """Number of padding rows, which make the parts of all owners equally long."""
        return self.owned * self.replicas - self.rows

    def deal(self, lines: Tensor, padding: Tensor | None = None) -> Tensor:
        """Groups the rows of `lines` by owner; each owner's rows keep their order.

        Shapes: lines `[rows, n]`, padding `[n]` (None: zeros) -> `[replicas, owned, n]`.
        """
        return self.deal_each([(lines, padding)])[0]

    def deal_each(self, lines: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Groups the rows of several matrices by owner as `deal` does, each matrix with its own
        padding, in one operation.

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
        """Puts the rows of all owners back in the order of the flat, without the padding. This is
        the inverse of `deal`.

        Shapes: `[replicas, owned, n]`, or `[owned, n]` of each owner -> `[rows, n]`.
        """
        if not isinstance(parts, torch.Tensor):
            parts = torch.stack(list(parts))
        return self.collect_each([parts])[0]

    def collect_each(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Puts the rows of several matrices back in the order of the flat as `collect` does, in one
        operation.

        Shapes: `[replicas, owned, n]` -> `[rows, n]`, for each.
        """
        found = [each.new_empty(self.rows, each.shape[2]) for each in parts]
        pairs = self._pairs(found, parts)
        copy([lines for _, lines in pairs], [part for part, _ in pairs])
        return found

    def _pairs(
        self, matrices: Sequence[Tensor], dealt: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views for the same rows: in each pair one view of `dealt`, and one of
        `matrices`, in equal shapes. First come the rows that are assigned round robin, then the
        remaining rows of each owner.
        """
        pairs = []
        own = self._turns * self.run
        begin = self.replicas * own
        rest = self.owned - own  # number of rows of an owner that are not assigned round robin
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
        """Views of the padding rows in `parts`."""
        own = self._turns * self.run
        whole, left = self._remainder
        return [parts[whole, own + left :], parts[whole + 1 :, own:]]

    @cached_property
    def _remainder(self) -> tuple[int, int]:
        """How the rows that are not assigned round robin are divided: the number of owners that get
        a full part, and the number of rows that the next owner gets. Further owners get none.
        """
        own = self._turns * self.run
        if own == self.owned:
            return 0, 0
        return divmod(self.rows - self.replicas * own, self.owned - own)

    @cached_property
    def _turns(self) -> int:
        """Number of groups that each owner gets round robin. A group has `run` rows."""
        return self.rows // (self.replicas * self.run)


class KeptRows:
    """Holds a copy of some rows of `memory`, so that a step in these rows can be undone.

    Args:
        memory: `[rows, n]`.
        numbers: For each row, the index of its parameter, or a number below 0 if the row is not
            copied; `[rows]` int64 on the host.
    """

    def __init__(self, memory: Tensor, numbers: Tensor) -> None:
        self._memory = memory
        self._rows = (numbers >= 0).nonzero().view(-1)
        self._numbers = numbers[self._rows]
        self._kept = memory[self._rows.to(memory.device)]

    def restore(self, parameters: Collection[int]) -> None:
        """Undoes the step in the rows of the parameters with the indices `parameters`."""
        if not parameters:
            return
        chosen = torch.isin(self._numbers, _on_host(parameters))
        rows = self._rows[chosen].to(self._memory.device)
        self._memory.index_copy_(0, rows, self._kept[chosen.to(self._memory.device)])

    def forget(self) -> None:
        """Drops all copied rows, so that `restore` changes nothing."""
        self._rows = self._rows[:0]
        self._numbers = self._numbers[:0]
        self._kept = self._kept[:0]


def _on_host(numbers: Collection[int]) -> Tensor:
    """The integers `numbers` in rising order, as a tensor on the host.

    Shapes: -> `[n]` int64 on the host.
    """
    return torch.tensor(sorted(numbers), dtype=torch.int64, device="cpu")
