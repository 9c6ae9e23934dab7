"""Layouts of a flat: which rows of the `[rows, chunk]` matrix hold which parameter, in chunks or in
tiles.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """Squares of `side` x `side` coordinates that cover a matrix, padded with zeros at the lower
    and right edge.

    Tile j in line i of tiles is row i * `across` + j of the flat matrix, where `across` is the
    count of tiles in a line.
    """

    height: int
    width: int
    side: int

    @classmethod
    def of(cls, shape: Sequence[int], side: int) -> Tiles | None:
        """The tiles of a parameter, viewed as a matrix: its first dimension by the product of all
        other dimensions. None if this matrix has fewer lines or columns than a tile.

        >>> Tiles.of((65, 64), 64).rows, Tiles.of((128, 3, 5, 5), 64).rows, Tiles.of((63, 999), 64)
        (2, 4, None)
        """
        if not side or len(shape) < 2:
            return None
        height = shape[0]
        width = math.prod(shape[1:])
        if min(height, width) < side:
            return None
        return cls(height, width, side)

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
        """Cuts `tensor` into tiles, as a copy.

        Shapes: any of height * width elements -> `[rows, side * side]`.
        """
        side = self.side
        missing = (0, self.across * side - self.width, 0, self.down * side - self.height)
        padded = torch.nn.functional.pad(tensor.reshape(self.height, self.width), missing)
        squares = padded.view(self.down, side, self.across, side).transpose(1, 2)
        return squares.reshape(self.rows, side * side)

    def join(self, tiles: Tensor) -> Tensor:
        """Puts tiles together to a matrix, as a copy. This is the inverse of `cut`.

        Shapes: `[rows, side * side]` -> `[height, width]`.
        """
        side = self.side
        squares = tiles.view(self.down, self.across, side, side).transpose(1, 2)
        return squares.reshape(self.down * side, self.across * side)[: self.height, : self.width]


FragmentUnit = Literal["parameter", "block"]

CACHE_BLOCK = 330_000
"""Number of coordinates that plain torch processes in one operation on a CPU: so few that they fit
into the cache, and so many that the overhead of the call does not matter.

