"""All changes that a save makes to the file system, each as a small function, so that a test can
stop a save before each change.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from detonation.whole_files import make_directories, new_file, sync_entries

WRITE_BLOCK = 1 << 20

observer: Callable[[str, Path], None] | None = None
"""For tests: called before each operation with its name and path. It may raise an error to stop the
operation.
"""


def make_directory(path: Path) -> None:
    _about_to("mkdir", path)
    make_directories(path, exist_ok=False)


def touch(path: Path) -> None:
    """Makes an empty file. Raises `OSError` if the file exists."""
    _about_to("create", path)
    os.close(new_file(path))


def write_file(path: Path, content: Iterable[memoryview]) -> tuple[int, str]:
    """Writes a new file and waits until it is on disk. Returns its size and sha256 (hex).

    Raises `OSError` if the file cannot be written. A part of the file may exist in that case.
    """
    digest = hashlib.sha256()
    count = 0
    _about_to("create", path)
    descriptor = new_file(path)
    try:
        for part in content:
            for at in range(0, len(part), WRITE_BLOCK):
                _about_to("write", path)
                rest = part[at : at + WRITE_BLOCK]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            digest.update(part)
            count += len(part)
        _about_to("fsync", path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return count, digest.hexdigest()


def rename(source: Path, target: Path) -> None:
    """Moves `source` to `target` and waits until the move is on disk.

    After a crash, the file or directory is at exactly one of these two paths.
    """
    _about_to("rename", source)
    source.rename(target)
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Waits until the entries of the directory `path` are on the disk."""
    _about_to("fsync", path)
    sync_entries(path)


def remove(path: Path) -> None:
    """Removes a directory with its contents. If `path` is a link, removes only the link.

    Entries that cannot be removed remain.
    """
    if path.is_symlink():
        _about_to("unlink", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return
    for entry in sorted(path.glob("*")):
        _about_to("unlink", entry)
        with contextlib.suppress(OSError):
            if not entry.is_dir() or entry.is_symlink():
                entry.unlink()
    _about_to("rmdir", path)
    shutil.rmtree(path, ignore_errors=True)


def _about_to(operation: str, path: Path) -> None:
    if observer is not None:
        observer(operation, path)
