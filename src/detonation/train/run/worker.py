"""The work of each rank, from its session to the summary. Rank 0 also writes the run directory."""

import contextlib
import dataclasses
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from detonation.checkpoint.files.retention import saved_checkpoints
from detonation.checkpoint.newest import Loaded
from detonation.checkpoint.verify import load_weights
from detonation.cluster.init import (
    GROUP_TIMEOUT_S,
    interface_line,
    local_device,
    set_group_timeouts,
)
from detonation.cluster.mesh import init_mesh
from detonation.cluster.network.measure import Everyone
from detonation.cluster.processes.signals import Stop, stoppable
from detonation.cluster.survive.elastic_axis import meet_replicas
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.link.elastic_communicator import PeerLost
from detonation.train.loop.checkpoints import resume
from detonation.train.loop.session import Session, start_session, surviving_axis
from detonation.train.loop.summary import Counts, saved_counts
from detonation.train.output import directory
from detonation.train.output.directory import environment
from detonation.train.output.screen import Screen
from detonation.train.recipe.resolve import Request
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import to_table
from detonation.train.run.decide import Asked, Chosen, again, decide
from detonation.train.run.elastic_run import Losses, SetUp, joined_session
from detonation.train.run.log_check import checked_log
from detonation.train.run.recorder import Recorder, replay_rest
from detonation.train.run.run_directory import kept_records, run_directory
from detonation.train.run.training import adapter_of, set_message_timeouts, train_until_end


@dataclasses.dataclass(frozen=True)
class RunTask:
    """A run whose input is read and checked. Forked ranks inherit it in memory.

    Args:
        request: Command of the user; without `out` the run creates a new directory in `runs`.
        config: Configuration; with `asked`, it holds another scheme until the choice is made.
        asked: Rules for choosing the scheme, if it is not chosen yet.
        resume: Continue the run in the directory, because the user asks for it or the launcher
            restarted the run.
        may_start: With `resume`: start from the beginning if no checkpoint exists.
    """

    request: Request
    config: Config
    asked: Asked | None = None
    resume: bool = False
    may_start: bool = False


def train_on_rank(task: RunTask) -> Table:
    """Runs `task` on this rank; returns the summary and, as `directory`, the path of the run.

    A run that `stop_after` or a signal ended has no summary: it returns only `stopped_after`,
    `stopped_by` (name of the signal), `directory`, and `left` if the other replicas continue.
    """
    set_up = SetUp(task.config.mesh.meet, task.request.replica)
    with stoppable() as stop, set_up.watched():
        device = local_device()
        if task.request.join:
            return _join(task, task.request.join, device, stop, set_up)
        if task.request.replica is not None:
            replicas = task.config.levels[-1].replicas
            with stop.at_once():
                meet_replicas(task.config.mesh.meet, task.request.replica, replicas)
        axis, inside = _elastic_axis(task.config, device)
        listening = ""
        if axis is not None:
            set_up.met(axis)
            listening = axis.listening
        _say_interfaces(task, listening)
        everyone = Everyone(device, axis, inside)
        saved, log = _earlier(task, everyone)
        config, chosen = _chosen_config(task, everyone, axis, begun=saved or 0 in log)
        session = start_session(config, device, axis)
        losses = Losses(session, set_up)
        begin = ""
        # load weights before `set_up`, which copies them as the anchor of a round
        if config.train.init_from and not saved:
            begin = load_weights(Path(config.train.init_from), session.model)
        # compare the replicas' schemes and check sizes before writing anything
        session.optimizer.set_up()
        set_group_timeouts(GROUP_TIMEOUT_S)  # a node may read its checkpoint from a slow disk
        result = None
        while result is None:
            try:
                result = _train_in_directory(session, task, chosen, begin, log, stop, losses)
            # a replica was lost before the first step: the others reread directory and checkpoint
            except PeerLost:
                session.optimizer.synchronize()
        losses.close("left" in result)
        return result


def _elastic_axis(
    config: Config, device: torch.device
) -> tuple[SurvivingCommunicator | None, list[DeviceMesh]]:
    """Axis between the replicas of an elastic run, and the axes inside a replica. Collective.

    Other runs get None and an empty list.
    """
    if not config.mesh.elastic:
        return None, []
    replica = init_mesh(config.nodes_inside, config.mesh.shards, device.type)
    axis = surviving_axis(config, replica)
    return axis, [replica["shard"], replica["replicate"]]


