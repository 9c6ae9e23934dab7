"""A run's checkpoints: the library's, with the recipe beside the state."""

import logging
from dataclasses import asdict
from pathlib import Path

import detonation as dt
from detonation.checkpoint.files.retention import title
from detonation.checkpoint.load.newest import Loaded, NoCheckpoint, find, load
from detonation.checkpoint.save.async_save import Checkpoints
from detonation.checkpoint.save.shard_job import NotSaved
from detonation.train.loop.counts import Counts, counted
from detonation.train.loop.session import Session
from detonation.train.output.directory import Unwritable
from detonation.train.recipe.schema import Table, to_table

# what the library logs is shown by the screen of the run
logging.getLogger("detonation.checkpoint").addHandler(logging.NullHandler())


def opened(session: Session, directory: Path) -> Checkpoints:
    """The checkpoints of `session`'s run, kept in `directory`."""
    return Checkpoints(directory, session.model, session.optimizer, session.config.train.keep)


def save(session: Session, checkpoints: Checkpoints, before: Counts, followed: Table | None = None) -> None:
    """Starts saving. All ranks call it.

    before: what the run went on without in earlier starts. followed: what is known of a link that it follows.
    """
    _, scheme = session.optimizer.levels[-1]
    extra = {"config": to_table(session.config), "setting": dict(scheme.arguments), "followed": followed}
    checkpoints.save({**extra, **asdict(counted(session, before))})


def save_now(session: Session, checkpoints: Checkpoints, before: Counts, followed: Table | None = None) -> Path:
    """Saves and waits until it is done. Raises `Unwritable` on all ranks where one cannot write."""
    save(session, checkpoints, before, followed)
    try:
        saved = checkpoints.wait()
    except NotSaved as error:
        path, reason = checkpoints.directory / title(session.optimizer.step_count), str(error).partition(" failed: ")[2]
        raise Unwritable(f"cannot write {path}: {reason}; free some space or choose another --out") from error
    assert saved is not None
    return saved


def resume(session: Session, directory: Path, may_start: bool = False) -> tuple[Loaded | None, list[str]]:
    """Goes on from the newest whole checkpoint in `directory`; returns it, and a line for all that people should know.

    may_start: where none was saved yet, nothing is loaded. Raises `ValueError` where there is none, or it was written
    by another model, data, scheme, optimizer or seed.
    """
    found = find(directory, session.model, session.optimizer)
    if found is None and may_start:
        return None, ["no checkpoint was saved yet: starting from the beginning"]
    if found is None:
        raise NoCheckpoint(f"there is no checkpoint in {directory}: start without --resume in another --out")
    _check(found.path, found.manifest.extra.get("config"), to_table(session.config))
    _change(session, found.manifest.extra.get("setting"))
    loaded = load(found, session.model, session.optimizer)
    return loaded, [*found.rejected, f"resumed after step {loaded.step}, {loaded.merged}"]


def _change(session: Session, setting: object) -> None:
    """Goes by the `setting` that was in force, which is another than that of the configuration in a run that adapts."""
    _, scheme = session.optimizer.levels[-1]
    if isinstance(setting, dict) and setting != scheme.arguments:
        try:
            there = dt.scheme(scheme.name, setting)
        except TypeError as error:
            raise ValueError(f"the checkpoint's setting {setting} is damaged: {error}") from error
        session.optimizer.change(there)


def _check(path: Path, saved: object, here: Table) -> None:
    table = saved if isinstance(saved, dict) else {}
    for key in ("model", "data", "scheme", "seed"):
        if table.get(key) != here[key]:
            was, now = table.get(key), here[key]
            raise ValueError(f"{path} was written with {key} {was}, this run has {now}: resume with the same")
