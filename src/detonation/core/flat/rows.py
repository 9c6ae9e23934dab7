"""Buckets: runs of rows of a flat, and the pieces of parameters that lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from detonation.core.flat.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    T = TypeVar("T", Tensor, Tensor | None)

BUCKETS, SMALL_BUCKETS = 4, 8
"""The most buckets that a flat is cut into; the second where the network adds up the messages, or a
round ends. Each costs an accelerator some launches: a sum the fewest, and rounds are rare. Small
ones take less memory."""


@dataclass(frozen=True)
class Span:
    """The coordinates from `start` to below `stop` of the flattened local shard of parameter number
    `index`."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """The rows of a layout from row `first` on: a layout of the pieces of parameters that lie in
    them."""

    first: int
    layout: Layout
    pieces: tuple[Span, ...]
    is_whole: bool = False

    @classmethod
    def whole(cls, layout: Layout) -> Bucket:
        """All rows of `layout`."""
        return cls(
            0,
            layout,
            tuple(Span(i, 0, slot.numel) for i, slot in enumerate(layout.slots)),
            is_whole=True,
        )

    @classmethod
    def of(cls, layout: Layout, first: int, end: int) -> Bucket:
        """The rows of `layout` from `first` to below `end`."""
        pieces: list[Span] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for index, slot in enumerate(layout.slots):
            start, stop = (
                max(first - slot.row, 0) * layout.chunk,
                min((end - slot.row) * layout.chunk, slot.numel),
            )
            if start < stop:
                pieces.append(Span(index, start, stop))
                shapes[slot.name] = slot.shape if stop - start == slot.numel else (stop - start,)
        return cls(first, Layout.of(shapes, layout.chunk), tuple(pieces))

    @classmethod
    def strips(cls, layout: Layout, rows: int) -> list[Bucket]:
        """The rows of `layout` parameter by parameter, a matrix in tiles in whole lines of about
        `rows` tiles."""
        found = []
        for index, slot in enumerate(layout.slots):
            for first, strip, start in slot.strips(rows):
                of_one = Layout(layout.chunk, (strip,), layout.tile)
                found.append(
                    cls(slot.row + first, of_one, (Span(index, start, start + strip.numel),))
                )
        return found

    @cached_property
    def rows(self) -> slice:
        """Its rows in the whole flat."""
        return slice(self.first, self.first + self.layout.rows)

    @cached_property
    def parameters(self) -> frozenset[int]:
        """The numbers of the parameters that have a piece in the bucket."""
        return frozenset(piece.index for piece in self.pieces)

    def cut(self, tensors: Sequence[T]) -> Sequence[T]:
        """The pieces of `tensors` that lie in the bucket; a piece of a contiguous tensor shares its
        memory.

        Shapes: one local shape per parameter -> one per piece: the local shape, or `[n]` for a part
        of it.
        """
        if self.is_whole:
            return tensors
        return [
            tensor
            if (tensor := tensors[p.index]) is None or tensor.numel() == p.stop - p.start
            else tensor.reshape(-1)[p.start : p.stop]
            for p in self.pieces
        ]
