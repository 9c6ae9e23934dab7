"""Manifest: what a checkpoint says of itself, written last and believed only where every byte of it makes sense."""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from detonation.checkpoint.files.shard_file import File

NAME = "manifest.json"
FORMAT = 2
_MOST_BYTES = 1 << 26


class Untrustworthy(ValueError):
    """A checkpoint is not what was written, or was never a checkpoint; the text says why, without its path."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint after `step` steps of a world of `replicas` x `shards`.

    levels: the schemes, innermost first, as `{"scheme": name, ...arguments}`. alike: whether all replicas held the same
    weights. optimizer: the class whose step applies updates. files: by name. versions: of python, torch and
    detonation. extra: the caller's own.
    """

    step: int
    replicas: int
    shards: int
    seed: int
    optimizer: str
    alike: bool
    levels: list[dict[str, Any]]
    files: dict[str, File]
    versions: dict[str, str]
    extra: dict[str, Any]

    def dumps(self) -> str:
        """The manifest as JSON, its own checksum last."""
        files = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()}
        return _signed({"format": FORMAT, **vars(self), "files": files})


def versions() -> dict[str, str]:
    """What arithmetic depends on, down to the last bit."""
    from detonation import __version__

    return {"detonation": __version__, "torch": torch.__version__, "python": platform.python_version()}


def file_name(replica: int, shard: int) -> str:
    return f"replica{replica}-shard{shard}.safetensors"


def read(checkpoint: Path) -> Manifest:
    """The manifest in `checkpoint`. Raises `Untrustworthy`."""
    try:
        with (checkpoint / NAME).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Untrustworthy(f"{NAME} cannot be read ({error.strerror})") from error
    return loads(content)


def loads(content: bytes) -> Manifest:
    """What `dumps` wrote, byte for byte. Raises `Untrustworthy` for anything else."""
    if len(content) > _MOST_BYTES:
        raise Untrustworthy(f"{NAME} is larger than {_MOST_BYTES:,} bytes")
    try:
        text = content.decode()
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Untrustworthy(f"{NAME} is not JSON ({str(error)[:60]})") from error
    if not isinstance(table, dict):
        raise Untrustworthy(f"{NAME} is no table")
    if table.get("format") != FORMAT:
        raise Untrustworthy(f"its format is {str(table.get('format'))[:20]}, this version reads {FORMAT}")
    table.pop("sha256", None)
    try:
        intact = _signed(table) == text
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise Untrustworthy(f"{NAME} is damaged: its checksum differs")
    return _checked(table)


def _signed(table: Mapping[str, Any]) -> str:
    """`table` as JSON with the checksum of all else added. Any other spelling of the same is another text."""
    checksum = hashlib.sha256(json.dumps(table, allow_nan=False).encode()).hexdigest()
    return json.dumps({**table, "sha256": checksum}, indent=1, allow_nan=False) + "\n"


_TYPES: dict[str, type] = {
    "format": int, "step": int, "replicas": int, "shards": int, "seed": int, "optimizer": str, "alike": bool,
    "levels": list, "files": dict, "versions": dict, "extra": dict,
}  # fmt: skip


def _checked(table: dict[str, Any]) -> Manifest:
    """A stranger may write any JSON under a right checksum, so types, ranges and names are checked one by one."""
    if table.keys() != _TYPES.keys():
        raise Untrustworthy(f"{NAME} has other keys than {', '.join(_TYPES)}")
    for key, kind in _TYPES.items():
        if type(table[key]) is not kind:
            raise Untrustworthy(f"{key} in {NAME} is {str(table[key])[:40]!r}, must be of type {kind.__name__}")
    for key, least in (("step", 0), ("replicas", 1), ("shards", 1)):
        if not least <= table[key] < 2**53:
            raise Untrustworthy(f"{key} in {NAME} is {table[key]}, must be from {least} to below 2**53")
    replicas, shards, files = table["replicas"], table["shards"], table["files"]
    if len(files) != replicas * shards:
        raise Untrustworthy(f"{NAME} lists {len(files)} files for {replicas} replicas x {shards} shards")
    names = [file_name(replica, shard) for replica in range(replicas) for shard in range(shards)]
    if list(files) != names:
        odd = next(name for name, right in zip(files, names, strict=True) if name != right)
        raise Untrustworthy(f"{NAME} lists the file {odd[:60]!r}, which no checkpoint has")
    if not all(isinstance(level, dict) and isinstance(level.get("scheme"), str) for level in table["levels"]):
        raise Untrustworthy(f"levels in {NAME} are not schemes")
    del table["format"]
    return Manifest(**{**table, "files": {name: _file(name, file) for name, file in files.items()}})


def _file(name: str, value: Any) -> File:
    if not (isinstance(value, dict) and value.keys() == {"bytes", "sha256"}):
        raise Untrustworthy(f"{name} in {NAME} needs bytes and sha256, and nothing else")
    count, checksum = value["bytes"], value["sha256"]
    if type(count) is not int or not 0 <= count < 2**53:
        raise Untrustworthy(f"{name} in {NAME} has {str(count)[:40]!r} bytes")
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise Untrustworthy(f"{name} in {NAME} has no sha256")
    return File(count, checksum)
