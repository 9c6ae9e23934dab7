"""`detonation follow DIR`: the state of a run after any step that its log of updates has, without training it again."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from detonation.checkpoint.initial_weights import load_weights
from detonation.checkpoint.save.async_save import save_checkpoint
from detonation.cluster.init import local_device
from detonation.cluster.launch import run_local
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.optimizer.replicate import replicate
from detonation.log.repeat import replay
from detonation.train.loop.checkpoints import resume
from detonation.train.loop.session import Session, check_config, scheme_of, start_session
from detonation.train.output import directory, metrics
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import from_table, to_table
from detonation.train.verbs.named_code import require_trust


@dataclass(frozen=True)
class Replaying:
    """A run to repeat from its log; the fields are named like the flags of `detonation follow`.

    Args:
        to: The number of steps; None for all that the log has.
        out: A directory for a checkpoint of the state that was reached; None for none.
        trust_code: Run code that the run's configuration names as "package.module:function".
    """

    directory: Path
    to: int | None = None
    out: Path | None = None
    trust_code: bool = False


def replay_run(request: Replaying) -> Table:
    """Replays in processes on this machine, one per shard; returns step, fingerprint and, with `out`, its path.

    It begins with the newest checkpoint before `to`, or with the weights of the start. Raises `ValueError` for a run
    without a log, and `DamagedLog` where the log ends before `to`.
    """
    config = _config(request.directory)
    require_trust(request.trust_code, config, "the run", "follow", "model", "data", "optimizer", "scheme")
    if not (request.directory / directory.UPDATES).is_dir():
        raise ValueError(f"{request.directory} has no log of updates: train with --log")
    if request.out is not None and request.out.exists() and any(request.out.iterdir()):
        raise ValueError(f"{request.out} is not empty: choose another --out")
    out = None if request.out is None else str(request.out)
    found: Sequence[Table] = run_local(replay_on_rank, config.mesh.shards, [str(request.directory), request.to, out])
    if request.out is not None and (request.directory / directory.METRICS).exists():
        records = metrics.read_metrics(request.directory / directory.METRICS)
        kept = [record.line() for record in records if record.step <= found[0]["step"]]
        directory.write_text(request.out / directory.METRICS, "".join(kept))  # for --resume
    return found[0]


def replay_on_rank(run: str, to: int | None, out: str | None) -> Table:
    """Replays one shard of the run in the directory `run`, and saves it in `out`. Collective."""
    config = check_config(_config(Path(run)))
    session = start_session(_alone(config), local_device(), LoopbackCommunicator(config.mesh.replicas))
    found, _ = resume(session, Path(run) / directory.CHECKPOINTS, may_start=True, most=to)
    if found is None and config.train.init_from:
        load_weights(Path(config.train.init_from), session.model)
    begun = session.optimizer.step_count
    steps = replay(Path(run) / directory.UPDATES, session.optimizer, to)
    with session.optimizer.agreed_weights():
        fingerprint, _ = session.world.fingerprint(session.model)
    saved = {} if out is None else {"checkpoint": str(_saved(session, Path(out)))}
    return {"step": steps, "replayed": steps - begun, "fingerprint": fingerprint, **saved}


def _config(run: Path) -> Config:
    try:
        return from_table(tomllib.loads((run / directory.CONFIG).read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{run} holds no run: {error}; give the --out of one that trained with --log") from error


def _alone(config: Config) -> Config:
    """`config` with one replica, which compares itself with none."""
    levels = tuple(replace(level, replicas=1) for level in config.levels)
    train = replace(config.train, verify_every=0, on_desync="stop", log_updates=False)
    mesh = replace(config.mesh, replicas=1, link="", elastic=False, min_replicas=1, meet="")
    return replace(config, levels=levels, mesh=mesh, train=train)


def _saved(session: Session, out: Path) -> Path:
    """A checkpoint of what the replicas agreed on: of one replica, whose memory is empty."""
    scheme, replayed = scheme_of(session.config.levels[-1]), session.optimizer
    balance, seed = session.config.train.balance, session.config.seed
    optimizer = replicate(session.base, session.model, LoopbackCommunicator(), scheme, balance=balance, seed=seed)
    for mine, agreed in zip(optimizer.set_up(), replayed.build(), strict=True):
        mine.repair(agreed.replicated())
    optimizer.resume_at(replayed.step_count)
    extra = {"config": to_table(session.config), "setting": dict(scheme.arguments), "followed": None}
    return save_checkpoint(out / directory.CHECKPOINTS, session.model, optimizer, extra)
