"""Manifest: the file that describes a checkpoint. It is written last, and a reader checks every
byte of it."""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from detonation.checkpoint.files.extra_values import decoded_extra
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, ShardSummary
from detonation.version import __version__
from detonation.whole_files import reading

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 2
MOST_BYTES = 1 << 26
"""Largest size of a manifest, for writing and reading."""


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint after `step` steps of a run with `replicas` replicas of `shards`
    shards each.

    levels: the chained schemes, innermost first, as `{"scheme": name, ...arguments}`. optimizer:
    the class of the base optimizer. alike: True if all replicas held the same weights. files: size
    and checksum of each file, by name. versions: versions of python, torch and detonation. extra:
    the caller's values, as `encoded_extra` writes them; `given` decodes them. volumes: for each
    file, in the order of `files`, the number of the directory to which it was written; empty if all
    files share one directory.
    """

    step: int
    replicas: int
    shards: int
    seed: int
    optimizer: str
    alike: bool
    levels: list[dict[str, Any]]
    files: dict[str, ShardSummary]
    versions: dict[str, str]
    extra: dict[str, Any]
    volumes: list[int] = field(default_factory=list)

    def dumps(self) -> str:
        """The manifest as JSON. The last entry is the checksum of all other entries.

        Raises `ValueError` if the text is larger than a reader accepts.
        """
        files = {
            name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()
        }
        table = {"format": MANIFEST_FORMAT, **vars(self), "files": files}
        if not self.volumes:
            del table["volumes"]
        text = _signed(table)
        if len(text) > MOST_BYTES:  # `json` escapes to ASCII, so each character is one byte
            raise ValueError(
                f"{MANIFEST_NAME} would have {len(text):,} bytes, must have at most {MOST_BYTES:,}"
            )
        return text

    @property
    def given(self) -> dict[str, Any]:
        """The values that the caller saved in the checkpoint, decoded. Raises `ValueError` if they
        are damaged."""
        return decoded_extra(self.extra)

    def elsewhere(self, present: Callable[[str], bool]) -> list[str]:
        """Names of the files that other nodes hold. Nodes without a shared file system save to
        several directories. If no file of a directory is `present` on this node, another node holds
        this directory.

        Returns an empty list if this node has no file of the checkpoint at all: then all files
        count as missing.
        """
        by_volume = dict(zip(self.files, self.volumes or [0] * len(self.files), strict=True))
        here = {volume for name, volume in by_volume.items() if present(name)}
        return [name for name, volume in by_volume.items() if here and volume not in here]


def versions() -> dict[str, str]:
    """Versions of python, torch and detonation. Other versions can change last bits."""
    return {
        "detonation": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def file_name(replica: int, shard: int) -> str:
    return f"replica{replica}-shard{shard}.safetensors"


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads the manifest of the directory `checkpoint`.

    Raises `CorruptCheckpoint` if it is missing or not valid.
    """
    return parse_manifest(manifest_bytes(checkpoint))


def manifest_bytes(checkpoint: Path) -> bytes:
    """Content of the manifest of the directory `checkpoint`.

    Raises `CorruptCheckpoint` if it cannot be read.
    """
    try:
        with reading(checkpoint / MANIFEST_NAME) as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from error


def parse_manifest(content: bytes) -> Manifest:
    """Reads the manifest that `dumps` wrote. Raises `CorruptCheckpoint` if `content` differs in any
    byte from what `dumps` writes."""
    if len(content) > MOST_BYTES:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is larger than {MOST_BYTES:,} bytes")
    try:
        text = content.decode()
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is not JSON ({str(error)[:60]})") from error
    if not isinstance(table, dict):
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is no table")
    if table.get("format") != MANIFEST_FORMAT:
        raise CorruptCheckpoint(
            f"its format is {str(table.get('format'))[:20]}, this version reads {MANIFEST_FORMAT}"
        )
    table.pop("sha256", None)
    try:
        intact = _signed(table) == text
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is damaged: its checksum differs")
    return _checked(table)


