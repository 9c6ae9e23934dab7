"""The time of a recipe's training step on this machine, without the network."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.measure import slowest
from detonation.cluster.network.profile import Step
from detonation.core.optimizer.replicate import replicate
from detonation.train.loop.fit import backward
from detonation.train.loop.session import Session, scheme_of
from detonation.train.recipe import optimizers
from detonation.train.recipe.schema import Config

_REPEATS = 5


def forward_backward(session: Session) -> tuple[float, float]:
    """The median time of the forward and backward passes of a step, and their spread (IQR / median). Collective."""
    backward(session, 0)
    low, median, high = statistics.quantiles(_times(lambda: backward(session, 0)), n=4)
    return median, (high - low) / median


def optimizer_step(session: Session, config: Config) -> Step | None:
    """The time of the optimizer's step of `config` on the model of `session`, over a loopback. Collective.

    None where the optimizer refuses, because the message is larger than dense.
    """
    scheme = scheme_of(config.levels[-1])
    base = optimizers.build_optimizer(config.optimizer, session.model)
    try:
        communicator = LoopbackCommunicator(session.config.mesh.replicas)
        optimizer = replicate(base, session.model, communicator, scheme, clip=config.train.clip or None)
        optimizer.step()
    except ValueError:
        return None

    def at(step: int) -> float:
        def again() -> None:
            optimizer.step_count = step
            optimizer.step()

        return statistics.median(_times(again))

    last = scheme.round.every - 1
    return Step(at(last), at(last - 1) if last else 0.0)


def _times(function: Callable[[], object]) -> list[float]:
    """The seconds that `function` takes, several times over; of all ranks, which begin together, the slowest counts."""
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    agreed: list[float] = slowest(torch.tensor(times, dtype=torch.float64)).tolist()
    return agreed
