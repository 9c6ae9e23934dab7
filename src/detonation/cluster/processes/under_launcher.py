"""The world that torchrun or srun started: this process is one rank of it, and one rank speaks for all."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

from detonation.cluster.init import Place, join, leave
from detonation.cluster.processes.exit import die_with_agent, end_now
from detonation.cluster.processes.failure import Failure, WorldError, by_exception
from detonation.cluster.processes.heartbeat import Pulse
from detonation.cluster.processes.rendezvous import keep_to_one_interface
from detonation.cluster.processes.signals import stoppable

T = TypeVar("T")


def run_launched(
    place: Place, function: Callable[[], T], fail: Callable[[Exception], int], *, interface: str = ""
) -> T:
    """What `function()` returns in the process group of a launcher's world.

    Raises `WorldError` when it fails, on all ranks; one of them is to tell.
    fail: shows an error and returns the exit code. For the end of a rank that cannot raise, because its main thread
    waits for one that is lost.
    """

    def end(text: str, told: bool) -> NoReturn:
        failure = Failure(place.rank, time.time(), "Lost", text, complete=True)
        code = fail(WorldError(failure, place.world_size, told))
        if pulse is not None:
            pulse.close()
        end_now(code)

    pulse: Pulse | None = None
    die_with_agent(os.environ)
    keep_to_one_interface(os.environ, place.world_size == place.local_world_size, interface)
    pulse = join(place, end)
    with stoppable():  # also while a failure is told: torchrun asks the others to stop as soon as one rank ends
        try:
            result = function()
            leave()
        except Exception as error:
            told = _first_told(pulse, by_exception(place.rank, error), place.world_size)
            if pulse is not None:
                pulse.close()
            raise told from error
    return result


def _first_told(pulse: Pulse | None, failure: Failure, world_size: int) -> WorldError:
    """The error of this rank: the first with a cause of its own tells it, and those that only lost a peer name it."""
    if pulse is None:
        return WorldError(failure, world_size)
    whole = str(WorldError(failure, world_size))
    if not failure.network:
        return WorldError(failure, world_size, pulse.tell(whole))
    text, told = pulse.explain(whole)
    return WorldError(replace(failure, text=text, complete=True), world_size, told)
