"""Measures the time of a training step on this machine: forward and backward, and the optimizer's
step.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable

import torch

from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.measure import Everyone
from detonation.cluster.network.profile import Step
from detonation.core.optimizer import replicate
from detonation.train.loop.checks import scheme_of
from detonation.train.loop.fit import backward
from detonation.train.loop.session import Session
from detonation.train.recipe import optimizers
from detonation.train.recipe.schema import Config

_REPEATS = 5
"""Number of repetitions of each measurement on this machine."""


def forward_backward(session: Session, everyone: Everyone) -> tuple[float, float]:
    """Returns the median seconds that forward and backward of a step take, and the spread of these
    seconds (interquartile range / median).

    Collective.
    """
    backward(session, 0)
    low, median, high = statistics.quantiles(_times(lambda: backward(session, 0), everyone), n=4)
    return median, (high - low) / median


def optimizer_step(session: Session, everyone: Everyone, config: Config) -> Step | None:
    """Returns the seconds of the optimizer step of `config` on the model of `session`. Uses a
    loopback communicator, which sends nothing over the network.

    Collective. Returns None if the optimizer refuses the scheme, for example because the scheme
    sends more than full synchronisation.
    """
    scheme = scheme_of(config.levels[-1])
    base = optimizers.build_optimizer(config.optimizer, session.model)
    log = logging.getLogger("detonation")
    mine = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != mine

    # Hide warnings that a setting raises the loss, because this optimizer trains nothing.
    log.addFilter(of_others)
    try:
        communicator = LoopbackCommunicator(session.config.mesh.replicas)
        optimizer = replicate(
            base, session.model, communicator, scheme, clip=config.train.clip or None
        )
        optimizer.step()
    except ValueError:
        return None
    finally:
        log.removeFilter(of_others)

    def at(step: int) -> float:
        def again() -> None:
            optimizer.step_count = step
            optimizer.step()

        # other work on the machine can only lengthen a step, so use the shortest time
        return min(_times(again, everyone))

    last = scheme.round.every - 1
    exchange_s = at(last)
    local_s = 0.0
    if last:
        local_s = at(last - 1)
    return Step(exchange_s, local_s)


def _times(function: Callable[[], object], everyone: Everyone) -> list[float]:
    """Returns the seconds of each of several calls of `function`. All ranks start each call
    together. The seconds of a call are those of the slowest rank.
    """
    times = []
    for _ in range(_REPEATS):
        everyone.barrier()
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return everyone.over(times)
