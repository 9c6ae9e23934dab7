"""The run directory on each node, and what a run reads there from its earlier starts: records,
state and logged steps.
"""

import contextlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path

from detonation.checkpoint.files.retention import saved_checkpoints, step_of
from detonation.checkpoint.gather import Volumes, survey
from detonation.checkpoint.newest import Loaded
from detonation.cluster.init import set_timeouts
from detonation.cluster.network.measure import Everyone
from detonation.core.link import PeerLost, TextExchange
from detonation.core.schemes import message_bytes
from detonation.link_speed import LinkSpeed
from detonation.log.repeat import replay_together
from detonation.train.loop.checkpoints import compare_settings, resume
from detonation.train.loop.session import Session
from detonation.train.output import directory, metrics
from detonation.train.recipe.resolve import Request
from detonation.train.run.joining import RunTask
from detonation.whole_files import MOST_RECORDS, read_text


@contextlib.contextmanager
def run_directory(
    session: Session, request: Request, resume: bool, may_start: bool
) -> Iterator[tuple[Path, Volumes]]:
    """Locks the run directory on this node. Yields the path of the directory, and the ranks that
    share it.

    Without a shared file system each node has its own directory. These directories have the same
    name, unless nodes have different --out. One rank of each node creates and locks this directory.
    """
    texts = session.world.texts()
    path = request.out or Path()
    with contextlib.ExitStack() as held:
        if session.rank == 0:
            name = f"{request.recipe.stem}-{session.config.schemes}"
            path = request.out or directory.fresh_directory(name)
            directory.check_free(path, resume, may_start, session.config.train)
            held.enter_context(contextlib.closing(directory.RunDirectory(path)))
        if request.out is None:
            path = Path(texts.broadcast(str(path)))
        volumes = _surveyed(path, texts)
        problem = ""
        if session.rank and volumes.leads(session.rank):
            problem = _hold_on_node(held, path, resume)
        if not volumes.shared:
            first = next(filter(None, texts.gather(problem)), "")
            if first:
                raise ValueError(first)
        yield path, volumes


def _surveyed(path: Path, texts: TextExchange) -> Volumes:
    """Finds the ranks that share the run directory. Collective.

    Raises `Unwritable` if a rank cannot write into the directory.
    """
    try:
        return survey(path, texts)
    except PeerLost:
        raise
    except OSError as error:
        raise directory.Unwritable(
            f"cannot write into the run directory: {error.strerror}"
        ) from error


def _hold_on_node(held: contextlib.ExitStack, path: Path, resume: bool) -> str:
    """Creates and locks the run directory on a node without rank 0. Returns an error message, or ""
    if there is no error.
    """
    try:
        # `may_start` is True, because the checkpoints may be on another node
        directory.check_free(path, resume, may_start=True)
        held.enter_context(contextlib.closing(directory.RunDirectory(path)))
    except ValueError as error:
        return f"{error} (on {platform.node()})"
    return ""


def require_earlier(path: Path, done: int) -> None:
    """Raises `ValueError` if `path` has a checkpoint of a step after `done`, the step at which this
    replica has joined. Such a checkpoint belongs to another run, which `--resume` would then
    continue.
    """
    later = [one for one in saved_checkpoints(path / directory.CHECKPOINTS) if step_of(one) > done]
    if later:
        raise ValueError(
            f"{path} holds {later[0].name}, and the run is at step {done}: this checkpoint"
            " belongs to another run; choose another --out"
        )


def kept_records(
    session: Session, file: Path, done: int, volumes: Volumes
) -> tuple[list[metrics.Record], list[str]]:
    """Returns the records of the first `done` steps on all ranks, and warnings about lost records.
    Collective.

    Raises `ValueError` if no step is left to train and the records are too few for a summary.
    """
    if not done:
        return [], []
    reads = (volumes.shared or session.rank == 0) and file.exists()
    text = ""
    if reads:
        text = read_text(file, errors="replace", most=MOST_RECORDS)
    if volumes.shared:
        # wait for all ranks, because rank 0 may write `file` only after all ranks have read it
        session.world.texts().gather("")
    else:
        text = session.world.texts().broadcast(text)
    found, damaged = metrics.parse_metrics(text)
    kept = [record for record in found if record.step <= done]
    said = []
    if damaged:
        said = [f"damaged lines in {file}, which are dropped: {damaged}"]
    if done == session.config.train.steps:
        _require_end(session, file, kept)
    if not kept:
        said += [
            f"{file} has no record of the first {done} steps: the summary covers only later steps"
        ]
    return kept, said


