"""Runs a function as one rank of the world that torchrun or srun started; one rank reports failures for all."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

from detonation.cluster.init import LaunchPosition, init_rank, leave
from detonation.cluster.processes.failure import Failure, WorldError, failure_from_exception
from detonation.cluster.processes.heartbeat import Heartbeat
from detonation.cluster.processes.rendezvous import keep_to_one_interface
from detonation.cluster.processes.signals import die_with_agent, end_now, stoppable

_T = TypeVar("_T")


def run_under_launcher(
    position: LaunchPosition,
    function: Callable[[], _T],
    fail: Callable[[Exception], int],
    check: Callable[[], object],
    interface: str = "",
) -> _T:
    """Calls `function()` in the process group of a launcher's world and returns its result.

    Args:
        check: raises `ValueError` for what this rank knows to be wrong before it waits for others, who may never come.
        fail: shows an error and returns the exit code, for a rank whose main thread waits for one that is lost.
        interface: the network interface of this rank's sockets.

    Raises:
        WorldError: `function` failed on some rank; raised on all ranks, and exactly one has `reported` False.
    """

    def end(text: str, reported: bool) -> NoReturn:
        failure = Failure(position.rank, time.time(), "Lost", text, complete=True)
        code = fail(WorldError(failure, position.world_size, reported))
        if heartbeat is not None:
            heartbeat.close()
        end_now(code)

    heartbeat: Heartbeat | None = None
    try:
        check()
    except ValueError as error:  # the ranks of a machine read the same: those that are not its first leave it to that
        told = os.environ.get("LOCAL_RANK", "0") != "0"
        raise WorldError(failure_from_exception(position.rank, error), position.world_size, told) from error
    die_with_agent(os.environ)
    keep_to_one_interface(os.environ, position.one_machine, interface)
    heartbeat = init_rank(position, end)
    with stoppable():  # also while a failure is reported: torchrun asks the others to stop as soon as one rank ends
        try:
            result = function()
            leave()
        except Exception as error:
            world_error = _reported(heartbeat, failure_from_exception(position.rank, error), position.world_size)
            if heartbeat is not None:
                heartbeat.close()
            raise world_error from error
    return result


def _reported(heartbeat: Heartbeat | None, failure: Failure, world_size: int) -> WorldError:
    """The error of this rank: reported by the first rank with a cause of its own; a rank that lost a peer names it."""
    if heartbeat is None:
        return WorldError(failure, world_size)
    text = str(WorldError(failure, world_size))
    if not failure.network:
        return WorldError(failure, world_size, heartbeat.report(text))
    text, reported = heartbeat.explain(text)
    return WorldError(replace(failure, text=text, complete=True), world_size, reported)