It is not a power of two, because neighbouring lines would then map to the same cache sets.
"""


@dataclass(frozen=True)
class Slot:
    """The rows of one parameter's local shard in the flat: `rows` rows from row `row` on, in chunks
    or in tiles.
    """

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int
    tiles: Tiles | None = None

    @cached_property
    def numel(self) -> int:
        """Number of coordinates without padding."""
        return math.prod(self.shape)

    def strips(self, rows: int) -> Iterator[tuple[int, Slot, int]]:
        """Cuts this slot (the rows of one parameter) into parts of about `rows` rows, but never
        inside a line of tiles. A parameter that is not cut into tiles is one part.

        Yields for each part: its first row, counted within this slot; the part as a `Slot`; and the
        index of its first coordinate in the local shard.
        """
        tiles = self.tiles
        lines = 0
        if tiles:
            lines = max(1, rows // tiles.across)
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

    A row holds `chunk` consecutive coordinates of one parameter. If `tile` is not 0, `chunk` is
    tile * tile, and a matrix that is at least one tile large is cut into tiles, one for each row.
    The end of a parameter is padded with zeros. An empty local shard has no rows, and a scalar has
    one row.
    """

    chunk: int
    slots: tuple[Slot, ...]
    tile: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], chunk: int, tile: int = 0) -> Layout:
        """The layout of local shards with these `shapes` by parameter name, in this order.

        >>> Layout.of({"weight": (3, 30), "bias": (3,)}, chunk=64).rows
        3
        """
        slots = []
        row = 0
        for name, shape in shapes.items():
            tiles = Tiles.of(shape, tile)
            if tiles:
                rows = tiles.rows
            else:
                rows = -(-math.prod(shape) // chunk)
            slots.append(Slot(name, tuple(shape), row, rows, tiles))
            row += rows
        return cls(chunk, tuple(slots), tile)

    def fragments(
        self, count: int, unit: FragmentUnit = "parameter", sizes: Mapping[str, int] | None = None
    ) -> list[Layout]:
        """The layouts of `count` fragments of nearly equal size: no fragment exceeds the mean size
        by more than the size of the largest unit.

        Units (parameters or blocks) are assigned one by one, the largest first, each to the
        fragment that is the smallest so far. Units of equal size keep the order of the model, so
        equal layers are assigned round robin.

        Args:
            count: At least 1.
            unit: "parameter", or "block". A block is all parameters whose names are equal up to the
                first number (layers.3).
            sizes: Number of coordinates of each parameter over all shards, by name, so that every
                shard is divided alike; by default the sizes in this layout.

        >>> shapes = {"0.weight": (8, 8), "0.bias": (8,), "1.weight": (8, 8), "1.bias": (8,)}
        >>> layout = Layout.of(shapes, chunk=4)
        >>> [[slot.name for slot in fragment.slots] for fragment in layout.fragments(2)]
        [['0.weight', '0.bias'], ['1.weight', '1.bias']]
        """
        if count == 1:
            return [self]
        if sizes is None:
            sizes = {slot.name: slot.numel for slot in self.slots}
        size_of: Counter[str] = Counter()
        for slot in self.slots:
            size_of[_unit_of(slot.name, unit)] += sizes[slot.name]
        loads = [0] * count
        fragment_of: dict[str, int] = {}
        # largest first; parameters (or blocks) of equal size come in the order of the model
        for key, size in size_of.most_common():
            fragment_of[key] = lightest = loads.index(min(loads))
            loads[lightest] += size
        shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
        for slot in self.slots:
            shapes[fragment_of[_unit_of(slot.name, unit)]][slot.name] = slot.shape
        return [Layout.of(each, self.chunk, self.tile) for each in shapes]

    @cached_property
    def rows(self) -> int:
        """Number of rows of the flat."""
        return sum(slot.rows for slot in self.slots)

    @cached_property
    def numel(self) -> int:
        """Number of coordinates without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def tiled(self) -> bool:
        """True if any parameter is cut into tiles."""
        return any(slot.tiles for slot in self.slots)

    def zeros(self, device: torch.device) -> Tensor:
        """A flat matrix of zeros in fp32. In bf16, a multiplication by a decay close to 1 would
        leave most numbers unchanged.

        Shapes: -> `[rows, chunk]` fp32.
        """
        return torch.zeros(self.rows, self.chunk, dtype=torch.float32, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` in the local shape of each parameter. Not for a layout with tiles, which
        has no such views.

        Shapes: `[rows, chunk]` -> one local shape per parameter.
        """
        assert not self.tiled, (
            "tiles have no view in the shape of their parameter: call `parts` and `write` instead"
        )
        line = flat.view(-1)
        return [line[start:stop].view(slot.shape) for slot, start, stop in self._spans]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Read-only values of each parameter in its local shape: views of `flat`, or copies for
        parameters in tiles.

        Shapes: `[rows, chunk]` -> one local shape per parameter.
        """
        if not self.tiled:
            return self.views(flat)
        found = self._row_views(flat)
        for number, slot in enumerate(self.slots):
            if slot.tiles:
                found[number] = slot.tiles.join(found[number]).reshape(slot.shape)
        return found

    def scatter(self, parts: Iterable[Tensor], targets: Sequence[Tensor]) -> None:
        """Writes `parts`, which are consecutive rows of a flat, into the tensors `targets` of the
        parameters.

        Shapes: parts `[n, chunk]` each; targets contiguous, one local shape per parameter.
        """
        at = 0
        begin = 0  # index of the first parameter that is not yet written completely
        for part in parts:
            line = part.reshape(-1)
            end = at + part.numel()
            pairs = []
            for number in range(begin, len(targets)):
                begin = number
                slot, start, stop = self._spans[number]
                if at <= start and stop <= end:
                    pairs.append((targets[number], line[start - at : stop - at].view(slot.shape)))
                elif at < stop:
                    low = max(at, start)
                    high = min(end, stop)
                    target = targets[number].view(-1)
                    pairs.append((target[low - start : high - start], line[low - at : high - at]))
                if stop >= end:
                    break
            copy([target for target, _ in pairs], [source for _, source in pairs])
            at = end
            del part, line, pairs  # frees this part before the next part is computed

    def write(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Writes `tensors` into `flat`. Coordinates of absent tensors and the padding do not
        change.

        Shapes: one local shape per parameter -> `[rows, chunk]`.
        """
        if not self.tiled:
            copy(self.views(flat), tensors)
            return
        sources = []
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if slot.tiles and tensor is not None:
                tensor = slot.tiles.cut(tensor)
            sources.append(tensor)
        copy(self._row_views(flat), sources)

    def fill(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Writes `tensors` into `flat`, and zeros for absent tensors and the padding.

        Shapes: one local shape per parameter -> `[rows, chunk]`.
        """
        if flat.numel() != self.numel or any(tensor is None for tensor in tensors):
            flat.zero_()
        if self.tiled:
            self.write(flat, tensors)
        else:
            copy(self.views(flat), tensors)

    def padding(self, device: torch.device) -> Tensor:
        """The positions of the padding in the flattened matrix.

        Shapes: -> `[padded]` int64.
        """
        found = [torch.empty(0, dtype=torch.int64, device=device)]
        for slot, start, stop in self._spans:
            if slot.tiles:
                inside = slot.tiles.cut(torch.ones(slot.shape, dtype=torch.bool, device="cpu"))
                outside = inside.view(-1).logical_not().nonzero().view(-1)
                found.append(outside.to(device) + start)
            else:
                end = start + slot.rows * self.chunk
                found.append(torch.arange(stop, end, dtype=torch.int64, device=device))
        return torch.cat(found)

    def row_numbers(self, parameters: Iterable[int]) -> Tensor:
        """For each row, the index of the parameter to which this row belongs, or -1 if `parameters`
        does not contain this index.

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
        """For each slot: the positions in the flattened matrix at which its coordinates begin and
        end.
        """
        found = []
        for slot in self.slots:
            start = slot.row * self.chunk
            found.append((slot, start, start + slot.numel))
        return found

    def _row_views(self, flat: Tensor) -> list[Tensor]:
        """One view per slot. For a parameter in tiles, the view contains the rows of its slot. For
        any other parameter, the view contains the coordinates, in the parameter's shape.
        """
        line = flat.view(-1)
        found = []
        for slot, start, stop in self._spans:
            if slot.tiles:
                found.append(flat[slot.row : slot.row + slot.rows])
            else:
                found.append(line[start:stop].view(slot.shape))
        return found


def _unit_of(name: str, unit: FragmentUnit) -> str:
    """The name of the unit (parameter or block) that contains the parameter `name`.

    >>> _unit_of("model.layers.3.mlp.up.weight", "block"), _unit_of("model.norm.weight", "block")
    ('model.layers.3', 'model.norm.weight')
    """
    if unit == "block" and (block := re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)):
        return block[0]
    return name


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copies each source that is present and not empty into its target, converting the dtype.

    Shapes: each source as its target.
    """
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s is not None and s.numel()]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
