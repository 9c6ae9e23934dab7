"""Flat: the local shards of many parameters seen as one `[rows, chunk]` matrix."""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.flat.tiles import Tiles

BLOCK = 330_000
"""Coordinates that plain torch works on at once on a CPU: few enough for its cache, enough to be worth an operation.

No power of two: lines that are one apart would fight for the same places in the cache.
"""


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that lives on this rank: the local shard of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(tensors: Iterable[Tensor]) -> str:
    """sha256 (hex) of the bytes of the local shards of `tensors`, in order. Waits for the device."""
    content = hashlib.sha256()
    for tensor in tensors:
        raw = local(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu()
        content.update((ctypes.c_char * raw.numel()).from_address(raw.data_ptr()) if raw.numel() else b"")
    return content.hexdigest()


@dataclass(frozen=True)
class Slot:
    """Where one parameter's local shard lies: `rows` rows from row `row` on, in chunks or in tiles."""

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int
    tiles: Tiles | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """Which rows of the flat matrix belong to which parameter.

    A row is `chunk` neighbouring coordinates of one parameter or, with `tile`, a square of tile x tile of them where
    the parameter is a matrix that fills one; `chunk` is then tile * tile. What is left over at the end of a parameter
    is zero-padded, never shrunk to a divisor. An empty local shard has no rows, a scalar has one.
    """

    chunk: int
    slots: tuple[Slot, ...]
    tile: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], chunk: int, tile: int = 0) -> "Layout":
        """The layout of local shards with these `shapes`, by parameter name, in the order given.

        >>> Layout.of({"weight": (3, 30), "bias": (3,)}, chunk=64).rows
        3
        """
        slots, row = [], 0
        for name, shape in shapes.items():
            tiles = Tiles.of(shape, tile)
            rows = tiles.rows if tiles else -(-torch.Size(shape).numel() // chunk)
            slots.append(Slot(name, tuple(shape), row, rows, tiles))
            row += rows
        return cls(chunk, tuple(slots), tile)

    def fragment(self, index: int, count: int) -> "Layout":
        """The layout of every `count`-th parameter, from number `index` on."""
        return Layout.of({slot.name: slot.shape for slot in self.slots[index::count]}, self.chunk, self.tile)

    @property
    def rows(self) -> int:
        return self.slots[-1].row + self.slots[-1].rows if self.slots else 0

    @cached_property
    def numel(self) -> int:
        """Coordinates without the padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def tiled(self) -> bool:
        """Whether some parameter lies in tiles."""
        return any(slot.tiles for slot in self.slots)

    def zeros(self, device: torch.device) -> Tensor:
        """A flat matrix of zeros: fp32, because decay * bf16 changes nothing when decay is close to 1."""
        return torch.zeros(self.rows, self.chunk, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, one a parameter and in its local shape, sharing memory; not where one is in tiles."""
        assert not self.tiled, "tiles have no view in the shape of their parameter: read `parts`, and `write` them"
        return [self._of(slot, flat) for slot in self.slots]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` to read, one a parameter and in its local shape: views, or copies of what is in tiles."""
        parts = [(slot, self._of(slot, flat)) for slot in self.slots]
        return [slot.tiles.join(part).view(slot.shape) if slot.tiles else part for slot, part in parts]

    def spread(self, parts: Iterable[Tensor], targets: Sequence[Tensor]) -> None:
        """Makes `targets`, contiguous and one a parameter, what `parts` of a flat say, from the first row on."""
        lines, at = [t.view(-1) for t in targets], 0
        starts = [slot.row * self.chunk for slot in self.slots]
        for part in parts:
            line, pairs, end = part.reshape(-1), [], at + part.numel()
            for slot, start, target in zip(self.slots, starts, lines, strict=True):
                low, high = max(at, start), min(end, start + slot.numel)
                if low < high:
                    pairs.append((target[low - start : high - start], line[low - at : high - at]))
            copy([target for target, _ in pairs], [source for _, source in pairs])
            at = end

    def write(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Makes `tensors` the parts of `flat`; what is absent and the padding stay as they are."""
        pairs = zip(self.slots, tensors, strict=True)
        sources = [slot.tiles.cut(t) if slot.tiles and t is not None else t for slot, t in pairs]
        copy([self._of(slot, flat) for slot in self.slots], sources)

    def padding(self, device: torch.device) -> Tensor:
        """Positions in the flattened matrix that belong to no parameter."""  # [padded] int64
        found = [_padding(slot, self.chunk, device) for slot in self.slots]
        return torch.cat(found or [torch.empty(0, dtype=torch.long, device=device)])

    def flatten(self, tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A new flat matrix that holds `tensors`; an absent one is zero."""
        flat = self.zeros(device)
        self.write(flat, tensors)
        return flat

    def _of(self, slot: Slot, flat: Tensor) -> Tensor:
        """The rows of `slot`, or its coordinates in the shape of the parameter where they lie one after the other."""
        if slot.tiles:
            return flat[slot.row : slot.row + slot.rows]
        start = slot.row * self.chunk
        return flat.view(-1)[start : start + slot.numel].view(slot.shape)


def _padding(slot: Slot, chunk: int, device: torch.device) -> Tensor:
    start = slot.row * chunk
    if slot.tiles:
        return slot.tiles.cut(torch.ones(slot.shape)).view(-1).eq(0).nonzero().view(-1).to(device) + start
    return torch.arange(start + slot.numel, start + slot.rows * chunk, device=device)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copies each source that is there and not empty into its target, converting the dtype."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s is not None and s.numel()]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
