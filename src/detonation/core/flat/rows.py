"""Buckets: consecutive rows of a flat, and the parts of parameters in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from detonation.core.flat.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    T = TypeVar("T", Tensor, Tensor | None)

BUCKETS = 4
"""Largest number of buckets of a flat. On an accelerator each bucket costs kernel launches."""
SMALL_BUCKETS = 8
"""Largest number of buckets if the network adds messages, or at the end of a round. A sum needs
fewer launches per bucket, and rounds are rare; smaller buckets need less memory.
"""


@dataclass(frozen=True)
class Span:
    """Coordinates `start` to `stop`, `stop` excluded, of the flattened local shard of parameter
    number `index`."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Rows of a layout from row `first` on, with the layout of the parts of parameters in these
    rows.
    """

    first: int
    layout: Layout
    pieces: tuple[Span, ...]
    is_whole: bool = False

    @classmethod
    def whole(cls, layout: Layout) -> Bucket:
        """All rows of `layout`."""
        pieces = tuple(Span(i, 0, slot.numel) for i, slot in enumerate(layout.slots))
        return cls(0, layout, pieces, is_whole=True)

    @classmethod
    def of(cls, layout: Layout, first: int, end: int) -> Bucket:
        """Rows `first` to `end`, `end` excluded, of `layout`."""
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
        return cls(first, Layout.of(shapes, layout.chunk), tuple(pieces))

    @classmethod
    def strips(cls, layout: Layout, rows: int) -> list[Bucket]:
        """The buckets of `layout` parameter by parameter; a parameter in tiles is cut into strips
        of about `rows` tiles; see `Slot.strips`.
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
        """Numbers of the parameters with coordinates in the bucket."""
        return frozenset(piece.index for piece in self.pieces)

    def cut(self, tensors: Sequence[T]) -> Sequence[T]:
        """The parts of `tensors` in the bucket. A part of a contiguous tensor shares its memory.

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
