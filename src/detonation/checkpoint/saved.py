"""Saved: a checkpoint that was found whole, and the parts of its tensors on request."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.checkpoint.manifest import Manifest, Untrustworthy, file_name
from detonation.checkpoint.snapshot import Box, box_from

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
        pieces = [(file.boxes[key], file.slicer(key)) for file in self.shards(replica) if key in file.boxes]
        return assembled(pieces, box, key)


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

    def slicer(self, key: str) -> Callable[[tuple[slice, ...]], Tensor]:
        """What reads a part of the tensor `key`."""
        if not self.boxes[key].shape or key not in self.keys:
            return lambda part: self.tensor(key)[part]
        sliced = self._file.get_slice(key)
        if tuple(sliced.get_shape()) != self.boxes[key].shape:
            raise Untrustworthy(f"{key} in {self._path.name} does not have the shape of its box")
        return lambda part: sliced[part]


def assembled(pieces: Iterable[tuple[Box, Callable[[tuple[slice, ...]], Tensor]]], box: Box, key: str) -> Tensor:
    """The part `box` of a tensor, of `pieces` that may overlap. Raises `ValueError` where they leave a gap."""
    whole: Tensor | None = None
    missing = torch.ones(box.shape, dtype=torch.bool)
    for there, read in pieces:
        if there.whole != box.whole:
            raise ValueError(f"{key} was saved with shape {there.whole}, is {box.whole} here: another model")
        part = there.overlap(box)
        if part is None:
            continue
        values = read(there.within(part))
        whole = torch.empty(box.shape, dtype=values.dtype) if whole is None else whole
        whole[box.within(part)] = values
        missing[box.within(part)] = False
    if missing.any():
        raise ValueError(f"{key} is not in the checkpoint, or not all of it: it was written by another model or scheme")
    return torch.empty(box.shape) if whole is None else whole