def _signed(table: Mapping[str, Any]) -> str:
    """Returns `table` as JSON text that ends with the checksum of `table`.

    A reader compares this text with the file, and refuses any difference, even in spaces.
    """
    checksum = hashlib.sha256(json.dumps(table, allow_nan=False).encode()).hexdigest()
    return json.dumps({**table, "sha256": checksum}, indent=1, allow_nan=False) + "\n"


_TYPES: dict[str, type] = {
    "format": int, "step": int, "replicas": int, "shards": int, "seed": int, "optimizer": str,
    "alike": bool, "levels": list, "files": dict, "versions": dict, "extra": dict,
}  # fmt: skip


def _checked(table: dict[str, Any]) -> Manifest:
    """Checks types, ranges and names one by one, because anyone can write arbitrary JSON with a
    correct checksum.
    """
    volumes = table.pop("volumes", [])
    _check_types(table)
    _check_ranges(table)
    files = table["files"]
    _check_file_names(files, table["replicas"], table["shards"])
    _check_levels(table["levels"])
    _check_volumes(volumes, len(files))
    del table["format"]
    summaries = {name: _summary(name, file) for name, file in files.items()}
    return Manifest(**{**table, "files": summaries, "volumes": volumes})


def _check_types(table: dict[str, Any]) -> None:
    if table.keys() != _TYPES.keys():
        raise CorruptCheckpoint(f"{MANIFEST_NAME} has other keys than {', '.join(_TYPES)}")
    for key, kind in _TYPES.items():
        if type(table[key]) is not kind:
            raise CorruptCheckpoint(
                f"{key} in {MANIFEST_NAME} is {str(table[key])[:40]!r}, must be of type"
                f" {kind.__name__}"
            )


def _check_ranges(table: dict[str, Any]) -> None:
    for key, least in (("step", 0), ("replicas", 1), ("shards", 1)):
        if not least <= table[key] < 2**53:
            raise CorruptCheckpoint(
                f"{key} in {MANIFEST_NAME} is {table[key]}, must be from {least} to below 2**53"
            )


def _check_file_names(files: dict[str, Any], replicas: int, shards: int) -> None:
    """Raises `CorruptCheckpoint` unless `files` names the file of each shard, in order."""
    if len(files) != replicas * shards:
        raise CorruptCheckpoint(
            f"{MANIFEST_NAME} lists {len(files)} files for {replicas} replicas x {shards} shards"
        )
    names = [file_name(replica, shard) for replica in range(replicas) for shard in range(shards)]
    if list(files) != names:
        wrong = next(name for name, right in zip(files, names, strict=True) if name != right)
        raise CorruptCheckpoint(
            f"{MANIFEST_NAME} lists the file {wrong[:60]!r}, which no checkpoint has"
        )


def _check_levels(levels: list[Any]) -> None:
    if not all(
        isinstance(level, dict) and isinstance(level.get("scheme"), str) for level in levels
    ):
        raise CorruptCheckpoint(f"levels in {MANIFEST_NAME} are not schemes")


def _check_volumes(volumes: Any, files: int) -> None:
    """Raises `CorruptCheckpoint` unless `volumes` is empty or has a number for each file."""
    numbers = isinstance(volumes, list) and all(type(v) is int and 0 <= v < files for v in volumes)
    if not numbers or len(volumes) not in (0, files):
        raise CorruptCheckpoint(
            f"volumes in {MANIFEST_NAME} are {str(volumes)[:40]}, must be a number for each file"
        )


def _summary(name: str, value: Any) -> ShardSummary:
    """Reads the size and the checksum of one file from the manifest. Raises `CorruptCheckpoint` for
    any other value."""
    if not (isinstance(value, dict) and value.keys() == {"bytes", "sha256"}):
        raise CorruptCheckpoint(
            f"{name} in {MANIFEST_NAME} needs bytes and sha256, and nothing else"
        )
    count = value["bytes"]
    checksum = value["sha256"]
    if type(count) is not int or not 0 <= count < 2**53:
        raise CorruptCheckpoint(f"{name} in {MANIFEST_NAME} has {str(count)[:40]!r} bytes")
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise CorruptCheckpoint(f"{name} in {MANIFEST_NAME} has no sha256")
    return ShardSummary(count, checksum)
