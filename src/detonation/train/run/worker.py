"""The work of each rank, from its session to the summary; rank 0 also keeps the run directory."""

import contextlib
import dataclasses
import platform
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from detonation.checkpoint.async_save import Checkpoints
from detonation.checkpoint.files.retention import saved_checkpoints
from detonation.checkpoint.gather import Volumes, survey
from detonation.checkpoint.newest import Loaded
from detonation.checkpoint.verify import load_weights
from detonation.cluster.init import (
    GROUP_TIMEOUT_S,
    interface_line,
    local_device,
    set_group_timeouts,
    set_timeouts,
)
from detonation.cluster.mesh import init_mesh
from detonation.cluster.network.measure import Everyone
from detonation.cluster.processes.signals import Stop, stoppable
from detonation.cluster.survive.agreement import ReplicaLeft
from detonation.cluster.survive.elastic_axis import meet_replicas
from detonation.core.link.elastic_communicator import PeerLost
from detonation.core.schemes.traffic import message_bytes
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import spelled
from detonation.train.loop.checkpoints import resume, save_async, save_now
from detonation.train.loop.fit import NonFiniteLoss, Stopped, fit
from detonation.train.loop.session import Session, start_session, surviving_axis
from detonation.train.loop.summary import saved_counts, summarise
from detonation.train.output import directory, metrics
from detonation.train.output.directory import environment
from detonation.train.output.screen import Screen
from detonation.train.recipe.resolve import Request
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import to_table
from detonation.train.run.adapt import Adapter, Followed
from detonation.train.run.decide import Asked, Chosen, again, decide
from detonation.train.run.elastic_run import Losses, SetUp, joined_session
from detonation.train.run.log_check import checked_log
from detonation.train.run.recorder import Recorder, Recording, replay_rest
from detonation.whole_files import MOST_RECORDS, read_text


@dataclasses.dataclass(frozen=True)
class RunTask:
    """A run that is read and checked; forked ranks get it in memory.

    Args:
        request: The user's words, for the run directory and the screen; its None means a new
            directory in `runs`.
        config: The configuration; with `asked`, that of another scheme in the place of the choice.
        asked: How to choose the scheme, where that is still to be done.
        resume: Continue the run in the directory: asked for, or because the launcher has started it
            again.
        may_start: `resume` starts from the beginning where no checkpoint was saved yet.
    """

    request: Request
    config: Config
    asked: Asked | None = None
    resume: bool = False
    may_start: bool = False


def train_on_rank(task: RunTask) -> Table:
    """Runs `task` on this rank; returns the summary and, as `directory`, the path of the run.

    A run that `stop_after` or a signal ended has no summary: it returns `stopped_after`,
    `stopped_by` (the signal's name) and `directory` alone; and `left`, where the others train on.
    """
    set_up = SetUp(task.config.mesh.meet, task.request.replica)
    with stoppable() as stop, set_up.watched():
        mesh, device, axis, inside = task.config.mesh, local_device(), None, list[DeviceMesh]()
        if task.request.join:
            where, out = task.request.join, task.request.out or Path()
            with stop.at_once():  # the others may never answer
                session = joined_session(task.config, task.asked, device, where, out)
            _say_interfaces(task, session.world.listening)
            return _train_with_others(task, session, stop, set_up)
        if task.request.replica is not None:
            with stop.at_once():
                meet_replicas(mesh.meet, task.request.replica, task.config.levels[-1].replicas)
        if mesh.elastic:
            replica = init_mesh(task.config.nodes_inside, mesh.shards, device.type)
            axis, inside = (
                surviving_axis(task.config, replica),
                [replica["shard"], replica["replicate"]],
            )
            set_up.met(axis)
        _say_interfaces(task, axis.listening if axis is not None else "")
        everyone = Everyone(device, axis, inside)
        saved, log = _earlier(task, everyone)
        config, chosen = task.config, None
        if task.asked is not None:  # a run that begins anew measures what its adapter begins with
            before = (
                again(task.asked, task.request.out or Path(), everyone)
                if saved or 0 in log
                else None
            )
            chosen = decide(task.asked, everyone, axis) if before is None else None
            config = chosen.config if chosen else before or config
        session = start_session(config, device, axis)
        losses, begin = Losses(session, set_up), ""
        if (
            config.train.init_from and not saved
        ):  # before the replicas take the weights as their anchor
            begin = load_weights(Path(config.train.init_from), session.model)
        # Replicas compare their schemes, and sizes are checked, before anything is written.
        session.optimizer.set_up()
        set_group_timeouts(GROUP_TIMEOUT_S)  # a node may read its checkpoint from a slow disk
        result = None
        while result is None:
            try:
                result = _train_in_directory(session, task, chosen, begin, log, stop, losses)
            except (
                PeerLost
            ):  # before the first step: those that are left read directory and checkpoint again
                session.optimizer.synchronize()
        losses.close("left" in result)
        return result


