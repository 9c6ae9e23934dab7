"""The cache of the compiled library: a private directory, whose files are written atomically and
checked before use.

Anybody who can write a cached library can run code as the user who loads it. Therefore only the
user owns the directory and can replace it. A file is loaded only if the user owns it, and if the
checksum at its end is right.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from detonation.whole_files import open_lock, opened, read_bytes

_log = logging.getLogger(__name__)
_LOCK_S = 330.0
"""Seconds to wait for another process that compiles the same library, which may need 300 s. After
this time, this process compiles the library, too.
"""
_DIGEST_BYTES = 32


def cached(name: str, make: Callable[[Path], None], usable: Callable[[Path], object]) -> object:
    """Returns `usable(path)` for the cached file `name`. If the file is missing or damaged,
    `make(path)` creates it.

    Directories are tried in this order: the user's cache, a private directory that all processes of
    the user share, and a temporary directory of this process. One line of the log gives the reason
    why the user's cache is not used. Raises `OSError` if `make` or `usable` fails in every
    directory.
    """
    reasons: list[str] = []
    for directory in _directories(reasons):
        try:
            path = directory / name
            if not _whole(path):
                _make_once(path, make)
            result = usable(path)
        except OSError as error:
            reasons.append(f"{directory}: {error}")
            continue
        if reasons:
            _log.warning(
                "the compiled kernels are kept in %s, because other directories cannot be used: %s",
                directory,
                "; ".join(reasons),
            )
        return result
    raise OSError("; ".join(reasons))


def _directories(reasons: list[str]) -> Iterator[Path]:
    """Yields directories for the cache, the best directory first. Appends to `reasons` why a
    directory is skipped.
    """
    shared = Path(tempfile.gettempdir(), f"detonation-kernels-{os.getuid()}")
    for find in (_of_user, lambda: shared):
        try:
            yield private_directory(find())
        except (OSError, RuntimeError) as error:  # RuntimeError if the user has no home directory
            reasons.append(str(error))
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix="detonation-kernels-") as folder,
    ):
        yield Path(folder)  # a loaded library stays loaded after its file is deleted


def _of_user() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "detonation" / "kernels"


def private_directory(path: Path) -> Path:
    """Makes `path` a directory that only this user can write; returns its path without symbolic
    links.

    Raises `OSError` if another user owns it or could replace it, or if it cannot be created.
    """
    path = Path(os.path.realpath(path))
    for parent in reversed([path, *path.parents]):
        with contextlib.suppress(FileExistsError):
            if not parent.exists():
                parent.mkdir(0o700)
        found = parent.lstat()
        owners = {os.getuid()}
        if parent != path:
            owners |= {*_system_users()}
        if found.st_uid not in owners:
            raise PermissionError(
                f"{parent} belongs to user {found.st_uid}: set XDG_CACHE_HOME to your own directory"
            )
        if parent != path and found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"other users may write to {parent}: run chmod go-w {parent}")
    path.chmod(0o700)
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise PermissionError(
            f"{path} cannot be written: set XDG_CACHE_HOME to a directory that can be written"
        )
    return path


def _system_users() -> set[int]:
    """Returns the user ids of root and, in a user namespace such as a container's, of root outside
    the namespace.
    """
    users = Path("/proc/self/uid_map")
    if not users.exists() or users.read_text().split() == ["0", "0", "4294967295"]:
        return {0}
    return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}


def _whole(path: Path) -> bool:
    """True if `path` is a file that this user owns, that other users cannot write, and whose
    checksum is right.
    """
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            return False
        content = read_bytes(path)
        return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()
    return False


def _make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Creates the file `path` in one process. Meanwhile other processes that need the file wait, if
    the file system has locks.
    """
    with open_lock(path.with_suffix(".lock")) as lock:
        _wait_for(lock.fileno())
        if _whole(path):
            return
        # each compilation gets a new directory, because compilers may write further files
        with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as folder:
            part = Path(folder) / path.name
            make(part)
            part.chmod(0o600)
            with os.fdopen(opened(part, os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(hashlib.sha256(read_bytes(part)).digest())
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)


def _wait_for(lock: int) -> None:
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # this file system has no locks, but the atomic rename is enough
            return
        else:
            return
