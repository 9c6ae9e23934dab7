"""Buckets: runs of rows that leave as messages of their own, while backward still makes the gradients of others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from detonation.core.codec.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.schemes.scheme import Scheme

T = TypeVar("T", Tensor, Tensor | None)

PARTS = 8
SMALLEST, LARGEST = 2**20, 25 * 2**20
"""A bucket is an eighth of the flat, in bytes of fp32, within these limits."""


@dataclass(frozen=True)
class Piece:
    """The coordinates from `start` to below `stop` of parameter number `index`, of its flattened local shard."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """The rows of a layout from row `first` on: a layout of the pieces of parameters that lie in them."""

    first: int
    layout: Layout
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, layout: Layout) -> "Bucket":
        return cls(0, layout, tuple(Piece(i, 0, slot.numel) for i, slot in enumerate(layout.slots)))

    @classmethod
    def of(cls, layout: Layout, first: int, end: int) -> "Bucket":
        """The rows of `layout` from `first` to below `end`."""
        pieces: list[Piece] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for index, slot in enumerate(layout.slots):
            start, stop = max(first - slot.row, 0) * layout.chunk, min((end - slot.row) * layout.chunk, slot.numel)
            if start < stop:
                pieces.append(Piece(index, start, stop))
                shapes[slot.name] = slot.shape if stop - start == slot.numel else (stop - start,)
        return cls(first, Layout.of(shapes, layout.chunk), tuple(pieces))

    @cached_property
    def parameters(self) -> frozenset[int]:
        """The numbers of the parameters that have a piece in it."""
        return frozenset(piece.index for piece in self.pieces)

    def cut(self, tensors: Sequence[T]) -> list[T]:
        """Of `tensors`, one a parameter, the pieces that lie in it, sharing memory with those that are contiguous."""
        return [_cut(tensors[piece.index], piece) for piece in self.pieces]


def _cut(tensor: T, piece: Piece) -> T:
    if tensor is None or tensor.numel() == piece.stop - piece.start:
        return tensor
    return tensor.reshape(-1)[piece.start : piece.stop]


def run(codec: Codec) -> int:
    """Rows after which a message may be cut without a change to any bit of it.

    Whole blocks of the precision and whole bytes of packed numbers; 64 rows at least, because a matrix product of a
    few rows may round as one of many does not.
    """
    block = codec.precision.block
    return math.lcm(block // math.gcd(block, codec.selection.kept), 64)


def cut(layout: Layout, scheme: Scheme, ranks: int) -> list[Bucket]:
    """The buckets of `layout`, in the order of their rows: together they send the bytes of the whole, bit for bit.

    Each but the last is a multiple of a run for each of the `ranks` (replicas x lanes) that carry a message, so that
    replicas own whole runs and no share has a remainder. What clips to the norm of whole messages stays whole, and so
    does what lies in tiles, because such a multiple ends within a line of them.
    """
    unit = run(scheme.codec) * ranks
    row_bytes = 4 * layout.chunk
    wanted = min(max(layout.rows * row_bytes // PARTS, SMALLEST), LARGEST)
    rows = max(1, wanted // (row_bytes * unit)) * unit
    count = 1 if scheme.combine == "clipped" or layout.tiled else max(1, layout.rows // rows)
    if count == 1:
        return [Bucket.whole(layout)]
    ends = [*(rows * i for i in range(1, count)), layout.rows]  # the last takes the remainder
    return [Bucket.of(layout, first, end) for first, end in zip([0, *ends], ends, strict=False)]


def codec_of(bucket: Bucket, codec: Codec, rows: int) -> Codec:
    """`codec` for the rows of `bucket` among `rows` of the whole."""
    return replace(codec, selection=codec.selection.part(bucket.first, rows))