def _say_interfaces(task: RunTask, listening: str) -> None:
    """Prints where ranks listen for others on other machines: in this world, and along its axis."""
    screen = Screen(dist.get_rank() != 0, task.request.to_stderr)
    for line in filter(None, (interface_line(), listening)):
        screen.line(line)


def _train_in_directory(
    session: Session,
    task: RunTask,
    chosen: Chosen | None,
    begin: str,
    log: list[int],
    stop: Stop,
    losses: Losses,
) -> Table:
    """Goes on from what the run directory has, and trains; returns the summary as `train_on_rank`
    does."""
    screen = Screen(session.rank != 0, task.request.to_stderr)
    with _run_directory(session, task) as (path, volumes), screen:
        for line in filter(None, (chosen.line if chosen is not None else "", begin)):
            screen.line(line)
        if not volumes.shared:
            screen.line(
                "no shared file system: each node keeps the checkpoints of its own ranks in its"
                f" own {path} ({volumes.ranks_text()}); metrics, summary and report are on the node"
                " of rank 0"
            )
        loaded, resumed = None, list[str]()
        if task.resume:
            loaded, resumed = resume(
                session, path / directory.CHECKPOINTS, task.may_start or 0 in log
            )
        _expect(session)
        resumed += replay_rest(session, path, log, task.may_start)
        before = saved_counts(loaded.extra if loaded else {})
        adapter, more = _adapter(session, task, chosen, loaded)
        done, steps = session.optimizer.step_count, session.config.train.steps
        if done > steps:
            raise ValueError(
                f"train.steps is {steps}, but {done} steps have been taken: give more --steps"
            )
        named = session.config.train.publish or session.config.mesh.elastic
        # one replica of an elastic run may publish, and all must take part in the broadcast
        run = session.world.texts().broadcast(secrets.token_hex(8)) if named else ""
        kept, damage = _kept(session, path / directory.METRICS, done, volumes)
        if task.resume and session.config.train.log_updates and session.rank == 0:
            damage += checked_log(path, loaded.step if loaded else 0)[1]
        if volumes.leads(session.rank):  # only now: what is refused leaves the directory as it was
            plan = chosen.plan if chosen is not None and session.rank == 0 else None
            directory.begin_run(path, to_table(session.config), environment(), plan)
        with contextlib.closing(Recorder(session, path, screen, done, before, kept)) as recorder:
            recorder.show([*resumed, *more])
            recorder.warn(damage)
            return _train(
                session, path, recorder, run, done, task.request.stop_after, stop, adapter, losses
            )


