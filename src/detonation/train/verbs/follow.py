"""`detonation follow`: repeats a run from its updates, read from a live feed or a log."""

import contextlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from torch import nn

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.verify import load_weights
from detonation.cluster.init import local_device
from detonation.cluster.launch import run_local
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.processes.failure import RunError
from detonation.feed.follower import follow
from detonation.feed.stream import read_about
from detonation.feed.token import Refused, read_token
from detonation.log.repeat import replay
from detonation.models import build_model
from detonation.train.loop.checkpoints import as_json, resume
from detonation.train.loop.session import Session, check_config, replicated_run, start_session
from detonation.train.output import directory, metrics
from detonation.train.output.screen import Screen
from detonation.train.recipe.resolve import require_trust
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import from_table, to_table
from detonation.whole_files import read_text


@dataclass(frozen=True)
class Following:
    """A run to follow; its fields are named after the flags of `detonation follow`.

    Args:
        source: Address of the feed of a live run; or directory of a run with an update log.
        out: Run directory for the result, new or of an earlier call; optional for a log.
        every: Steps between checkpoints of a live run; 100 if None.
        keep: Number of newest checkpoints of a live run to keep; 3 if None.
        to: Last step; None for the end of the run or of the log.
        trust_code: Run code that the configuration of the run names as "package.module:function".

    Raises:
        ValueError: A number is out of range, or a flag does not fit the source.
    """

    source: str
    out: Path | None = None
    every: int | None = None
    keep: int | None = None
    to: int | None = None
    trust_code: bool = False
    to_stderr: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "keep", "to"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name}", value, "at least 1")
            if name != "to" and value is not None and not self.is_live:
                problem = f"--{name} is of a live run, HOST:PORT, and {self.source} is a directory"
                raise ValueError(f"{problem}: leave it out")

    @property
    def is_live(self) -> bool:
        return ":" in self.source and not Path(self.source).is_dir()


def follow_run(request: Following) -> Table:
    """Follows until the run ends, or step `to`; returns step, fingerprint and last checkpoint.

    Raises `ValueError` for a run that cannot be followed, and `LostFeed` if it ends before `to`.
    """
    if not request.is_live:
        return _replay_run(request)
    if request.out is None:
        raise ValueError(
            f"--out is missing: give a run directory for the checkpoints of {request.source}"
        )
    directory.check_free(request.out, resume=True, may_start=True)
    trained = request.out / directory.METRICS
    if trained.exists() and trained.stat().st_size:
        raise ValueError(f"{request.out} holds a run that has trained: choose another --out")
    about = _about(request.source)
    if not isinstance(about.get("config"), dict):
        raise ValueError(
            f"{request.source} is no feed of detonation train: follow it with detonation.follow"
        )
    config = from_table(about["config"])
    require_trust(request.trust_code, config, "the run", "follow", "model", "scheme")
    found: Sequence[Table] = run_local(_follow_on_rank, 1, [request, request.out, config])
    return found[0]


def _about(address: str) -> Table:
    """The description of the run that `address` publishes; raises `RunError` if it does not
    answer.
    """
    token = read_token()
    try:
        return read_about(address, token)
    except Refused as error:
        remedy = (
            "give this command the token of the run, and the version of detonation that the run has"
        )
        raise RunError(f"cannot follow {address}: {error}; {remedy}") from error
    except OSError as error:
        remedy = (
            "check the address, that train --publish runs there, and that no firewall is between"
        )
        raise RunError(f"cannot follow {address}: {error.strerror or error}; {remedy}") from error


def _follow_on_rank(request: Following, out: Path, config: Config) -> Table:
    model = build_model(config.model.name, config.model.arguments).to(local_device())
    every = request.every or 100
    screen = Screen(False, request.to_stderr)
    saved = -1
    joins = 1
    path = Path()
    with contextlib.closing(directory.RunDirectory(out)), follow(model, request.source) as follower:
        directory.write_text(out / directory.CONFIG, tomli_w.dumps(to_table(config)))
        directory.write_text(out / directory.METRICS, "")
        screen.line(f"follows {request.source} from step {follower.step} on")

        def save() -> Path:
            optimizer = follower.join(LoopbackCommunicator())
            return _saved(out, model, optimizer, config, request.keep or 3)

        while not follower.ended and follower.step != request.to:
            follower.update(request.to, wait_s=1.0)
            if follower.joins > joins:
                joins = follower.joins
                screen.line(f"connected again, at step {follower.step}: {follower.trouble}")
            if follower.step // every != saved // every:
                path = save()
                saved = follower.step
                screen.line(f"step {saved}, fingerprint {follower.fingerprint[:16]}: {path}")
        if follower.step != saved:
            path = save()
        return {"step": follower.step, "fingerprint": follower.fingerprint, "checkpoint": str(path)}


