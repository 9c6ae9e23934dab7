"""One way to files: no link is followed, no pipe waited for, no device read.

A run directory may be a stranger's, and any entry in it a link to a file of the user, a pipe or a
device. Files that the user names may be links: those who read them say so. What is written is whole
or not there. Pure Python, a leaf.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

PROBE = ".volume-"
"""How the names of files begin that a start writes to find out who may write in a directory, and
who shares it. One may remain of a start that was killed."""
MOST_TEXT = 1 << 26
"""Largest file of settings that is read, in bytes."""
MOST_RECORDS = 1 << 32
"""Largest file of records that is read, in bytes."""
_LINK = "it is a link, which is not followed"
_ODD = "it is no ordinary file"


def opened(
    path: Path, flags: int = os.O_RDONLY, links: bool = False, permissions: int = 0o666
) -> int:
    """A descriptor of the ordinary file at `path`, as of `os.open`.

    Raises `OSError` at once for a directory, pipe, socket or device, and a link unless `links`.
    """
    if links:
        follows = 0
    else:
        follows = os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | follows | os.O_NONBLOCK | os.O_CLOEXEC, permissions)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, _LINK, str(path)) from error
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise OSError(errno.ENXIO, _ODD, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _ODD, str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def reading(path: Path, links: bool = False) -> BufferedReader:
    """Ordinary file at `path`, open to be read. Raises `OSError` as `opened` does."""
    return os.fdopen(opened(path, links=links), "rb")


def new_file(path: Path) -> int:
    """A descriptor of a new file, to be written. Raises `OSError` if there is an entry."""
    return opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def replaced(path: Path) -> int:
    """A descriptor of a new file at `path`, to be written; an entry that was there is removed."""
    path.unlink(missing_ok=True)
    return new_file(path)


def open_lock(path: Path) -> IO[str]:
    """Ordinary file at `path`, which is made where there is none, to be locked and written."""
    return os.fdopen(opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")


def read_bytes(path: Path, most: int = MOST_TEXT, links: bool = False) -> bytes:
    """Content of the ordinary file at `path`.

    Raises `OSError` as `opened` does, and where it has more than `most` bytes.
    """
    with reading(path, links) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read(most)


def read_text(
    path: Path, errors: str = "strict", most: int = MOST_TEXT, links: bool = False
) -> str:
    """Content of the ordinary file at `path` as UTF-8.

    Raises as `read_bytes` does, and `UnicodeDecodeError`.
    """
    return read_bytes(path, most, links).decode(errors=errors)


def read_json(path: Path) -> Any:
    """Content of the ordinary file at `path`.

    Raises as `read_text` does, and `ValueError` where it is no JSON.
    """
    return json.loads(read_text(path))


def write_whole(path: Path, content: bytes | bytearray | Iterable[memoryview]) -> None:
    """Puts `content`, or its parts one after another, at `path`, on the disk when it returns.

    After a crash there is the old file or the new one. A link at `path` is replaced, and not
    followed. Raises `OSError` if it cannot; then the old file stays, and nothing lies beside it.
    """
    part = path.with_name(path.name + ".part")
    try:
        with os.fdopen(replaced(part), "wb") as file:
            file.writelines([content] if isinstance(content, bytes | bytearray) else content)
            file.flush()
            os.fsync(file.fileno())
            if not os.path.samestat(os.fstat(file.fileno()), os.lstat(part)):
                raise OSError(errno.EBUSY, "another process writes it, too", str(path))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def sync_entries(path: Path) -> None:
    """Waits until the entries of the directory `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that does that for files alone
            raise
    finally:
        os.close(descriptor)
