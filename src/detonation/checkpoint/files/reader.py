"""Readers of a checkpoint and of its shard files. They can read any part (box) of a tensor."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.extra_values import decoded_value
from detonation.checkpoint.files.manifest import Manifest, file_name
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, TensorFile
from detonation.core.flat.tensors import Piece, bare_name


@dataclass(frozen=True)
class Box:
    """A part of a tensor: it has the shape `shape`, and begins at `offset` in the whole tensor of
    shape `whole`."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Box":
        """The local part of `tensor`. For a plain tensor this is the whole tensor."""
        shape = tuple(tensor.shape)
        start = (0,) * tensor.ndim
        if isinstance(tensor, Piece):
            return cls(tuple(tensor.whole.shape), (tensor.offset, *start[1:]), shape)
        if not isinstance(tensor, DTensor):
            return cls(shape, start, shape)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return cls(shape, tuple(chunk.offsets), tuple(tensor.to_local().shape))

    @classmethod
    def of_shard(cls, tensor: Tensor, shard: int, shards: int) -> "Box":
        """The part of `tensor` that rank `shard` holds, if FSDP2 splits the first dimension of the
        tensor over `shards` ranks.
        """
        first, *rest = tensor.shape
        each = -(-first // shards)
        size = max(0, min(each, first - shard * each))
        return cls(tuple(tensor.shape), (min(first, shard * each), *[0] * len(rest)), (size, *rest))

    @classmethod
    def from_json(cls, value: Any) -> "Box":
        """The part that a shard file describes as [whole, offset, shape].

        Raises `CorruptCheckpoint` for any other value.
        """
        if (
            isinstance(value, list)
            and len(value) == 3
            and all(isinstance(part, list) for part in value)
        ):
            whole, offset, shape = value
            numbers = [*whole, *offset, *shape]
            if len(whole) == len(offset) == len(shape) and all(
                type(n) is int and n >= 0 for n in numbers
            ):
                return cls(tuple(whole), tuple(offset), tuple(shape))
        raise CorruptCheckpoint(
            f"a box is {str(value)[:60]!r}, must be three lists of equal length"
        )

    def overlap(self, other: "Box") -> tuple[slice, ...] | None:
        """The overlap of this box and `other`, in coordinates of the whole tensor; None if there is
        no overlap."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [min(a, b) for a, b in zip(self._ends, other._ends, strict=True)]
        if all(a < b for a, b in zip(starts, ends, strict=True)):
            return tuple(map(slice, starts, ends))
        return None

    @property
    def _ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offset, self.shape, strict=True)]

    def within(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Converts `part` from coordinates of the whole tensor to coordinates of this box."""
        return tuple(slice(s.start - o, s.stop - o) for s, o in zip(part, self.offset, strict=True))


MOVED = "moved."
"""Prefix of the keys under which a shard file stores how far each tensor moved in training."""
_REST: dict[str, type] = {
    "boxes": dict,
    "wrapped": list,
    "on_host": list,
    "values": dict,
    "groups": list,
}


class CheckpointReader:
    """The files of one checkpoint, each opened at its first use.

    The caller must have verified the checksums of the files.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._files: dict[tuple[int, int], ShardReader] = {}

    def file(self, replica: int, shard: int) -> "ShardReader":
        if (replica, shard) not in self._files:
            self._files[replica, shard] = ShardReader(self.path / file_name(replica, shard))
        return self._files[replica, shard]

    def shards(self, replica: int) -> list["ShardReader"]:
        return [self.file(replica, shard) for shard in range(self.manifest.shards)]

    def part(self, replica: int, key: str, box: Box) -> Tensor:
        """The part `box` of the tensor `key` of one replica, assembled from the replica's
        shards."""
        return assemble(
            [file.piece(key) for file in self.shards(replica) if key in file.boxes], box, key
        )


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one shard has. read: returns a slice of this part."""

    box: Box
    dtype: torch.dtype
    read: Callable[[tuple[slice, ...]], Tensor]


class ShardReader:
    """Reads the file of one shard. Raises `CorruptCheckpoint` if `path` is not a shard file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = TensorFile(path)
            # earlier versions of this library wrote names of wrappers into keys: remove the names
            self._saved_as = {bare_name(key): key for key in self._file.entries}
            self.keys = sorted(self._saved_as)
            rest = json.loads(bare_name(self._file.metadata.get("json", "")))
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(
                f"{path.name} is no file of a checkpoint ({str(error)[:80]})"
            ) from error
        if not isinstance(rest, dict) or any(
            type(rest.get(key)) is not kind for key, kind in _REST.items()
        ):
            raise CorruptCheckpoint(f"{path.name} needs {', '.join(_REST)} besides its tensors")
        self.boxes = {key: Box.from_json(value) for key, value in rest["boxes"].items()}
        self.wrapped = set(map(str, rest["wrapped"]))
        self.on_host = set(map(str, rest["on_host"]))
        self._path = path
        self.values: dict[str, Any] = {
            key: self._decoded(value) for key, value in rest["values"].items()
        }
        self.groups: list[Any] = [self._decoded(group) for group in rest["groups"]]

    def _decoded(self, value: Any) -> Any:
        try:
            return decoded_value(value)
        except (CorruptCheckpoint, RecursionError) as error:
            raise CorruptCheckpoint(
                f"{self._path.name} has a value that cannot be read ({str(error)[:80]})"
            ) from error

    def __contains__(self, key: str) -> bool:
        return key in self._saved_as

    @property
    def moved(self) -> dict[str, float]:
        """The distance that each tensor moved in training (`Closeness.movements`), if the replicas
        were equal only up to rounding. Empty if the replicas were bitwise equal."""
        moved = {}
        for key, value in self.values.items():
            if key.startswith(MOVED):
                moved[key.removeprefix(MOVED)] = value
                if not isinstance(value, float) or not 0 <= value < math.inf:
                    raise CorruptCheckpoint(
                        f"{self._path.name} says that {key} moved by {str(value)[:30]}: this is no"
                        " distance"
                    )
        return moved

    def tensor(self, key: str) -> Tensor:
        """Reads the tensor `key`. Raises `ValueError` if the file does not have it."""
        self._require(key)
        return self._file.read(self._saved_as[key])

    def saved_as(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the tensor `key`. Raises `ValueError` if the file does not have it."""
        self._require(key)
        entry = self._file.entries[self._saved_as[key]]
        return entry.dtype, entry.shape

    def _require(self, key: str) -> None:
        if key not in self:
            raise ValueError(
                f"{self._path} has no {key}: it was written by another model, optimizer or scheme"
            )

    def piece(self, key: str) -> TensorPart:
        """This shard's part of the tensor `key`, which must be sharded."""
        box = self.boxes[key]
        if not box.shape or key not in self:
            scalar = self.tensor(key)
            return TensorPart(box, scalar.dtype, scalar.__getitem__)
        name = self._saved_as[key]
        entry = self._file.entries[name]
        if entry.shape != box.shape:
            raise CorruptCheckpoint(
                f"{key} in {self._path.name} does not have the shape of its box"
            )
        return TensorPart(
            box, entry.dtype, lambda part: self._file.read(name, part[0])[:, *part[1:]]
        )


class ReplicaFiles:
    """All keys, boxes (parts of whole tensors) and plain values in the files of several replicas.

    A file may lack the optimizer state of a parameter, if the parameter never had a gradient on
    the file's replica.
    """

    def __init__(self, files: Sequence[ShardReader]) -> None:
        self.keys = sorted({key for file in files for key in file.keys})
        self.boxes: dict[str, Box] = {}
        self.values: dict[str, Any] = {}
        for file in reversed(files):
            self.boxes |= file.boxes
            self.values |= file.values
        self.wrapped = {key for file in files for key in file.wrapped}
        self.on_host = {key for file in files for key in file.on_host}


def assemble(pieces: Sequence[TensorPart], box: Box, key: str) -> Tensor:
    """Assembles the part `box` of the tensor `key` from `pieces`, which may overlap.

    Raises `ValueError` if the pieces leave a gap, or were saved with another shape.
    """
    if not pieces:
        raise ValueError(
            f"{key} is not in the checkpoint: it was written by another model, optimizer or scheme"
        )
    whole = torch.empty(box.shape, dtype=pieces[0].dtype)
    missing = torch.ones(box.shape, dtype=torch.bool)
    for piece in pieces:
        if piece.box.whole != box.whole:
            raise ValueError(
                f"{key} was saved with shape {piece.box.whole}, but has {box.whole} here: load into"
                " the saved model"
            )
        part = piece.box.overlap(box)
        if part is not None:
            whole[box.within(part)] = piece.read(piece.box.within(part))
            missing[box.within(part)] = False
    if missing.any():
        raise ValueError(
            f"the shards in the checkpoint do not cover all of {key}: load another checkpoint"
        )
    return whole
