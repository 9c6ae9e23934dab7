"""Flat: the local shards of many parameters seen as one `[rows, chunk]` matrix, in chunks or in
tiles."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """The squares of `side` x `side` coordinates that cover a matrix, zero-padded at its lower and
    right edge.

    Tile [i, j] is row i * across + j, in row-major order.
    """

    height: int
    width: int
    side: int

    @classmethod
    def of(cls, shape: Sequence[int], side: int) -> Tiles | None:
        """The tiles of a parameter, folded to [first, rest]; None for one that does not fill a
        single tile.

        >>> Tiles.of((65, 64), 64).rows, Tiles.of((128, 3, 5, 5), 64).rows, Tiles.of((63, 999), 64)
        (2, 4, None)
        """
        height, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        return cls(height, width, side) if side and min(height, width) >= side else None

    @property
    def down(self) -> int:
        return -(-self.height // self.side)

    @property
    def across(self) -> int:
        return -(-self.width // self.side)

    @property
    def rows(self) -> int:
        return self.down * self.across

    def cut(self, tensor: Tensor) -> Tensor:
        """The tiles of `tensor`, in memory of their own.

        Shapes: any of height * width elements -> `[rows, side * side]`.
        """
        side = self.side
        missing = (0, self.across * side - self.width, 0, self.down * side - self.height)
        padded = torch.nn.functional.pad(tensor.reshape(self.height, self.width), missing)
        return (
            padded.view(self.down, side, self.across, side)
            .transpose(1, 2)
            .reshape(self.rows, side * side)
        )

    def join(self, tiles: Tensor) -> Tensor:
        """The inverse of `cut`, in memory of its own.

        Shapes: `[rows, side * side]` -> `[height, width]`.
        """
        side = self.side
        squares = tiles.view(self.down, self.across, side, side).transpose(1, 2)
        return squares.reshape(self.down * side, self.across * side)[: self.height, : self.width]


FragmentUnit = Literal["parameter", "block"]

CACHE_BLOCK = 330_000
"""Coordinates per operation of plain torch on a CPU: few enough for its cache, and enough to pay
for the call.

