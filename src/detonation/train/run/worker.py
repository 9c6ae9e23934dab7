"""The work of each rank, from its session to the summary. Rank 0 also writes the run directory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from detonation.checkpoint.verify import load_weights
from detonation.cluster.init import (
    GROUP_TIMEOUT_S,
    interface_line,
    local_device,
    set_group_timeouts,
)
from detonation.cluster.network.measure import Everyone
from detonation.cluster.processes.signals import Stop, stoppable
from detonation.cluster.survive.elastic_axis import meet_replicas
from detonation.core.link import PeerLost
from detonation.train.choice.decide import chosen_config
from detonation.train.loop.session import Session, start_session
from detonation.train.output.screen import Screen
from detonation.train.recipe.schema import Table
from detonation.train.run.elastic_run import Losses, SetUp
from detonation.train.run.in_directory import train_in_directory, train_with_others
from detonation.train.run.joining import RunTask, elastic_axis_of, joined_session
from detonation.train.run.run_directory import earlier_state


def train_on_rank(task: RunTask) -> Table:
    """Trains the run `task` on this rank. Returns the summary and, as `directory`, the path of the
    run.

    A run that ended through `stop_after` or a signal has no summary. In this case the result holds
    only `stopped_after`, `stopped_by` (the name of the signal), `directory`, and `left` if the
    other replicas continue.
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
        axis, inside = elastic_axis_of(task.config, device)
        listening = ""
        if axis is not None:
            set_up.met(axis)
            listening = axis.listening
        _say_interfaces(task, listening)
        everyone = Everyone(device, axis, inside)
        saved, log = earlier_state(task, everyone)
        config = task.config
        chosen = None
        if task.asked is not None:
            begun = None
            if saved or 0 in log:
                begun = task.request.out
            config, chosen = chosen_config(task.asked, begun, everyone, axis)
        session = start_session(config, device, axis)
        losses = Losses(session, set_up)
        begin = ""
        # Load weights before `set_up`, because `set_up` copies them as the anchor of a round.
        if config.train.init_from and not saved:
            begin = load_weights(Path(config.train.init_from), session.model)
        # compare the schemes of the replicas and check sizes before any file is written
        session.optimizer.set_up()
        # set a long timeout for collectives: a node may load its checkpoint from a slow disk
        set_group_timeouts(GROUP_TIMEOUT_S)
        train = partial(train_in_directory, session, task, chosen, begin, log, stop, losses)
        result = _trained(train, session, set_up)
        losses.close("left" in result)
        return result


def _trained(train: Callable[[], Table], session: Session, set_up: SetUp) -> Table:
    """Returns the result of `train`, which reads the run directory and trains. If a replica is lost
    before the first step, the remaining replicas call `train` again.
    """
    while True:
        try:
            return train()
        except PeerLost:
            if set_up.is_done:  # reading the checkpoint again would undo steps
                raise
            session.optimizer.synchronize()


def _join(task: RunTask, address: str, device: torch.device, stop: Stop, set_up: SetUp) -> Table:
    """Joins the run at `address` as a new replica, and trains with the other replicas."""
    out = task.request.out or Path()
    with stop.at_once():  # a Unix signal ends the wait until the run admits this replica
        session = joined_session(task.config, task.asked, device, address, out)
    _say_interfaces(task, session.world.listening)
    return train_with_others(task, session, stop, set_up)


def _say_interfaces(task: RunTask, listening: str) -> None:
    """Prints the network interfaces on which ranks listen for other machines."""
    screen = Screen(dist.get_rank() != 0, task.request.to_stderr)
    for line in filter(None, (interface_line(), listening)):
        screen.line(line)