def _train_with_others(task: RunTask, session: Session, stop: Stop, set_up: SetUp) -> Table:
    """Trains from where the others are, whose run directory is theirs; returns the summary as
    `train_on_rank` does."""
    done, path = session.optimizer.step_count, task.request.out or Path()
    losses = Losses(session, set_up)
    _expect(session)
    screen = Screen(session.optimizer.coordinates.shard != 0, task.request.to_stderr)
    with screen, contextlib.closing(Recorder(session, path, screen, done)) as recorder:
        place = session.optimizer.coordinates
        recorder.show(
            [f"came in after step {done}, as replica {place.replica} of {place.replicas}"]
        )
        result = _train(
            session, path, recorder, "", done, task.request.stop_after, stop, None, losses
        )
    losses.close("left" in result)
    return result


def _earlier(task: RunTask, everyone: Everyone) -> tuple[bool, list[int]]:
    """True where any rank sees a checkpoint of a run that goes on, and the steps after which logs
    begin. Collective."""
    if not task.resume or (out := task.request.out) is None:
        return False, []
    starts = directory.log_starts(out) if task.config.train.log_updates else []
    found = everyone.send_to_all([bool(saved_checkpoints(out / directory.CHECKPOINTS)), starts])
    return any(saved for saved, _ in found), found[0][1]


def _adapter(
    session: Session, task: RunTask, chosen: Chosen | None, loaded: Loaded | None
) -> tuple[Adapter | None, list[str]]:
    """The adapter of a run that follows its link, from the choice or from a checkpoint, and the
    lines to show."""
    if task.asked is None or not task.asked.auto.adapt:
        return None, []
    if session.device.type != "cpu":
        return None, [
            "adapt: on accelerators the host does not see how long an exchange takes; the setting"
            " stays"
        ]
    if chosen is not None:
        return Adapter(session, chosen.followed), []
    saved = loaded.extra.get("followed") if loaded else None
    if saved is None:
        return None, ["adapt: this run began without it, and keeps its setting"]
    return (
        Adapter(
            session, Followed.of(saved, session.config.mesh.replicas, session.config.mesh.shards)
        ),
        [],
    )


def _expect(session: Session) -> None:
    """Sets the time limits for other ranks, by the largest message at the lowest rate."""
    config, (_, scheme) = session.config, session.optimizer.levels[0]
    layouts = [replicator.channel.layout for replicator in session.optimizer.build()]
    largest = max(
        (message_bytes(scheme, layout, config.mesh.replicas) for layout in layouts), default=0
    )
    rate = config.peers.lowest_bits_per_s
    if config.mesh.link:
        rate = min(rate, LinkSpeed.parse(config.mesh.link).rate_bits_per_s)
    set_timeouts(largest, config.mesh.shards, config.peers.silence_s, rate)


def _train(
    session: Session,
    path: Path,
    recorder: Recorder,
    run: str,
    done: int,
    stop_after: int | None,
    stop: Stop,
    adapter: Adapter | None,
    losses: Losses,
) -> Table:
    """Trains to the end, or to `stop_after`, with checkpoints, and feeds named `run`; returns as
    `train_on_rank`."""
    recording, steps = Recording(session, path, run), session.config.train.steps
    until = max(done, min(steps, stop_after or steps))
    kept = path / directory.CHECKPOINTS
    checkpoints = Checkpoints(kept, session.model, session.optimizer, session.config.train.keep)

    def followed() -> Table | None:
        return None if adapter is None else adapter.followed.table()

    def after_step(record: metrics.Record) -> None:
        adapted = [] if adapter is None else adapter.after(record)
        if adapted:
            _expect(session)
            record = dataclasses.replace(record, setting=spelled(session.optimizer.levels[-1][1]))
        recorder.warn(losses.news(path, recorder))
        recorder.add(record)
        recorder.warn(recording.after_step())
        recorder.show(adapted)
        recorder.warn(checkpoints.news())
        every = session.config.train.checkpoint_every
        if every and record.step % every == 0 and record.step < until:
            save_async(session, checkpoints, recorder.before, followed())
            recording.saved(record.step)

    losses.set_up.done()
    try:
        try:
            fit(session, done, until, after_step, stop)
        finally:
            recording.log.close()
        recording.close(ended=until == steps)
    except NonFiniteLoss as error:
        saved = save_now(session, checkpoints, recorder.before, followed())
        raise NonFiniteLoss(f"{error}; the state without it is saved in {saved}") from error
    except ReplicaLeft:  # the others save, and train on
        after = session.optimizer.step_count
        return {
            "stopped_after": after,
            "stopped_by": "SIGTERM",
            "left": True,
            "directory": str(path),
        }
    except Stopped as stopped:
        save_now(session, checkpoints, recorder.before, followed())
        return {
            "stopped_after": stopped.after,
            "stopped_by": stopped.signal,
            "directory": str(path),
        }
    save_now(session, checkpoints, recorder.before, followed())
    recorder.warn(checkpoints.news())
    if until < steps:
        return {"stopped_after": until, "stopped_by": "--stop-after", "directory": str(path)}
    recorder.warn(losses.news(path, recorder))
    summary = summarise(session, recorder.records, recorder.before) | losses.table()
    if session.rank == 0:
        directory.write_json(path / directory.SUMMARY, summary)
    return {**summary, "directory": str(path)}


