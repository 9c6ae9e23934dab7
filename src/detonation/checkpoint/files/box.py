"""Boxes: which part of a whole tensor a shard holds."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.manifest import CorruptCheckpoint


@dataclass(frozen=True)
class Box:
    """The part of a tensor of shape `whole` that begins at `offset` and has the shape `shape`."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Box":
        """The box of the local part of `tensor`; a plain tensor is whole."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return cls(tuple(tensor.shape), tuple(chunk.offsets), tuple(tensor.to_local().shape))

    @classmethod
    def of_shard(cls, tensor: Tensor, shard: int, shards: int) -> "Box":
        """The box of another rank's part of a parameter that FSDP2 deals out in equal runs of first indices."""
        first, *rest = tensor.shape
        each = -(-first // shards)
        size = max(0, min(each, first - shard * each))
        return cls(tuple(tensor.shape), (min(first, shard * each), *[0] * len(rest)), (size, *rest))

    @classmethod
    def from_json(cls, value: Any) -> "Box":
        """The box that a shard file spells as [whole, offset, shape]. Raises `CorruptCheckpoint`."""
        if isinstance(value, list) and len(value) == 3 and all(isinstance(part, list) for part in value):
            whole, offset, shape = value
            numbers = [*whole, *offset, *shape]
            if len(whole) == len(offset) == len(shape) and all(type(n) is int and n >= 0 for n in numbers):
                return cls(tuple(whole), tuple(offset), tuple(shape))
        raise CorruptCheckpoint(f"a box is {str(value)[:60]!r}, must be three lists of as many sizes")

    def overlap(self, other: "Box") -> tuple[slice, ...] | None:
        """The part that both boxes share, in the coordinates of the whole; None where they share nothing."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [min(a, b) for a, b in zip(self._ends, other._ends, strict=True)]
        return tuple(map(slice, starts, ends)) if all(a < b for a, b in zip(starts, ends, strict=True)) else None

    @property
    def _ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offset, self.shape, strict=True)]

    def within(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """`part` of the whole in the coordinates of this box."""
        return tuple(slice(s.start - o, s.stop - o) for s, o in zip(part, self.offset, strict=True))
