"""Shelf: the directory in which a run keeps its newest checkpoints. One process changes it."""

import logging
import re
from pathlib import Path

from detonation.checkpoint.files import disk
from detonation.checkpoint.files.manifest import NAME, Manifest

_log = logging.getLogger("detonation.checkpoint")
_NAME = re.compile(r"step-(\d{6,15})|\.step-(\d{6,15})\.part")


def title(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def part(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is written before it is whole."""
    return directory / f".{title(step)}.part"


def candidates(directory: Path) -> list[Path]:
    """What looks like a checkpoint, newest first.

    One that has a manifest but not yet its name is whole: a crash came between the two.
    """
    found = [path for path in directory.glob("*step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    whole = [path for path in found if not path.name.startswith(".") or (path / NAME).is_file()]
    return sorted(whole, key=lambda path: (step_of(path), path.name.startswith(".")), reverse=True)


def step_of(path: Path) -> int:
    """After how many steps a checkpoint was taken, by its name; -1 for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def begin(directory: Path, step: int) -> Path:
    """An empty place for the checkpoint after `step` steps. Ends or removes what a crash left."""
    if directory.is_dir():
        for path in sorted(directory.glob(".step-*")):
            if step_of(path) >= 0 and (path / NAME).is_file():
                _name(path, directory / title(step_of(path)))
            else:
                disk.remove(path)
    place = part(directory, step)
    disk.make_directory(place)
    return place


def finish(directory: Path, manifest: Manifest, keep: int) -> Path:
    """Makes the files in the place of `manifest.step` a checkpoint; then removes all but the newest `keep` up to it.

    At any moment there is either the checkpoint before or the new one, under its name or about to get it.
    """
    place, target = part(directory, manifest.step), directory / title(manifest.step)
    unfinished = place / f"{NAME}.part"
    disk.write(unfinished, [memoryview(manifest.dumps().encode())])
    disk.rename(unfinished, place / NAME)
    _name(place, target)
    try:
        for old in [path for path in candidates(directory) if step_of(path) <= manifest.step][keep:]:
            disk.remove(_aside(old))
    except OSError as error:  # the new one is whole all the same
        _log.warning("an old checkpoint in %s stays: %s", directory, error.strerror)
    return target


def abandon(directory: Path, step: int) -> None:
    """Removes what was written for a checkpoint that failed."""
    disk.remove(part(directory, step))


def _name(place: Path, target: Path) -> None:
    """Gives what is whole its name; what had the name before goes."""
    gone = _aside(target) if target.is_dir() else None
    disk.rename(place, target)
    if gone is not None:
        disk.remove(gone)


def _aside(path: Path) -> Path:
    """Moves a checkpoint out of sight, so that it is never seen half removed."""
    gone = path.with_name(f".{path.name.lstrip('.')}.gone")
    if gone.exists():
        disk.remove(gone)
    disk.rename(path, gone)
    return gone
