"""The checkpoints of a run: those of the library, with the recipe beside the state."""

import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from detonation.checkpoint.async_save import Checkpoints
from detonation.checkpoint.files.retention import checkpoint_name
from detonation.checkpoint.newest import Loaded, NoCheckpoint, find, load_found
from detonation.checkpoint.shard_saver import NotSaved
from detonation.core.flat.tensors import digest
from detonation.core.link.elastic_communicator import PeerLost
from detonation.core.schemes.registry import scheme
from detonation.data import Data, Streamed
from detonation.train.loop.session import Session
from detonation.train.loop.summary import Counts, counted
from detonation.train.output.directory import Unwritable, remedy_of
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import settings_of, to_table

_ANNOUNCED = {"mesh.replicas", "mesh.shards", "mesh.nodes", "train.init_from"}
"""Settings whose change another line tells of, or that count at the beginning alone."""

# The screen of the run shows what the library logs here.
logging.getLogger("detonation.checkpoint").addHandler(logging.NullHandler())


def save_async(
    session: Session, checkpoints: Checkpoints, before: Counts, followed: Table | None = None
) -> None:
    """Starts saving; all ranks call it.

    Beside the state are the faults `before` this start and, in a run that follows its link, the
    state of its adapter.
    """
    _, outermost = session.optimizer.levels[-1]
    extra: Table = {
        "config": to_table(session.config),
        "setting": dict(outermost.arguments),
        "followed": followed,
        "data": _data_mark(session.data),
    }
    if isinstance(session.data.train, Streamed):
        position = session.data.train.position(session.rank, session.world_size)
        with suppress(PeerLost):  # the stream is then read again, up to the step of the checkpoint
            extra["positions"] = [
                json.loads(text) for text in session.world.texts().gather(json.dumps(position))
            ]
    checkpoints.save(as_json({**extra, **asdict(counted(session, before))}))


def as_json(extra: Table) -> Table:
    """`extra` with lists for tuples, as the files of a run spell them."""
    return dict(json.loads(json.dumps(extra)))


def save_now(
    session: Session, checkpoints: Checkpoints, before: Counts, followed: Table | None = None
) -> Path:
    """Saves and waits until it is done. Raises `Unwritable` on all ranks where one cannot write."""
    save_async(session, checkpoints, before, followed)
    try:
        saved = checkpoints.wait()
    except NotSaved as error:
        if isinstance(error.__cause__, PeerLost):
            session.optimizer.synchronize()  # which goes on without the lost replica
            return save_now(session, checkpoints, before, followed)
        path = checkpoints.directory / checkpoint_name(session.optimizer.step_count)
        reason = str(error).partition(" failed: ")[2]
        raise Unwritable(f"cannot write {path}: {reason}; {remedy_of(error)}") from error
    assert saved is not None
    return saved


def resume(
    session: Session, directory: Path, may_start: bool = False, most: int | None = None
) -> tuple[Loaded | None, list[str]]:
    """Loads the newest whole checkpoint in `directory`; returns it, and the lines to show about it.

    Args:
        may_start: Load nothing where no checkpoint was saved yet.
        most: The step after which no checkpoint counts.

    Raises:
        ValueError: There is none, or another model, data, scheme, optimizer or seed wrote it.
    """
    found = find(directory, session.model, session.optimizer, most)
    if found is None and may_start:
        return None, ["no checkpoint was saved yet: starting from the beginning"]
    if found is None:
        raise NoCheckpoint(
            f"there is no checkpoint in {directory}: start without --resume in another --out"
        )
    extra = found.manifest.given
    was = extra["config"] if isinstance(extra.get("config"), dict) else {}
    changed = compare_settings(found.path, was, session.config, "checkpoint")
    changed += _other_data(extra.get("data"), session.data)
    _restore_setting(session, extra.get("setting"))
    loaded = load_found(found, session.model, session.optimizer)
    positions = extra.get("positions")
    if isinstance(session.data.train, Streamed) and isinstance(positions, list):
        if len(positions) == session.world_size:
            session.data.train.go_to(session.rank, session.world_size, positions[session.rank])
        else:  # the parts are others, and each is read from its beginning up to this step
            changed.append(
                "the stream is read again up to this step, because other ranks divide it"
            )
    return loaded, [*found.rejected, f"resumed after step {loaded.step}, {loaded.merged}", *changed]


def _restore_setting(session: Session, setting: object) -> None:
    """Reconfigures the optimizer to the saved `setting`, which a run that adapts has moved from its
    configuration."""
    _, outermost = session.optimizer.levels[-1]
    if isinstance(setting, dict) and setting != outermost.arguments:
        try:
            there = scheme(outermost.name, setting)
        except TypeError as error:
            raise ValueError(f"the checkpoint's setting {setting} is damaged: {error}") from error
        session.optimizer.reconfigure(there)


def compare_settings(path: Path, saved: Table, config: Config, since: str) -> list[str]:
    """A line about the settings that are others than in `path`, as of a checkpoint, and count from
    now on.

    Raises `ValueError` where one is another that must be the same.
    """
    here = json.loads(json.dumps(to_table(config)))  # lists, as those of a file
    for key in ("model", "data", "scheme", "seed"):
        if saved.get(key) != here[key]:
            was, now = saved.get(key), here[key]
            raise ValueError(
                f"{path} was written with {key} {was}, this run has {now}: resume with the same"
            )
    # The checkpoint has the options of the optimizer, too, and they count; only the schedule sets
    # lr anew in each step.
    was, now = (table.get("optimizer", {}) for table in (saved, here))
    for key in was.keys() | now.keys() if was.get("name") == now["name"] else ():
        if key != "lr" and was.get(key) != now.get(key):
            text = f"optimizer.{key} {was.get(key)}, this run has {now.get(key)}"
            raise ValueError(f"{path} was written with {text}: resume with the same")
    before, now = (dict(settings_of(table)) for table in (saved, here))
    keys = [
        key
        for key in {**before, **now}
        if before.get(key) != now.get(key) and key not in _ANNOUNCED
    ]
    texts = [f"{key} is {now.get(key)}, was {before.get(key)}" for key in keys]
    return [f"changed since the {since}: {'; '.join(texts)}"] if texts else []


def _data_mark(data: Data) -> list[object]:
    """The number of training examples, and a hash of three of them; of a stream, those that it
    holds out."""
    examples = data.validation if isinstance(data.train, Streamed) else data.train
    count = len(examples)
    few = examples[torch.tensor([0, count // 2, count - 1])]
    return [count, digest(few[key] for key in sorted(few))[:16]]


def _other_data(saved: object, data: Data) -> list[str]:
    """A line where the data are not those of the checkpoint."""
    now = _data_mark(data)
    if saved is None or saved == now:
        return []
    was = saved[0] if isinstance(saved, list) and saved else saved
    counts = (
        f"{now[0]} training examples, was {was}"
        if was != now[0]
        else f"other examples, {now[0]} as before"
    )
    return [
        f"the data have changed since the checkpoint: {counts}; the order of examples is another"
        " from now on"
    ]