def _chosen_config(
    task: RunTask, everyone: Everyone, axis: SurvivingCommunicator | None, begun: bool
) -> tuple[Config, Chosen | None]:
    """The configuration of the run, and the choice of its scheme if it is made now. Collective.

    A run that has `begun` keeps the scheme stored in its directory.
    """
    if task.asked is None:
        return task.config, None
    if begun:
        before = again(task.asked, task.request.out or Path(), everyone)
        if before is not None:
            return before, None
    chosen = decide(task.asked, everyone, axis)
    return chosen.config, chosen


def _join(task: RunTask, address: str, device: torch.device, stop: Stop, set_up: SetUp) -> Table:
    """Joins the run at `address` and trains with it."""
    out = task.request.out or Path()
    with stop.at_once():  # a signal ends the wait for an answer
        session = joined_session(task.config, task.asked, device, address, out)
    _say_interfaces(task, session.world.listening)
    return _train_with_others(task, session, stop, set_up)


def _say_interfaces(task: RunTask, listening: str) -> None:
    """Prints the interfaces on which ranks listen for other machines."""
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
    """Restores the state in the run directory and trains; returns the result of `train_on_rank`."""
    screen = Screen(session.rank != 0, task.request.to_stderr)
    held = run_directory(session, task.request, task.resume, task.may_start)
    with held as (path, volumes), screen:
        if chosen is not None:
            screen.line(chosen.line)
        if begin:
            screen.line(begin)
        if not volumes.shared:
            screen.line(
                "no shared file system: each node keeps the checkpoints of its own ranks in its"
                f" own {path} ({volumes.ranks_text()}); metrics, summary and report are on the node"
                " of rank 0"
            )
        loaded, resumed = _resumed(session, task, path, log)
        before = Counts()
        saved_step = 0
        if loaded is not None:
            before = saved_counts(loaded.extra)
            saved_step = loaded.step
        adapter, more = adapter_of(session, task.asked, chosen, loaded)
        done = session.optimizer.step_count
        _require_steps(session.config.train.steps, done)
        run = _name_of_run(session)
        kept, damage = kept_records(session, path / directory.METRICS, done, volumes)
        if task.resume and session.config.train.log_updates and session.rank == 0:
            damage += checked_log(path, saved_step)[1]
        # this is the first write, so a refused run leaves the directory unchanged
        if volumes.leads(session.rank):
            plan = None
            if chosen is not None and session.rank == 0:
                plan = chosen.plan
            directory.begin_run(path, to_table(session.config), environment(), plan)
        with contextlib.closing(Recorder(session, path, screen, done, before, kept)) as recorder:
            recorder.show([*resumed, *more])
            recorder.warn(damage)
            return train_until_end(
                session, path, recorder, run, done, task.request.stop_after, stop, adapter, losses
            )


def _resumed(
    session: Session, task: RunTask, path: Path, log: list[int]
) -> tuple[Loaded | None, list[str]]:
    """Loads the newest checkpoint if the run resumes, and repeats the logged steps after it.

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


def _require_steps(steps: int, done: int) -> None:
    """Raises `ValueError` if the run has trained more than `train.steps` steps."""
    if done > steps:
        raise ValueError(
            f"train.steps is {steps}, but {done} steps have been taken: give more --steps"
        )


def _name_of_run(session: Session) -> str:
    """Random name for the feeds of this start, equal on all ranks; "" if no rank publishes.

    In an elastic run a single replica may publish, so all join the broadcast.
    """
    if session.config.train.publish or session.config.mesh.elastic:
        return session.world.texts().broadcast(secrets.token_hex(8))
    return ""


def _train_with_others(task: RunTask, session: Session, stop: Stop, set_up: SetUp) -> Table:
    """Trains after joining other replicas, which write the run directory.

    Returns the result of `train_on_rank`.
    """
    done = session.optimizer.step_count
    path = task.request.out or Path()
    losses = Losses(session, set_up)
    set_message_timeouts(session)
    screen = Screen(session.optimizer.coordinates.shard != 0, task.request.to_stderr)
    with screen, contextlib.closing(Recorder(session, path, screen, done)) as recorder:
        own = session.optimizer.coordinates
        recorder.show([f"came in after step {done}, as replica {own.replica} of {own.replicas}"])
        result = train_until_end(
            session, path, recorder, "", done, task.request.stop_after, stop, None, losses
        )
    losses.close("left" in result)
    return result


def _earlier(task: RunTask, everyone: Everyone) -> tuple[bool, list[int]]:
    """True if the run resumes and any rank sees a checkpoint; and the first steps of log files.

    Collective. A log file begins after the listed step.
    """
    out = task.request.out
    if not task.resume or out is None:
        return False, []
    starts = []
    if task.config.train.log_updates:
        starts = directory.log_starts(out)
    found = everyone.send_to_all([bool(saved_checkpoints(out / directory.CHECKPOINTS)), starts])
    return any(saved for saved, _ in found), found[0][1]
