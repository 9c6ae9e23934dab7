"""The checkpoints of a run: those of the library, with the recipe beside the state."""

import logging
from dataclasses import asdict
from pathlib import Path

from detonation.checkpoint.files.retention import checkpoint_name
from detonation.checkpoint.load.newest import Loaded, NoCheckpoint, find, load_found
from detonation.checkpoint.save.async_save import Checkpoints
from detonation.checkpoint.save.shard_job import NotSaved
from detonation.core.schemes.registry import scheme
from detonation.train.loop.counts import Counts, counted
from detonation.train.loop.session import Session
from detonation.train.output.directory import Unwritable
from detonation.train.recipe.schema import Table
from detonation.train.recipe.tables import to_table

# The screen of the run shows what the library logs here.
logging.getLogger("detonation.checkpoint").addHandler(logging.NullHandler())


def open_checkpoints(session: Session, directory: Path) -> Checkpoints:
    """The checkpoints of `session`'s run, kept in `directory`."""
    return Checkpoints(directory, session.model, session.optimizer, session.config.train.keep)


def save_async(session: Session, checkpoints: Checkpoints, before: Counts, followed: Table | None = None) -> None:
    """Starts saving; all ranks call it.

    Args:
        before: Faults in earlier starts of the run.
        followed: State of the adapter, in a run that follows its link.
    """
    _, outermost = session.optimizer.levels[-1]
    extra = {"config": to_table(session.config), "setting": dict(outermost.arguments), "followed": followed}
    checkpoints.save({**extra, **asdict(counted(session, before))})


def save_now(session: Session, checkpoints: Checkpoints, before: Counts, followed: Table | None = None) -> Path:
    """Saves and waits until it is done. Raises `Unwritable` on all ranks where one cannot write."""
    save_async(session, checkpoints, before, followed)
    try:
        saved = checkpoints.wait()
    except NotSaved as error:
        path, reason = (
            checkpoints.directory / checkpoint_name(session.optimizer.step_count),
            str(error).partition(" failed: ")[2],
        )
        raise Unwritable(f"cannot write {path}: {reason}; free some space or choose another --out") from error
    assert saved is not None
    return saved


def resume(session: Session, directory: Path, may_start: bool = False) -> tuple[Loaded | None, list[str]]:
    """Loads the newest whole checkpoint in `directory`; returns it, and the lines to show about it.

    Args:
        may_start: Load nothing where no checkpoint was saved yet.

    Raises:
        ValueError: There is none, or another model, data, scheme, optimizer or seed wrote it.
    """
    found = find(directory, session.model, session.optimizer)
    if found is None and may_start:
        return None, ["no checkpoint was saved yet: starting from the beginning"]
    if found is None:
        raise NoCheckpoint(f"there is no checkpoint in {directory}: start without --resume in another --out")
    _check(found.path, found.manifest.extra.get("config"), to_table(session.config))
    _restore_setting(session, found.manifest.extra.get("setting"))
    loaded = load_found(found, session.model, session.optimizer)
    return loaded, [*found.rejected, f"resumed after step {loaded.step}, {loaded.merged}"]


def _restore_setting(session: Session, setting: object) -> None:
    """Reconfigures the optimizer to the saved `setting`, which a run that adapts has moved from its configuration."""
    _, outermost = session.optimizer.levels[-1]
    if isinstance(setting, dict) and setting != outermost.arguments:
        try:
            there = scheme(outermost.name, setting)
        except TypeError as error:
            raise ValueError(f"the checkpoint's setting {setting} is damaged: {error}") from error
        session.optimizer.reconfigure(there)


def _check(path: Path, saved: object, here: Table) -> None:
    table = saved if isinstance(saved, dict) else {}
    for key in ("model", "data", "scheme", "seed"):
        if table.get(key) != here[key]:
            was, now = table.get(key), here[key]
            raise ValueError(f"{path} was written with {key} {was}, this run has {now}: resume with the same")
