"""`detonation follow`: repeats the steps of a run from its updates, which come from a live feed or
from an update log.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from detonation.cluster.init import local_device
from detonation.cluster.launch import run_local
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.processes.failure import RunError
from detonation.cluster.processes.waiting import Awaited
from detonation.feed.follower import Follower, follow
from detonation.feed.stream import read_about
from detonation.feed.token import LostFeed, Refused, read_token
from detonation.models import build_model
from detonation.train.output import directory
from detonation.train.output.screen import Screen
from detonation.train.recipe.resolve import from_plain, require_trust, to_plain
from detonation.train.recipe.schema import Table, require
from detonation.train.recipe.tables import from_table, to_table
from detonation.train.verbs.replay_run import replay_run, saved_run

START_S = 300.0
"""Seconds to wait for a trainer that does not listen yet. Replicas that meet wait equally long."""
_RETRY_S = 0.2


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
                raise ValueError(
                    f"--{name} needs a live run, HOST:PORT, but {self.source} is a directory:"
                    f" leave --{name} out"
                )

    @property
    def is_live(self) -> bool:
        return ":" in self.source and not Path(self.source).is_dir()


def follow_run(request: Following) -> Table:
    """Follows a run until it ends, or until step `to`. Returns the step, the fingerprint and the
    last checkpoint.

    Raises `ValueError` for a run that cannot be followed, and `LostFeed` if the feed is lost before
    step `to`.
    """
    if not request.is_live:
        if not (Path(request.source) / directory.CONFIG).exists():
            raise ValueError(
                f"{request.source} holds no run: No such file or directory; give the --out of a"
                " run that trained with --log, or the HOST:PORT of a run that publishes"
            )
        return replay_run(Path(request.source), request.out, request.to, request.trust_code)
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
    arguments = [to_plain(request), to_table(config), about.get("exported", {})]
    found: Sequence[Table] = run_local(_follow_on_rank, 1, arguments)
    return found[0]


def _about(address: str) -> Table:
    """Returns the description of the run that `address` publishes. Raises `RunError` if the run
    refuses this process, or does not answer within `START_S` seconds.
    """
    token = read_token()
    try:
        return _awaited_about(address, token)
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


def _awaited_about(address: str, token: bytes) -> Table:
    """Waits until a trainer listens at `address`, and returns the description of the trainer's run.

    Raises the last `OSError` after `START_S` seconds, but at once if the feed refuses this process
    or if the host is unknown.
    """
    awaited = Awaited("this follower", START_S)
    while True:
        try:
            return read_about(address, token)
        except (Refused, socket.gaierror):
            raise
        except OSError as error:
            _wait_after(error, awaited, address)


def _wait_after(error: OSError, awaited: Awaited, address: str) -> None:
    """Waits before the next attempt to reach `address`. Raises `error` if no time is left for
    attempts.
    """
    try:
        awaited.wait(lambda: f"{address}: {error.strerror or error}", _RETRY_S)
    except TimeoutError:
        raise error from None


class _Connection:
    """Prints each loss of the connection to a feed, and each new connection."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._is_current = True
        self._joins = 1

    def tell(self, follower: Follower) -> None:
        if self._is_current and not follower.current:
            lost = f"waits for the feed after step {follower.step}: {follower.trouble}"
            self._screen.line(lost)
        self._is_current = follower.current
        if follower.joins > self._joins:
            self._joins = follower.joins
            again = f"connected again, at step {follower.step}: {follower.trouble}"
            self._screen.line(again)


def _follow_on_rank(asked: Table, settings: Table, exported: Table) -> Table:
    """Follows a live run, in a process of its own. The arguments are plain values, because a rank
    with a GPU is a new process instead of a fork.
    """
    request = from_plain(Following, asked)
    config = from_table(settings)
    out = request.out
    assert out is not None
    model = build_model(config.model.name, config.model.arguments).to(local_device())
    every = request.every or 100
    screen = Screen(False, request.to_stderr)
    saved = -1
    connection = _Connection(screen)
    path = Path()
    with contextlib.closing(directory.RunDirectory(out)), follow(model, request.source) as follower:
        directory.write_text(out / directory.CONFIG, tomli_w.dumps(settings))
        directory.write_text(out / directory.METRICS, "")
        screen.line(f"follows {request.source} from step {follower.step} on")

        def save() -> Path:
            optimizer = follower.join(LoopbackCommunicator())
            return saved_run(out, model, optimizer, config, exported, request.keep or 3)

        while not follower.ended and follower.step != request.to:
            try:
                follower.update(request.to, wait_s=1.0)
            except LostFeed:
                if follower.step > saved:
                    save()
                raise
            connection.tell(follower)
            if follower.step // every != saved // every:
                path = save()
                saved = follower.step
                screen.line(f"step {saved}, fingerprint {follower.fingerprint[:16]}: {path}")
        if follower.step != saved:
            path = save()
        return {"step": follower.step, "fingerprint": follower.fingerprint, "checkpoint": str(path)}
