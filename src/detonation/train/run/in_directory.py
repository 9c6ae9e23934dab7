"""Trains a run in its directory: restores the saved state, and continues training from this
state.
"""

import contextlib
import secrets
from pathlib import Path

import torch.distributed as dist

from detonation.cluster.processes.signals import Stop
from detonation.train.choice.decide import Chosen
from detonation.train.loop.session import Session
from detonation.train.loop.summary import Counts, saved_counts
from detonation.train.output import directory
from detonation.train.output.screen import Screen
from detonation.train.recipe.schema import Table
from detonation.train.recipe.tables import to_table
from detonation.train.run.elastic_run import Losses, SetUp
from detonation.train.run.joining import RunTask
from detonation.train.run.log_check import checked_log
from detonation.train.run.recorder import Recorder
from detonation.train.run.run_directory import (
    kept_records,
    require_earlier,
    resumed_state,
    run_directory,
    set_message_timeouts,
)
from detonation.train.run.training import train_until_end


def train_in_directory(
    session: Session,
    task: RunTask,
    chosen: Chosen | None,
    begin: str,
    log: list[int],
    stop: Stop,
    losses: Losses,
) -> Table:
    """Restores the state in the run directory, and trains from it. Returns the result of
    `train_on_rank`.
    """
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
        loaded, resumed = resumed_state(session, task, path, log)
        before = Counts()
        saved_step = 0
        if loaded is not None:
            before = saved_counts(loaded.extra)
            saved_step = loaded.step
        done = session.optimizer.step_count
        _require_steps(session.config.train.steps, done)
        run = _name_of_run(session)
        kept, damage = kept_records(session, path / directory.METRICS, done, volumes)
        if task.resume and session.config.train.log_updates and session.rank == 0:
            damage += checked_log(path, saved_step)[1]
        # This is the first write to the directory, so a refused run leaves the directory unchanged.
        if volumes.leads(session.rank):
            plan = None
            if chosen is not None and session.rank == 0:
                plan = chosen.plan
            directory.begin_run(path, to_table(session.config), plan)
        with contextlib.closing(Recorder(session, path, screen, done, before, kept)) as recorder:
            recorder.show(resumed)
            _say_replica(session, task, path, done)
            recorder.warn(damage)
            return train_until_end(
                session, path, recorder, run, done, task.request.stop_after, stop, losses
            )


def _say_replica(session: Session, task: RunTask, path: Path, done: int) -> None:
    """Prints at which step this replica begins to train, if the replica has its own terminal. Only
    replica 0 prints its steps, so without this line the terminal of any other replica would show
    nothing.
    """
    own = session.optimizer.coordinates
    if task.request.replica is None or own.replica == 0 or dist.get_rank() != 0:
        return
    Screen(False, task.request.to_stderr).line(
        f"replica {own.replica} of {own.replicas} trains from step {done + 1} on, in {path};"
        " replica 0 prints the steps"
    )


def _require_steps(steps: int, done: int) -> None:
    """Raises `ValueError` if the run has already trained more than `train.steps` steps."""
    if done > steps:
        raise ValueError(
            f"train.steps is {steps}, but {done} steps are already trained: give more --steps"
        )


def _name_of_run(session: Session) -> str:
    """Returns a random name for the feeds of this start, equal on all ranks; "" if no rank
    publishes weights.

    In an elastic run perhaps only one replica publishes weights, so all ranks take part in the
    broadcast of the name.
    """
    if session.config.train.publish or session.config.mesh.elastic:
        return session.world.texts().broadcast(secrets.token_hex(8))
    return ""


def train_with_others(task: RunTask, session: Session, stop: Stop, set_up: SetUp) -> Table:
    """Trains after this replica has joined a run. The replicas that it has joined write the run
    directory.

    Returns the result of `train_on_rank`.
    """
    done = session.optimizer.step_count
    path = task.request.out or Path()
    require_earlier(path, done)
    losses = Losses(session, set_up)
    set_message_timeouts(session)
    screen = Screen(session.optimizer.coordinates.shard != 0, task.request.to_stderr)
    with screen, contextlib.closing(Recorder(session, path, screen, done)) as recorder:
        recorder.show([losses.came_in(done)])
        result = train_until_end(
            session, path, recorder, "", done, task.request.stop_after, stop, losses
        )
    losses.close("left" in result)
    return result
