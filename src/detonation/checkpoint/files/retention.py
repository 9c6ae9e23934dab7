"""Creates, names and removes the checkpoints of a run in their directory.

Only one of the processes that share the directory makes changes in it.
"""

import contextlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from detonation.checkpoint.files import disk
from detonation.checkpoint.files.manifest import MANIFEST_NAME, file_name
from detonation.whole_files import PROBE

_log = logging.getLogger("detonation.checkpoint")
_NAME = re.compile(r"step-(\d{6,15})|\.step-(\d{6,15})\.part")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_path(directory: Path, step: int) -> Path:
    """The temporary directory of the checkpoint of `step`, used until the checkpoint is
    complete."""
    return directory / f".{checkpoint_name(step)}.part"


def saved_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints of `directory` by name, newest first; their contents are not checked.

    A directory with a temporary name counts as a checkpoint if it has a manifest: the checkpoint is
    complete, but a crash prevented its renaming.
    """
    found = [
        path for path in directory.glob("*step-*") if _NAME.fullmatch(path.name) and path.is_dir()
    ]
    whole = [
        path for path in found if not path.name.startswith(".") or (path / MANIFEST_NAME).is_file()
    ]
    return newest_first(whole)


def newest_first(checkpoints: Iterable[Path]) -> list[Path]:
    """Sorts checkpoints in the order in which loading tries them, the newest first.

    If a step has a directory with a temporary name and a directory with the final name, the one
    with the temporary name is newer.
    """
    return sorted(
        checkpoints, key=lambda path: (step_of(path), path.name.startswith(".")), reverse=True
    )


def committed(directory: Path, name: str) -> Path:
    """Path of the checkpoint `name`: with its final name, if a rank has already renamed it."""
    path = directory / name
    if (path / MANIFEST_NAME).is_file():
        return path
    return directory / checkpoint_name(step_of(path))


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint; -1 if `path` is not named like a checkpoint."""
    match = _NAME.fullmatch(path.name)
    if match:
        return int(match[1] or match[2])
    return -1


def is_checkpoint(path: Path) -> bool:
    """True if `path` is named like a checkpoint, or holds the first file of a checkpoint."""
    return step_of(path) >= 0 or (path / file_name(0, 0)).is_file()


def begin(directory: Path, step: int) -> None:
    """Creates the temporary directory for the checkpoint of `step`.

    A crash may have left temporary directories. Complete ones get their final name, and all others
    are removed.
    """
    if directory.is_dir():
        for probe in directory.glob(f"{PROBE}*"):
            with contextlib.suppress(OSError):  # the file may belong to another user
                probe.unlink()
        for path in sorted(directory.glob(".step-*")):
            if step_of(path) >= 0 and (path / MANIFEST_NAME).is_file():
                _give_name(path, directory / checkpoint_name(step_of(path)))
            else:
                disk.remove(path)
    disk.make_directory(partial_path(directory, step))


def put_manifest(directory: Path, step: int, manifest: str) -> None:
    """Writes the manifest, under a temporary name, into the temporary directory of the checkpoint
    of `step`."""
    disk.write_file(_unfinished(directory, step), [memoryview(manifest.encode())])


def commit(directory: Path, step: int) -> None:
    """Gives the manifest and the directory of the checkpoint of `step` their final names.

    At any moment either the previous checkpoint or the new checkpoint is complete.
    """
    partial = partial_path(directory, step)
    disk.rename(_unfinished(directory, step), partial / MANIFEST_NAME)
    _give_name(partial, directory / checkpoint_name(step))


def retire(directory: Path, step: int) -> None:
    """Removes the checkpoints before `step`."""
    try:
        for old in [path for path in saved_checkpoints(directory) if step_of(path) < step]:
            disk.remove(_aside(old))
    except OSError as error:
        # the new checkpoint is complete even if old checkpoints cannot be removed
        _log.warning("an old checkpoint in %s could not be removed: %s", directory, error.strerror)


def abandon(directory: Path, step: int) -> None:
    disk.remove(partial_path(directory, step))


def _unfinished(directory: Path, step: int) -> Path:
    return partial_path(directory, step) / f"{MANIFEST_NAME}.part"


def _give_name(partial: Path, target: Path) -> None:
    """Renames a complete checkpoint to `target`, and removes the previous checkpoint with that
    name.
    """
    try:
        replaced = None
        if target.is_dir():
            replaced = _aside(target)
        disk.rename(partial, target)
    except OSError:
        if _gone(target).is_dir() and not target.exists():
            _gone(target).rename(target)  # give the previous checkpoint its name back
        raise
    if replaced is not None:
        disk.remove(replaced)


def _aside(path: Path) -> Path:
    """Renames a checkpoint before its removal, so that no reader finds it partly removed."""
    gone = _gone(path)
    if gone.exists():
        disk.remove(gone)
    disk.rename(path, gone)
    return gone


def _gone(path: Path) -> Path:
    return path.with_name(f".{path.name.lstrip('.')}.gone")