Not a power of two: neighbouring lines would compete for the same places in the cache.
"""


@dataclass(frozen=True)
class Slot:
    """The position of one parameter's local shard: `rows` rows from row `row` on, in chunks or in
    tiles."""

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int
    tiles: Tiles | None = None

    @cached_property
    def numel(self) -> int:
        """The number of coordinates without the padding."""
        return math.prod(self.shape)

    def strips(self, rows: int) -> Iterator[tuple[int, Slot, int]]:
        """The slot in parts, each as a slot of its own: lines of about `rows` tiles, or all of a
        parameter in chunks.

        Yields the first row of each within this slot, the part, and its first coordinate.
        """
        tiles = self.tiles
        lines = max(1, rows // tiles.across) if tiles else 0
        if tiles is None or lines >= tiles.down:
            yield 0, replace(self, row=0), 0
            return
        for line in range(0, tiles.down, lines):
            height = min(lines * tiles.side, tiles.height - line * tiles.side)
            part = replace(tiles, height=height)
            strip = Slot(self.name, (height * tiles.width,), 0, part.rows, part)
            yield line * tiles.across, strip, line * tiles.side * tiles.width


@dataclass(frozen=True)
class Layout:
    """The assignment of rows of the flat matrix to parameters.

    A row is `chunk` neighbouring coordinates of one parameter or, with `tile`, a square of tile x
    tile coordinates of a matrix that fills at least one such square; `chunk` is then tile * tile.
    The end of a parameter is zero-padded; the chunk never shrinks to a divisor. An empty local
    shard has no rows, a scalar has one.
    """

    chunk: int
    slots: tuple[Slot, ...]
    tile: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], chunk: int, tile: int = 0) -> Layout:
        """The layout of local shards with these `shapes`, by parameter name, in the order given.

        >>> Layout.of({"weight": (3, 30), "bias": (3,)}, chunk=64).rows
        3
        """
        slots, row = [], 0
        for name, shape in shapes.items():
            tiles = Tiles.of(shape, tile)
            rows = tiles.rows if tiles else -(-math.prod(shape) // chunk)
            slots.append(Slot(name, tuple(shape), row, rows, tiles))
            row += rows
        return cls(chunk, tuple(slots), tile)

    def fragments(
        self, count: int, unit: FragmentUnit = "parameter", sizes: Mapping[str, int] | None = None
    ) -> list[Layout]:
        """The layouts of `count` parts of nearly equal size: none exceeds the mean by more than the
        largest unit.

        The units go to the lightest fragment, the largest first, and in the order of the model
        where they are equally large. Equal layers are thus dealt out in turns.

        Args:
            count: At least 1.
            unit: "parameter", or "block" for the parameters whose names are equal up to the first
                number (layers.3), which then stay together.
            sizes: Coordinates of each parameter over all shards, by name, so that all shards divide
                alike; those of this layout when left out.

        >>> layout = Layout.of({"0.weight": (8, 8), "0.bias": (8,), "1.weight": (8, 8), "1.bias": (8,)}, chunk=4)
        >>> [[slot.name for slot in fragment.slots] for fragment in layout.fragments(2)]
        [['0.weight', '0.bias'], ['1.weight', '1.bias']]
        """
        if count == 1:
            return [self]
        weights: dict[str, int] = {}
        for slot in self.slots:
            key = _unit_of(slot.name, unit)
            weights[key] = weights.get(key, 0) + (slot.numel if sizes is None else sizes[slot.name])
        loads, fragment_of = [0] * count, dict[str, int]()
        for key in sorted(weights, key=weights.__getitem__, reverse=True):
            # stable: equal ones stay in order
            fragment_of[key] = lightest = loads.index(min(loads))
            loads[lightest] += weights[key]
        shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
        for slot in self.slots:
            shapes[fragment_of[_unit_of(slot.name, unit)]][slot.name] = slot.shape
        return [Layout.of(each, self.chunk, self.tile) for each in shapes]

    @cached_property
    def rows(self) -> int:
        """The number of rows of the flat."""
        return self.slots[-1].row + self.slots[-1].rows if self.slots else 0

    @cached_property
    def numel(self) -> int:
        """The number of coordinates without the padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def tiled(self) -> bool:
        """True if a parameter lies in tiles."""
        return any(slot.tiles for slot in self.slots)

    def zeros(self, device: torch.device) -> Tensor:
        """A flat matrix of zeros: fp32, because a decay close to 1 does not change a bf16 number.

        Shapes: -> `[rows, chunk]` fp32.
        """
        return torch.zeros(self.rows, self.chunk, dtype=torch.float32, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` in the local shape of each parameter, sharing memory; not for a
        layout in tiles.

        Shapes: `[rows, chunk]` -> one local shape per parameter.
        """
        assert not self.tiled, (
            "tiles have no view in the shape of their parameter: read `parts`, and `write` them"
        )
        line = flat.view(-1)
        return [line[start:stop].view(slot.shape) for slot, start, stop in self._spans]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` to read in the local shape of each parameter: views, or copies of
        parameters in tiles.

        Shapes: `[rows, chunk]` -> one local shape per parameter.
        """
        if not self.tiled:
            return self.views(flat)
        pairs = zip(self.slots, self._row_views(flat), strict=True)
        return [
            slot.tiles.join(part).reshape(slot.shape) if slot.tiles else part
            for slot, part in pairs
        ]

    def scatter(self, parts: Iterable[Tensor], targets: Sequence[Tensor]) -> None:
        """Writes `parts`, consecutive rows of a flat, into `targets`.

        Shapes: parts `[some rows, chunk]` each; targets contiguous, one local shape per parameter.
        """
        lines, at = [t.view(-1) for t in targets], 0
        for part in parts:
            line, pairs, end = part.reshape(-1), [], at + part.numel()
            for (_, start, stop), target in zip(self._spans, lines, strict=True):
                low, high = max(at, start), min(end, stop)
                if low < high:
                    pairs.append((target[low - start : high - start], line[low - at : high - at]))
            copy([target for target, _ in pairs], [source for _, source in pairs])
            at = end
            del part, line, pairs  # before the next one is made

    def write(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Writes `tensors` into their parts of `flat`; the part of an absent tensor and the padding
        do not change.

        Shapes: one local shape per parameter -> `[rows, chunk]`.
        """
        if not self.tiled:
            copy(self.views(flat), tensors)
            return
        pairs = zip(self.slots, tensors, strict=True)
        sources = [slot.tiles.cut(t) if slot.tiles and t is not None else t for slot, t in pairs]
        copy(self._row_views(flat), sources)

    def fill(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Makes `flat` hold `tensors`; an absent tensor and the padding are zero.

        Shapes: one local shape per parameter -> `[rows, chunk]`.
        """
        if flat.numel() != self.numel or any(tensor is None for tensor in tensors):
            flat.zero_()
        if self.tiled:
            self.write(flat, tensors)
        else:
            copy(self.views(flat), tensors)

    def padding(self, device: torch.device) -> Tensor:
        """Positions in the flattened matrix that belong to no parameter.

        Shapes: -> `[padded]` int64.
        """
        found = []
        for slot, start, stop in self._spans:
            if slot.tiles:
                inside = slot.tiles.cut(
                    torch.ones(slot.shape, dtype=torch.bool, device="cpu")
                ).view(-1)
                found.append(inside.logical_not().nonzero().view(-1).to(device) + start)
            else:
                found.append(
                    torch.arange(
                        stop, start + slot.rows * self.chunk, dtype=torch.int64, device=device
                    )
                )
        return torch.cat(found or [torch.empty(0, dtype=torch.long, device=device)])

    def row_numbers(self, parameters: Iterable[int]) -> Tensor:
        """The number of the parameter of each row, for some `parameters`; -1 in all other rows.

        Shapes: -> `[rows]` int64 on the host.
        """
        found = torch.full((self.rows,), -1, dtype=torch.int64, device="cpu")
        for number in parameters:
            slot = self.slots[number]
            found[slot.row : slot.row + slot.rows] = number
        return found

    def flatten(self, tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A new flat matrix that holds `tensors`; an absent tensor is zero.

        Shapes: one local shape per parameter -> `[rows, chunk]` fp32.
        """
        flat = torch.empty(self.rows, self.chunk, dtype=torch.float32, device=device)
        self.fill(flat, tensors)
        return flat

    @cached_property
    def _spans(self) -> list[tuple[Slot, int, int]]:
        """Each slot, and the positions in the flattened matrix where its coordinates begin and end."""
        starts = [slot.row * self.chunk for slot in self.slots]
        return [
            (slot, start, start + slot.numel)
            for slot, start in zip(self.slots, starts, strict=True)
        ]

    def _row_views(self, flat: Tensor) -> list[Tensor]:
        """The rows of each slot in tiles, and the coordinates of each other slot in the shape of
        its parameter."""
        line = flat.view(-1)
        return [
            (
                flat[slot.row : slot.row + slot.rows]
                if slot.tiles
                else line[start:stop].view(slot.shape)
            )
            for slot, start, stop in self._spans
        ]


def _unit_of(name: str, unit: FragmentUnit) -> str:
    """The name of the unit of a parameter.

    >>> _unit_of("model.layers.3.mlp.up.weight", "block"), _unit_of("model.norm.weight", "block")
    ('model.layers.3', 'model.norm.weight')
    """
    block = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name) if unit == "block" else None
    return block[0] if block else name


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copies each source that is present and not empty into its target, converting the dtype.

    Shapes: each source as its target.
    """
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s is not None and s.numel()]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