def _require_end(session: Session, file: Path, kept: list[metrics.Record]) -> None:
    """Raises `ValueError` unless the trained steps are a complete run: the last step was recorded
    and validated, and no round is open.
    """
    optimizer = session.optimizer
    done = optimizer.step_count
    if not kept or kept[-1].step != done:
        raise ValueError(
            f"all {done} steps are trained, but {file} has no record of step {done}: give more"
            " --steps, or choose another --out"
        )
    is_open = any(scheme.round.stays_open for _, scheme in optimizer.levels)
    if kept[-1].val_loss is None or (is_open and optimizer.run.completed == 0):
        why = "within a round" if is_open else "without a validation"
        raise ValueError(
            f"all {done} steps are trained, but the run stopped at step {done} {why}: give more"
            " --steps"
        )


def earlier_state(task: RunTask, everyone: Everyone) -> tuple[bool, list[int]]:
    """Returns True if the run resumes and any rank sees a checkpoint. Also returns, for each file
    of the update log on rank 0, the number of steps that training had finished when the file was
    begun.

    Collective.
    """
    out = task.request.out
    if not task.resume or out is None:
        return False, []
    starts = []
    if task.config.train.log_updates:
        starts = directory.log_starts(out)
    found = everyone.send_to_all([bool(saved_checkpoints(out / directory.CHECKPOINTS)), starts])
    return any(saved for saved, _ in found), found[0][1]


def replay_rest(session: Session, path: Path, log: list[int], may_start: bool) -> list[str]:
    """Repeats the logged steps that follow the loaded checkpoint, or the start of the run. Returns
    the lines to print.

    Collective. The last step of the run is never repeated from the log: training computes this
    step, so that the run ends in the usual way.

    Args:
        log: For each log file, the number of finished steps when the file was begun.
        may_start: Start from the beginning if the log does not belong to this run.

    Raises:
        ValueError: The log belongs to another run, no checkpoint exists, and `may_start` is False.
    """
    step = session.optimizer.step_count
    if step not in log:
        return []
    lines = []
    if not step:
        config = directory.config_in(path)
        was = json.loads(session.world.texts().broadcast(json.dumps(config)))
        if was:
            lines = compare_settings(path / directory.CONFIG, was, session.config, "start")
    most = max(step, session.config.train.steps - 1)
    reached, why = replay_together(path / directory.UPDATES, session.optimizer, most)
    if why and not reached and not may_start:
        raise ValueError(
            f"cannot continue from the log: {why}; resume with the settings of the first start, or"
            " choose another --out"
        )
    if reached == step:
        return []
    line = (
        f"{reached - step} steps of the log follow: training goes on after step {reached}, with"
        " no unsent momentum"
    )
    return [*lines, line]


def resumed_state(
    session: Session, task: RunTask, path: Path, log: list[int]
) -> tuple[Loaded | None, list[str]]:
    """Loads the newest checkpoint if the run resumes, and repeats the logged steps that follow it.

    Returns the checkpoint, if there is one, and the lines to print. Collective.
    """
    loaded = None
    lines: list[str] = []
    if task.resume:
        may_start = task.may_start or 0 in log
        loaded, lines = resume(session, path / directory.CHECKPOINTS, may_start)
    set_message_timeouts(session)
    lines += replay_rest(session, path, log, task.may_start)
    return loaded, lines


def set_message_timeouts(session: Session) -> None:
    """Sets the timeouts of this rank. The timeouts are long enough for the rank's largest message
    at the rate `peers.lowest_bits_per_s` or, if an emulated link is slower, at the rate of that
    link.
    """
    config = session.config
    _, scheme = session.optimizer.levels[0]
    layouts = [replicator.channel.layout for replicator in session.optimizer.build()]
    sizes = [message_bytes(scheme, layout, config.mesh.replicas) for layout in layouts]
    largest = max(sizes, default=0)
    rate = config.peers.lowest_bits_per_s
    if config.mesh.link:
        rate = min(rate, LinkSpeed.parse(config.mesh.link).rate_bits_per_s)
    set_timeouts(largest, config.mesh.shards, config.peers.silence_s, rate)
