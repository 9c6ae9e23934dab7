"""Repeats the steps of a run from its update log, without the training data and without other
replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.files.retention import saved_checkpoints, step_of
from detonation.checkpoint.verify import load_weights
from detonation.cluster.init import local_device
from detonation.cluster.launch import run_local
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.log.repeat import replay
from detonation.train.loop.checkpoints import as_json, resume_beside
from detonation.train.loop.checks import NO_DATA, load_data
from detonation.train.loop.session import Session, replicated_run, start_session
from detonation.train.output import directory, metrics
from detonation.train.recipe.resolve import require_trust
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import from_table, to_table
from detonation.whole_files import parse_toml, read_text


def saved_run(
    out: Path,
    model: nn.Module,
    optimizer: Any,
    config: Config,
    exported: Mapping[str, Any],
    keep: int = 3,
) -> Path:
    """Saves a checkpoint of `model` and `optimizer` in the run directory `out`. The checkpoint has
    one replica and empty memories of unsent values. `exported` is that of the data.
    """
    ((_, scheme),) = optimizer.levels
    about = {"config": to_table(config), "exported": dict(exported)}
    extra = {**about, "setting": dict(scheme.arguments)}
    return save_checkpoint(out / directory.CHECKPOINTS, model, optimizer, as_json(extra), keep)


def replay_run(run: Path, out: Path | None, to: int | None, trust_code: bool) -> Table:
    """Replays the update log of a run, in one process per shard. Returns the step, the fingerprint
    and, with `out`, the path of the saved checkpoint.

    Replay begins with the newest checkpoint before step `to` or, if there is none, with the initial
    weights. Raises `ValueError` if the run has no log, and `DamagedLog` if the log ends before
    `to`.
    """
    config = _config_of(run)
    require_trust(trust_code, config, "the run", "follow", "model", "data", "optimizer", "scheme")
    if not (run / directory.UPDATES).is_dir():
        raise ValueError(f"{run} has no log of updates: train with --log")
    if out is not None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another --out")
    arguments = [str(run), to, out and str(out)]
    found: Sequence[Table] = run_local(replay_on_rank, config.mesh.shards, arguments)
    if out is not None and (run / directory.METRICS).exists():
        records = metrics.read_metrics(run / directory.METRICS)
        kept = [record.line() for record in records if record.step <= found[0]["step"]]
        # keep the records of the replayed steps for `--resume`
        directory.write_text(out / directory.METRICS, "".join(kept))
    return found[0]


def replay_on_rank(run: str, to: int | None, out: str | None) -> Table:
    """Replays one shard of the run in the directory `run`, and saves the result in `out`.
    Collective.
    """
    config = _config_of(Path(run))
    axis = LoopbackCommunicator(config.mesh.replicas)
    session = start_session(_alone(config), local_device(), axis, NO_DATA)
    found = resume_beside(session, Path(run) / directory.CHECKPOINTS, to)
    if found is None and config.train.init_from:
        load_weights(Path(config.train.init_from), session.model)
    begun = session.optimizer.step_count
    _require_log(Path(run), begun, to)
    steps = replay(Path(run) / directory.UPDATES, session.optimizer, to)
    fingerprint, _ = session.world.fingerprint(session.model)
    saved = {}
    if out is not None:
        if found is None:
            exported = load_data(config.data).exported
        else:
            exported = found.extra.get("exported", {})
        saved = {"checkpoint": str(_agreed(session, Path(out), exported))}
    return {"step": steps, "replayed": steps - begun, "fingerprint": fingerprint, **saved}


def _require_log(run: Path, begun: int, to: int | None) -> None:
    """Raises `ValueError` if step `to` is too old: the log no longer has the steps after `begun`,
    but it has those after a later checkpoint.
    """
    first = min(directory.log_starts(run), default=0)
    steps = map(step_of, saved_checkpoints(run / directory.CHECKPOINTS))
    oldest = min((step for step in steps if step >= first), default=None)
    if to is not None and begun < first and oldest is not None:
        raise ValueError(
            f"step {to} is too old: the log in {run / directory.UPDATES} begins after {first}"
            f" steps; give --to {oldest} or a later step"
        )


def _config_of(run: Path) -> Config:
    try:
        table = parse_toml(read_text(run / directory.CONFIG))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run} holds no run: {directory.CONFIG}: {error}; give the --out of a run that trained"
            " with --log"
        ) from error
    return from_table(table)


def _alone(config: Config) -> Config:
    """Returns `config` with one replica, and without comparisons between replicas."""
    levels = tuple(replace(level, replicas=1) for level in config.levels)
    train = replace(config.train, verify_every=0, on_desync="stop", log_updates=False)
    mesh = replace(config.mesh, replicas=1, link="", elastic=False, min_replicas=1, meet="")
    return replace(config, levels=levels, mesh=mesh, train=train)


def _agreed(session: Session, out: Path, exported: Mapping[str, Any]) -> Path:
    """Saves the state on which all replicas agree, as a checkpoint of one replica. The memories of
    unsent values in this checkpoint are empty.
    """
    replayed = session.optimizer
    axes = [LoopbackCommunicator()]
    optimizer = replicated_run(session.config, session.base, session.model, axes)
    for mine, agreed in zip(optimizer.set_up(), replayed.build(), strict=True):
        mine.repair(agreed.replicated())
    optimizer.resume_at(replayed.step_count)
    optimizer.run.load(replayed.run.known, replayed.run.completed)
    return saved_run(out, session.model, optimizer, session.config, exported)
