"""Files of a weight feed, in a local directory or in a folder of any file system that fsspec
supports.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from detonation.checkpoint.files.shard_file import CorruptCheckpoint, header_length, tensors_in
from detonation.whole_files import reading, write_whole


class Folder(Protocol):
    """A folder whose files are found by name.

    Readers must see each file complete or not at all. All methods raise `OSError` on failure.
    `names` raises `FileNotFoundError` if a trainer must make the folder, but has not done so yet.
    """

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytearray: ...

    def write(self, name: str, content: Iterable[memoryview]) -> None: ...

    def remove(self, name: str) -> None: ...


class LocalFolder:
    """A local directory, which other machines may also mount."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return [path.name for path in self._path.iterdir()]

    def read(self, name: str) -> bytearray:
        with reading(self._path / name) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            del content[file.readinto(content) :]
        return content

    def write(self, name: str, content: Iterable[memoryview]) -> None:
        write_whole(self._path / name, content)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class RemoteFolder:
    """A folder that fsspec reaches, such as "s3://bucket/run" or "sftp://host/run".

    Args:
        url: Address of the folder. fsspec may need a package for its protocol.
        options: Options of the file system, such as credentials.

    Raises:
        ImportError: fsspec or the package for the protocol is missing.

    Example:
        >>> folder = RemoteFolder("memory://an/example")
        >>> folder.write("a", [memoryview(b"1"), memoryview(b"2")])
        >>> folder.names(), folder.read("a")
        (['a'], bytearray(b'12'))
        >>> folder.remove("a")
    """

    def __init__(self, url: str, **options: Any) -> None:
        import fsspec

        self._system, self._path = fsspec.url_to_fs(url, use_listings_cache=False, **options)

    def names(self) -> list[str]:
        # a folder of an object store does not exist before its first file is written
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            return [
                str(path).rpartition("/")[2]
                for path in self._system.ls(self._path, detail=False, refresh=True)
            ]
        return []

    def read(self, name: str) -> bytearray:
        with _os_errors():
            return bytearray(self._system.cat_file(f"{self._path}/{name}"))

    def write(self, name: str, content: Iterable[memoryview]) -> None:
        with _os_errors():
            self._system.makedirs(self._path, exist_ok=True)
            with self._system.transaction, self._system.open(f"{self._path}/{name}", "wb") as file:
                file.writelines(content)

    def remove(self, name: str) -> None:
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turns every error of a protocol's library into an `OSError`, because training continues after
    an `OSError`.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def folder_at(target: "Path | str | Folder") -> Folder:
    """Returns the folder at a path, or at a URL with "://". A `Folder` is returned unchanged."""
    if isinstance(target, str) and "://" in target:
        return RemoteFolder(target)
    if isinstance(target, str | Path):
        return LocalFolder(Path(target))
    return target


BASE = "base"
DIFFERENCE = "difference"
END = "end"
"""Kinds of files: a base (all weights at a step), a difference (the change since the previous
published step), and the end of training.
"""
_NAME = re.compile(r"(\d{6})-(\d{12})-([0-9a-f]{16})\.(base|difference|end)\.safetensors")


@dataclass(frozen=True, order=True)
class WeightFile:
    """Name of a file of a weight feed. Files sort by run and step."""

    run: int
    step: int
    kind: str
    checksum: str

    @property
    def name(self) -> str:
        return f"{self.run:06d}-{self.step:012d}-{self.checksum}.{self.kind}.safetensors"

    @classmethod
    def of(cls, run: int, step: int, kind: str, content: Iterable[memoryview]) -> Self:
        return cls(run, step, kind, _checksum(content))

    @classmethod
    def known(cls, names: Iterable[str]) -> list[Self]:
        """Returns the weight files among `names`, sorted. Ignores names of other files."""
        found = filter(None, map(_NAME.fullmatch, names))
        return sorted(cls(int(m[1]), int(m[2]), m[4], m[3]) for m in found)


def read_content(file: WeightFile, content: bytearray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the `content` of a file that `shard_content` made: returns the file's description, and
    its tensors as views of `content`.

    Raises `CorruptCheckpoint` if the content does not match the checksum in the file's name, or if
    it is no file of a weight feed.
    """
    if _checksum([memoryview(content)]) != file.checksum:
        raise CorruptCheckpoint(f"{file.name} is damaged: its checksum differs")
    try:
        length = header_length(bytes(content[:8]), len(content))
        metadata, entries = tensors_in(bytes(content[8 : 8 + length]), len(content))
        about = json.loads(metadata.get("json", ""))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{file.name} is no file of a weight feed ({str(error)[:80]})"
        ) from error
    if not isinstance(about, dict) or about.get("step") != file.step:
        raise CorruptCheckpoint(f"{file.name} holds another step than its name says")
    tensors = {}
    for name, entry in entries.items():
        if 0 in entry.shape:
            flat = torch.empty(0, dtype=entry.dtype)
        else:
            flat = _part(content, entry.dtype, entry.start, entry.shape)
        tensors[name] = flat.view(entry.shape)
    return about, tensors


def _part(content: bytearray, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    # copy misaligned data: the length of the header may be no multiple of 8
    if start % dtype.itemsize:
        return torch.frombuffer(content[start : start + count * dtype.itemsize], dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=start)


def _checksum(content: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]
