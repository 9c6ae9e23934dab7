"""Saves and loads the checkpoints of a run. Besides the state that `save_checkpoint` saves, such a
checkpoint contains the recipe and the counts of faults.
"""

import json
import logging
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from detonation.checkpoint.async_save import Checkpoints
from detonation.checkpoint.files.retention import checkpoint_name
from detonation.checkpoint.newest import Found, Loaded, NoCheckpoint, find, load_found
from detonation.checkpoint.shard_saver import NotSaved
from detonation.choices import first_line
from detonation.core.link import PeerLost
from detonation.data import Streamed
from detonation.train.loop.session import Session
from detonation.train.loop.summary import Counts, counted
from detonation.train.output.directory import Unwritable, remedy_of
from detonation.train.recipe.schema import Config, OptimizerConfig, Table
from detonation.train.recipe.tables import settings_of, to_table

_ANNOUNCED = {"mesh.replicas", "mesh.shards", "mesh.nodes", "scheme", "train.init_from"}
"""Settings that `compare_settings` does not report: another line reports the change, or only a new
run reads the setting. `scheme` is the list of levels, of which only the outermost size may change.
"""

# Without a handler, warnings of this logger would be printed twice: by Python and by the run.
logging.getLogger("detonation.checkpoint").addHandler(logging.NullHandler())


def save_async(session: Session, checkpoints: Checkpoints, before: Counts) -> None:
    """Starts to save a checkpoint, and returns before the checkpoint is complete. Collective.

    Args:
        before: Faults counted before this start of the run; the checkpoint holds the counts of all
            starts.
    """
    _, outermost = session.optimizer.levels[-1]
    extra: Table = {
        "config": to_table(session.config),
        "setting": dict(outermost.arguments),
        "data": session.data_mark,
        "exported": dict(session.data.exported),
    }
    # True if each rank reads exactly one part of the stream
    divided = session.world_size == session.world.parts
    if divided and isinstance(session.data.train, Streamed):
        position = session.data.train.position(session.rank, session.world_size)
        # If a replica is lost here, the checkpoint lacks the positions in the stream.
        # Without these positions, a resumed run reads the stream from its start.
        with suppress(PeerLost):
            positions = session.world.texts().gather(json.dumps(position))
            extra["positions"] = [json.loads(text) for text in positions]
    checkpoints.save(as_json({**extra, **asdict(counted(session, before))}))


def as_json(extra: Table) -> Table:
    """Returns `extra` as it is after writing it to JSON and reading it back: tuples become
    lists.
    """
    return dict(json.loads(json.dumps(extra)))


def save_now(session: Session, checkpoints: Checkpoints, before: Counts) -> Path:
    """Saves a checkpoint, and waits until it is complete. Raises `Unwritable` on all ranks if one
    rank cannot write.
    """
    save_async(session, checkpoints, before)
    try:
        saved = checkpoints.wait()
    except NotSaved as error:
        if error.lost:
            session.optimizer.synchronize()  # `synchronize` removes the lost replica from the run
            return save_now(session, checkpoints, before)
        path = checkpoints.directory / checkpoint_name(session.optimizer.step_count)
        reason = str(error).partition(" failed: ")[2]
        raise Unwritable(f"cannot write {path}: {reason}; {remedy_of(error)}") from error
    assert saved is not None
    return saved


def resume(
    session: Session, directory: Path, may_start: bool = False
) -> tuple[Loaded | None, list[str]]:
    """Loads the newest complete checkpoint in `directory`. Returns this checkpoint and the lines to
    print.

    Args:
        may_start: Start from the beginning if no checkpoint exists, instead of raising.

    Raises:
        ValueError: No checkpoint exists, or the model, data, scheme, optimizer or seed of the
            checkpoint differs from that of the run.
    """
    found = find(directory, session.model, session.optimizer)
    if found is None and may_start:
        return None, ["no checkpoint was saved yet: starting from the beginning"]
    if found is None:
        raise NoCheckpoint(
            f"there is no checkpoint in {directory}: start without --resume in another --out"
        )
    extra = found.manifest.given
    saved = _saved_config(found)
    changed = compare_settings(found.path, saved, session.config, "checkpoint")
    changed += _other_batch(saved, as_json(to_table(session.config)))
    changed += _other_data(extra.get("data"), session.data_mark)
    loaded = load_found(found, session.model, session.optimizer)
    changed += _continue_stream(session, extra.get("positions"))
    return loaded, [*found.rejected, f"resumed after step {loaded.step}, {loaded.merged}", *changed]


def _continue_stream(session: Session, positions: object) -> list[str]:
    """Continues a stream at the saved position of this rank. If the stream must be read from its
    start instead, returns a line that says why.
    """
    stream = session.data.train
    if not isinstance(stream, Streamed) or not isinstance(positions, list):
        return []
    again = "the stream is read again up to this step, because"
    if len(positions) != session.world_size:
        # a different number of ranks divides the stream differently
        return [f"{again} the number of ranks changed"]
    try:
        stream.go_to(session.rank, session.world_size, positions[session.rank])
    except ValueError as error:  # an older version wrote it, or the files of the stream changed
        return [f"{again} {first_line(error)}"]
    return []


