"""Where the files of a weight feed are: a directory, or a folder of any file system that fsspec knows."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from detonation.whole_files import write_whole


class Folder(Protocol):
    """Files by name. Whoever lists or reads sees a file whole or not at all. All methods raise `OSError`."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytearray: ...

    def write(self, name: str, content: Iterable[memoryview]) -> None: ...

    def remove(self, name: str) -> None: ...


class LocalFolder:
    """A directory, also one that other machines mount.

    Args:
        path: Made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return [path.name for path in self._path.iterdir()] if self._path.exists() else []

    def read(self, name: str) -> bytearray:
        with (self._path / name).open("rb") as file:
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
        url: Its protocol needs the package that fsspec names for it.
        options: Of the file system, such as credentials.

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
        with _os_errors(), contextlib.suppress(FileNotFoundError):  # before the first file
            return [str(path).rpartition("/")[2] for path in self._system.ls(self._path, detail=False, refresh=True)]
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
    """Raises whatever error the library of a protocol has as an `OSError`: training goes on."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def folder_at(target: "Path | str | Folder") -> Folder:
    """The folder at a path, or at a URL with "://"; a folder itself."""
    if isinstance(target, str) and "://" in target:
        return RemoteFolder(target)
    return LocalFolder(Path(target)) if isinstance(target, str | Path) else target
