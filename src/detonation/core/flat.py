"""Flat: the local shards of many parameters seen as one `[rows, chunk]` matrix."""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
    """Where one parameter's local shard lies: `rows` rows from row `row` on, the last one zero-padded."""

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """Which rows of the flat matrix belong to which parameter.

    A chunk never spans two parameters; the last chunk of a parameter is zero-padded, never shrunk to a divisor. An
    empty local shard has no rows, a scalar has one.
    """

    chunk: int
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], chunk: int) -> "Layout":
        """The layout of local shards with these `shapes`, by parameter name, in the order given.

        >>> Layout.of({"weight": (3, 30), "bias": (3,)}, chunk=64).rows
        3
        """
        slots, row = [], 0
        for name, shape in shapes.items():
            rows = -(-torch.Size(shape).numel() // chunk)
            slots.append(Slot(name, tuple(shape), row, rows))
            row += rows
        return cls(chunk, tuple(slots))

    def fragment(self, index: int, count: int) -> "Layout":
        """The layout of every `count`-th parameter, from number `index` on."""
        return Layout.of({slot.name: slot.shape for slot in self.slots[index::count]}, self.chunk)

    @property
    def rows(self) -> int:
        return self.slots[-1].row + self.slots[-1].rows if self.slots else 0

    @cached_property
    def numel(self) -> int:
        """Coordinates without the padding."""
        return sum(slot.numel for slot in self.slots)

    def zeros(self, device: torch.device) -> Tensor:
        """A flat matrix of zeros: fp32, because decay * bf16 changes nothing when decay is close to 1."""
        return torch.zeros(self.rows, self.chunk, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, one a parameter and in its local shape, sharing memory."""
        line = flat.view(-1)
        start = [slot.row * self.chunk for slot in self.slots]
        return [line[s : s + slot.numel].view(slot.shape) for s, slot in zip(start, self.slots, strict=True)]

    def padding(self, device: torch.device) -> Tensor:
        """Positions in the flattened matrix that belong to no parameter."""  # [padded] int64
        ends = [(slot.row * self.chunk + slot.numel, (slot.row + slot.rows) * self.chunk) for slot in self.slots]
        return torch.cat([torch.arange(a, b, device=device) for a, b in ends] or [torch.empty(0, dtype=torch.long)])

    def flatten(self, tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A new flat matrix that holds `tensors`; an absent one is zero."""
        flat = self.zeros(device)
        copy(self.views(flat), tensors)
        return flat


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copies each source that is there and not empty into its target, converting the dtype."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s is not None and s.numel()]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