def _saved(out: Path, model: nn.Module, optimizer: Any, config: Config, keep: int = 3) -> Path:
    """Saves a checkpoint of one replica with empty memories."""
    ((_, scheme),) = optimizer.levels
    extra = {"config": to_table(config), "setting": dict(scheme.arguments), "followed": None}
    return save_checkpoint(out / directory.CHECKPOINTS, model, optimizer, as_json(extra), keep)


def _replay_run(request: Following) -> Table:
    """Replays a log in one process per shard; returns step, fingerprint and, with `out`, its path.

    It begins with the newest checkpoint before `to`, or with the initial weights. Raises
    `ValueError` for a run without a log, and `DamagedLog` if the log ends before `to`.
    """
    run = Path(request.source)
    out = request.out
    config = _config_of(run)
    require_trust(
        request.trust_code, config, "the run", "follow", "model", "data", "optimizer", "scheme"
    )
    if not (run / directory.UPDATES).is_dir():
        raise ValueError(f"{run} has no log of updates: train with --log")
    if out is not None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another --out")
    arguments = [str(run), request.to, out and str(out)]
    found: Sequence[Table] = run_local(replay_on_rank, config.mesh.shards, arguments)
    if out is not None and (run / directory.METRICS).exists():
        records = metrics.read_metrics(run / directory.METRICS)
        kept = [record.line() for record in records if record.step <= found[0]["step"]]
        directory.write_text(out / directory.METRICS, "".join(kept))  # for --resume
    return found[0]


def replay_on_rank(run: str, to: int | None, out: str | None) -> Table:
    """Replays one shard of the run in the directory `run`, and saves it in `out`. Collective."""
    config = check_config(_config_of(Path(run)))
    axis = LoopbackCommunicator(config.mesh.replicas)
    session = start_session(_alone(config), local_device(), axis)
    found, _ = resume(session, Path(run) / directory.CHECKPOINTS, may_start=True, most=to)
    if found is None and config.train.init_from:
        load_weights(Path(config.train.init_from), session.model)
    begun = session.optimizer.step_count
    steps = replay(Path(run) / directory.UPDATES, session.optimizer, to)
    fingerprint, _ = session.world.fingerprint(session.model)
    saved = {}
    if out is not None:
        saved = {"checkpoint": str(_agreed(session, Path(out)))}
    return {"step": steps, "replayed": steps - begun, "fingerprint": fingerprint, **saved}


def _config_of(run: Path) -> Config:
    try:
        return from_table(tomllib.loads(read_text(run / directory.CONFIG)))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{run} holds no run: {directory.CONFIG}: {error}; give the --out of one that trained"
            " with --log"
        ) from error


def _alone(config: Config) -> Config:
    """`config` with one replica, without comparisons between replicas."""
    levels = tuple(replace(level, replicas=1) for level in config.levels)
    train = replace(config.train, verify_every=0, on_desync="stop", log_updates=False)
    mesh = replace(config.mesh, replicas=1, link="", elastic=False, min_replicas=1, meet="")
    return replace(config, levels=levels, mesh=mesh, train=train)


def _agreed(session: Session, out: Path) -> Path:
    """Saves the agreed state of all replicas as a checkpoint of one replica, with empty
    memories.
    """
    replayed = session.optimizer
    axes = [LoopbackCommunicator()]
    optimizer = replicated_run(session.config, session.base, session.model, axes)
    for mine, agreed in zip(optimizer.set_up(), replayed.build(), strict=True):
        mine.repair(agreed.replicated())
    optimizer.resume_at(replayed.step_count)
    return _saved(out, session.model, optimizer, session.config)
