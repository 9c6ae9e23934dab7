"""Opens files safely: follows no symbolic links, waits for no pipes, and reads no devices.

A run directory may come from another user. An entry in such a directory may be a pipe, a device, or
a symbolic link to a private file. For files that the user names, the caller may allow links. Files
are written atomically. Uses only the standard library, and imports no other module of the package.
"""

import errno
import json
import math
import os
import stat
import tomllib
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

PROBE = ".volume-"
"""Prefix of test files in a directory. At the start of a run, ranks write these files to find out
which ranks can write there and which ranks share the directory. A run that is killed during this
test may leave such a file behind.
"""
MOST_TEXT = 1 << 26
"""Largest size of a settings file that is read, in bytes."""
MOST_RECORDS = 1 << 32
"""Largest size of a file of records that is read, in bytes."""
_LINK = "it is a link, which is not followed"
_ODD = "it is no ordinary file"
_DEEP = "it nests too deeply"
MOST_NESTED = 100
"""Largest depth to which TOML tables and lists may be nested."""


def opened(
    path: Path, flags: int = os.O_RDONLY, links: bool = False, permissions: int = 0o666
) -> int:
    """Opens the ordinary file at `path` as `os.open` does; returns its descriptor.

    Raises `OSError` at once if the path is a directory, pipe, socket or device. Also raises
    `OSError` for a link, unless `links` is True.
    """
    follows = 0
    if not links:
        follows = os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | follows | os.O_NONBLOCK | os.O_CLOEXEC, permissions)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, _LINK, str(path)) from error
        if error.errno == errno.ENXIO:  # the path is a pipe without a reader, or a socket
            raise OSError(errno.ENXIO, _ODD, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _ODD, str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def reading(path: Path, links: bool = False) -> BufferedReader:
    """Opens the ordinary file at `path` for reading. Raises `OSError` for the same reasons as
    `opened`.
    """
    return os.fdopen(opened(path, links=links), "rb")


def new_file(path: Path) -> int:
    """Creates a file, and returns a descriptor for writing. Raises `OSError` if the file already
    exists.
    """
    return opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def replaced(path: Path) -> int:
    """Removes any file at `path`, creates a new one, and returns a descriptor for writing."""
    path.unlink(missing_ok=True)
    return new_file(path)


def open_lock(path: Path) -> IO[str]:
    """Opens the ordinary file at `path` for locking and writing. Creates the file if it is
    missing.
    """
    return os.fdopen(opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")


def read_bytes(path: Path, most: int = MOST_TEXT, links: bool = False) -> bytes:
    """Returns the content of the ordinary file at `path`.

    Raises `OSError` for the same reasons as `opened`, and if the file has more than `most` bytes.
    """
    with reading(path, links) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read(most)


def read_text(
    path: Path, errors: str = "strict", most: int = MOST_TEXT, links: bool = False
) -> str:
    """Returns the content of the ordinary file at `path` as UTF-8 text.

    Raises the same errors as `read_bytes`, and `UnicodeDecodeError`.
    """
    return read_bytes(path, most, links).decode(errors=errors)


def read_json(path: Path) -> Any:
    """Reads the ordinary file at `path` as JSON.

    Raises the same errors as `read_text`, and `ValueError` if the content is not JSON.
    """
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Parses `text` as JSON. Raises `ValueError` if the text is not JSON, or if its values are
    nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns `value` as JSON. Numbers that are not finite become null, because JSON has no word
    for them, and many readers refuse Python's `NaN` and `Infinity`.

    >>> json_text({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(_with_finite_numbers(value), indent=indent, allow_nan=False)


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _with_finite_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(inner) for inner in value]
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parses `text` as TOML. Tables and lists may be nested to the depth `MOST_NESTED`.

    Raises `ValueError` if the text is not TOML, or if its values are nested more deeply.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error
    values: list[Any] = [table]
    for _ in range(MOST_NESTED):
        values = [inner for value in values for inner in _inside(value)]
    if values:
        raise ValueError(_DEEP)
    return table


def _inside(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def write_whole(path: Path, content: bytes | bytearray | Iterable[memoryview]) -> None:
    """Writes the file `path`, and waits until the file is on the disk. `content` may be a sequence
    of parts.

    After a crash, `path` is either the whole old file or the whole new file. If `path` is a link,
    the link is replaced, not followed. If writing fails, raises `OSError`, keeps the old file, and
    leaves no partial file.
    """
    if isinstance(content, bytes | bytearray):
        content = [memoryview(content)]
    part = path.with_name(path.name + ".part")
    try:
        with os.fdopen(replaced(part), "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
            if not os.path.samestat(os.fstat(file.fileno()), os.lstat(part)):
                raise OSError(errno.EBUSY, "another process writes it, too", str(path))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def make_directories(path: Path, exist_ok: bool = True) -> None:
    """Creates the directory `path` and its missing parents, and waits until their entries are on
    the disk.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for each in missing:
        sync_entries(each.parent)


def sync_entries(path: Path) -> None:
    """Waits until the entries of the directory `path` are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a directory that cannot be read cannot be synced
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system cannot sync directories
            raise
    finally:
        os.close(descriptor)
