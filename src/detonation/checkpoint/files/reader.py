"""Saved: a checkpoint that was found whole, and the parts of its tensors on request."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.checkpoint.files.manifest import Manifest, Untrustworthy, file_name
from detonation.checkpoint.files.shard_file import DTYPES
from detonation.checkpoint.save.snapshot import Box, box_from

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_REST: dict[str, type] = {"boxes": dict, "wrapped": list, "on_host": list, "values": dict, "groups": list}


class Saved:
    """The files of one checkpoint, opened when they are first asked for. Their checksums have been compared before."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files: dict[tuple[int, int], File] = {}

    def file(self, replica: int, shard: int) -> "File":
        if (replica, shard) not in self._files:
            self._files[replica, shard] = File(self.path / file_name(replica, shard))
        return self._files[replica, shard]

    def shards(self, replica: int) -> list["File"]:
        return [self.file(replica, shard) for shard in range(self.manifest.shards)]

    def part(self, replica: int, key: str, box: Box) -> Tensor:
        """The part `box` of the tensor `key` of one replica, put together from its shards."""
        return assembled([file.piece(key) for file in self.shards(replica) if key in file.boxes], box, key)


@dataclass(frozen=True)
class Piece:
    """What one shard has of a tensor; `read` reads a part of it."""

    box: Box
    dtype: torch.dtype
    read: Callable[[tuple[slice, ...]], Tensor]


class File:
    """What one rank saved. Raises `Untrustworthy` where it is no such file."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened: Any = safe_open
            self._file: Any = opened(path, framework="pt", device="cpu")
            self.keys = list(self._file.keys())
            rest = json.loads((self._file.metadata() or {}).get("json", ""))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise Untrustworthy(f"{path.name} is no file of a checkpoint ({str(error)[:80]})") from error
        if not isinstance(rest, dict) or any(type(rest.get(key)) is not kind for key, kind in _REST.items()):
            raise Untrustworthy(f"{path.name} needs {', '.join(_REST)} beside its tensors")
        self.boxes = {key: box_from(value) for key, value in rest["boxes"].items()}
        self.wrapped, self.on_host = set(map(str, rest["wrapped"])), set(map(str, rest["on_host"]))
        self.values: dict[str, Any] = rest["values"]
        self.groups: list[Any] = rest["groups"]
        self._path = path

    def tensor(self, key: str) -> Tensor:
        """The tensor `key`, as it was saved."""
        if key not in self.keys:
            raise ValueError(f"{self._path} has no {key}: it was written by another model, optimizer or scheme")
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def piece(self, key: str) -> Piece:
        """What this rank had of the tensor `key`."""
        box = self.boxes[key]
        if not box.shape or key not in self.keys:
            scalar = self.tensor(key)
            return Piece(box, scalar.dtype, scalar.__getitem__)
        sliced = self._file.get_slice(key)
        if tuple(sliced.get_shape()) != box.shape:
            raise Untrustworthy(f"{key} in {self._path.name} does not have the shape of its box")
        return Piece(box, _DTYPES[sliced.get_dtype()], sliced.__getitem__)


def assembled(pieces: Sequence[Piece], box: Box, key: str) -> Tensor:
    """The part `box` of a tensor, of `pieces` that may overlap. Raises `ValueError` where they leave a gap."""
    if not pieces:
        raise ValueError(f"{key} is not in the checkpoint: it was written by another model, optimizer or scheme")
    whole = torch.empty(box.shape, dtype=pieces[0].dtype)
    missing = torch.ones(box.shape, dtype=torch.bool)
    for piece in pieces:
        if piece.box.whole != box.whole:
            raise ValueError(f"{key} was saved with shape {piece.box.whole}, is {box.whole} here: another model")
        part = piece.box.overlap(box)
        if part is not None:
            whole[box.within(part)] = piece.read(piece.box.within(part))
            missing[box.within(part)] = False
    if missing.any():
        raise ValueError(f"the shards in the checkpoint do not make all of {key}")
    return whole