def resume_beside(session: Session, directory: Path, most: int | None) -> Loaded | None:
    """Loads the newest checkpoint up to step `most` of a run that may still train; None if there is
    no checkpoint. Reads no data. Collective.
    """
    try:
        return _loaded_beside(session, directory, most)
    except ValueError:
        # the run may have removed the checkpoint after this process found it
        return _loaded_beside(session, directory, most)


def _loaded_beside(session: Session, directory: Path, most: int | None) -> Loaded | None:
    found = find(directory, session.model, session.optimizer, most)
    if found is None:
        return None
    compare_settings(found.path, _saved_config(found), session.config, "checkpoint")
    return load_found(found, session.model, session.optimizer)


def _saved_config(found: Found) -> Table:
    """Returns the recipe in a checkpoint; {} if the checkpoint holds none."""
    saved = found.manifest.given.get("config")
    if isinstance(saved, dict):
        return saved
    return {}


def compare_settings(path: Path, saved: Table, config: Config, since: str) -> list[str]:
    """Returns at most one line, which lists the settings that differ from the settings saved in
    `path`.

    Raises `ValueError` if the model, data, scheme, seed or optimizer differs. The outermost level
    may have another number of replicas.

    Args:
        since: Name of the saved file in the line, such as "checkpoint".
    """
    here = as_json(to_table(config))
    for key in ("model", "data", "scheme", "seed"):
        was = saved.get(key)
        now = here[key]
        if _without_outermost_size(was) != _without_outermost_size(now):
            raise ValueError(
                f"{path} was written with {key} {was}, this run has {now}: resume with the same"
                f" {key}"
            )
    _require_same_optimizer(path, saved.get("optimizer", {}), here["optimizer"])
    before = dict(settings_of(saved))
    after = dict(settings_of(here))
    changes = []
    for key, was in before.items():  # checkpoints of older versions do not contain every setting
        now = after.get(key)
        if was != now and key not in _ANNOUNCED:
            changes.append(f"{key} is {now}, was {was}")
    if not changes:
        return []
    return [f"changed since the {since}: {'; '.join(changes)}"]


def _without_outermost_size(setting: Any) -> Any:
    """Returns a list of levels without the number of replicas of the outermost level, and any other
    setting unchanged."""
    match setting:
        case [*inner, {"replicas": _, **rest}]:
            return [*inner, rest]
    return setting


def _other_batch(saved: Table, here: Table) -> list[str]:
    """Returns a line if the number of examples in a step differs from the number when the
    checkpoint was saved; otherwise returns no line.
    """
    was = _examples_of_step(saved)
    now = _examples_of_step(here)
    if was is None or was == now:
        return []
    return [
        f"a step has {now} examples, had {was}: train.accumulate and train.batch_size change this;"
        " in this epoch some examples may be repeated or left out"
    ]


def _examples_of_step(settings: Table) -> int | None:
    """Returns the number of examples in a step; None if an older version did not save all settings
    that determine this number.
    """
    found = dict(settings_of(settings))
    levels = found.get("scheme")
    if isinstance(levels, list):
        found["mesh.replicas"] = math.prod(level["replicas"] for level in levels)
    keys = ("train.batch_size", "train.accumulate", "mesh.replicas", "mesh.shards")
    factors = [factor for key in keys if isinstance(factor := found.get(key), int)]
    if len(factors) < len(keys):
        return None
    nodes = found.get("mesh.nodes")
    if isinstance(nodes, list) and nodes:
        return math.prod(factors[:2]) * sum(nodes)
    return math.prod(factors)


def _require_same_optimizer(path: Path, was: Table, now: Table) -> None:
    """Raises `ValueError` if an option of the saved optimizer differs from the same option in this
    run. The option lr may differ.

    Loading a checkpoint restores the saved options, so a changed option would have no effect. Only
    lr follows the schedule of this run. If the optimizers of run and checkpoint have different
    names, only options that both have are compared.
    """
    # checkpoints of older versions may lack `embedding_lr_ratio`: it then had the default value
    was = {"embedding_lr_ratio": OptimizerConfig.embedding_lr_ratio, **was}
    keys = was.keys() | now.keys()
    if was.get("name") != now["name"]:
        keys = was.keys() & now.keys()
    for key in keys - {"lr", "name"}:
        if was.get(key) != now.get(key):
            text = f"optimizer.{key} {was.get(key)}, this run has {now.get(key)}"
            raise ValueError(f"{path} was written with {text}: resume with the same {key}")


def _other_data(saved: object, now: list[object]) -> list[str]:
    """Returns a line if the training data differ from the data of the checkpoint; otherwise returns
    no line.
    """
    was = [saved]
    if isinstance(saved, list) and saved:
        was = saved
    if len(was) != len(now):
        # an older version hashed 3 examples, or none, and no files: compare the counts
        was = was[:1]
        now = now[:1]
    if saved is None or was == now:
        return []
    what = "training examples"
    effect = "the order of examples differs"
    if len(now) > _WITHOUT_FILES:
        what = "files"
        effect = "the stream may skip or repeat documents"
        was = was[_WITHOUT_FILES:]
        now = now[_WITHOUT_FILES:]
    counts = f"{now[0]} {what}, was {was[0]}"
    if was[0] == now[0]:
        counts = f"{now[0]} {what} as before, but with other contents"
    return [f"the data have changed since the checkpoint: {counts}; from now on {effect}"]


_WITHOUT_FILES = 3
"""Length of a mark of data without the files of a stream; see `mark_of_data`."""
