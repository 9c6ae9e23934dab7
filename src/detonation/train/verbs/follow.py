"""`detonation follow`: the weights of a run that trains elsewhere, as checkpoints of a run here."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from detonation.checkpoint.save.async_save import save_checkpoint
from detonation.cluster.init import local_device
from detonation.cluster.launch import run_local
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.processes.failure import RunError
from detonation.feed.connection.token import Refused, read_token
from detonation.feed.follower import Follower, follow
from detonation.feed.stream import read_about
from detonation.models import build_model
from detonation.train.output import directory
from detonation.train.output.screen import Screen
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import from_table, to_table
from detonation.train.verbs.named_code import require_trust


@dataclass(frozen=True)
class Following:
    """A run to follow; the fields are named like the flags of `detonation follow`.

    Args:
        source: The address of its feed.
        out: A run directory, new or of an earlier call.
        every: Steps between checkpoints.
        keep: Checkpoints that stay, the newest.
        to: The step at which to stop; None for the end of the run.
        trust_code: Run code that the run's configuration names as "package.module:function".

    Raises:
        ValueError: A number is out of range.
    """

    source: str
    out: Path
    every: int = 100
    keep: int = 3
    to: int | None = None
    trust_code: bool = False
    to_stderr: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "keep", "to"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name}", value, "at least 1")


def follow_run(request: Following) -> Table:
    """Follows until the run ends, or step `to`; returns step, fingerprint and the path of the last checkpoint.

    Raises `ValueError` for a run that cannot be followed, and `LostFeed` where it ends before `to`.
    """
    directory.check_free(request.out, resume=True, may_start=True)
    trained = request.out / directory.METRICS
    if trained.exists() and trained.stat().st_size:
        raise ValueError(f"{request.out} holds a run that has trained: choose another --out")
    about = _about(request.source)
    if not isinstance(about.get("config"), dict):
        raise ValueError(f"{request.source} feeds no run of detonation train: follow it with detonation.follow")
    config = from_table(about["config"])
    require_trust(request.trust_code, config, "the run", "follow", "model", "scheme")
    found: Sequence[Table] = run_local(_follow_on_rank, 1, [request, config])
    return found[0]


def _about(address: str) -> Table:
    """The description that the feed at `address` has for followers; raises `RunError` where none answers."""
    token = read_token()
    try:
        return read_about(address, token)
    except Refused as error:
        remedy = "give this command the token of the run, and the version of detonation that the run has"
        raise RunError(f"cannot follow {address}: {error}; {remedy}") from error
    except OSError as error:
        remedy = "check the address, that train --publish runs there, and that no firewall is between"
        raise RunError(f"cannot follow {address}: {error.strerror or error}; {remedy}") from error


def _follow_on_rank(request: Following, config: Config) -> Table:
    model = build_model(config.model.name, config.model.arguments).to(local_device())
    screen, saved, joins, path = Screen(False, request.to_stderr), -1, 1, Path()
    with contextlib.closing(directory.RunDirectory(request.out)), follow(model, request.source) as follower:
        directory.write_text(request.out / directory.CONFIG, tomli_w.dumps(to_table(config)))
        directory.write_text(request.out / directory.METRICS, "")
        screen.line(f"follows {request.source} from step {follower.step} on")
        while not follower.ended and follower.step != request.to:
            follower.update(request.to, wait_s=1.0)
            if follower.joins > joins:
                joins = follower.joins
                screen.line(f"came again, at step {follower.step}: {follower.trouble}")
            if follower.step // request.every != saved // request.every:
                path, saved = _saved(follower, request, config), follower.step
                screen.line(f"step {saved}, fingerprint {follower.fingerprint[:16]}: {path}")
        if follower.step != saved:
            path = _saved(follower, request, config)
        return {"step": follower.step, "fingerprint": follower.fingerprint, "checkpoint": str(path)}


def _saved(follower: Follower, request: Following, config: Config) -> Path:
    """A checkpoint of one replica, whose memory is empty."""
    optimizer = follower.join(LoopbackCommunicator())
    ((_, scheme),) = optimizer.levels
    extra = {"config": to_table(config), "setting": dict(scheme.arguments), "followed": None}
    return save_checkpoint(request.out / directory.CHECKPOINTS, follower.model, optimizer, extra, request.keep)