def _kept(
    session: Session, file: Path, done: int, volumes: Volumes
) -> tuple[list[metrics.Record], list[str]]:
    """The records of the first `done` steps, on all ranks, and a warning where some are damaged or
    lost. Collective.

    Raises `ValueError` where no step is left, neither to take nor to sum up.
    """
    if not done:
        return [], []
    reads = (volumes.shared or session.rank == 0) and file.exists()
    text = read_text(file, errors="replace", most=MOST_RECORDS) if reads else ""
    if volumes.shared:
        session.world.texts().gather("")  # all have read before rank 0 writes
    else:
        text = session.world.texts().broadcast(text)
    found, damaged = metrics.parse_metrics(text)
    kept = [record for record in found if record.step <= done]
    said = [f"damaged lines in {file}, which are dropped: {damaged}"] if damaged else []
    if not kept and done == session.config.train.steps:
        raise ValueError(f"all {done} steps have been taken, but {file} has none of them to sum up")
    if kept and done == session.config.train.steps and kept[-1].val_loss is None:
        raise ValueError(
            f"the run stopped after {done} steps in the middle of more: give more --steps"
        )
    if not kept:
        said += [
            f"{file} has none of the {done} steps before: the summary will be of those that follow"
        ]
    return kept, said


@contextlib.contextmanager
def _run_directory(session: Session, task: RunTask) -> Iterator[tuple[Path, Volumes]]:
    """The run's directory on this node, and who shares it.

    Nodes without a shared file system have one each, under one name or their own --out; its leader
    makes and locks it.
    """
    texts, path = session.world.texts(), task.request.out or Path()
    with contextlib.ExitStack() as held:
        if session.rank == 0:
            path = task.request.out or directory.fresh_directory(
                f"{task.request.recipe.stem}-{session.config.schemes}"
            )
            directory.check_free(path, task.resume, task.may_start, session.config.train)
            held.enter_context(contextlib.closing(directory.RunDirectory(path)))
        path = Path(texts.broadcast(str(path))) if task.request.out is None else path
        try:
            volumes = survey(path, texts)
        except OSError as error:
            if isinstance(error, PeerLost):
                raise
            raise directory.Unwritable(
                f"cannot write into the run directory: {error.strerror}"
            ) from error
        leads, problem = volumes.leads(session.rank), ""
        if leads and session.rank:
            try:
                directory.check_free(
                    path, task.resume, may_start=True
                )  # its checkpoints may be elsewhere
                held.enter_context(contextlib.closing(directory.RunDirectory(path)))
            except ValueError as error:
                problem = f"{error} (on {platform.node()})"
        if not volumes.shared and (first := next(filter(None, texts.gather(problem)), "")):
            raise ValueError(first)
        yield path, volumes
