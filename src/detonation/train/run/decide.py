"""`[scheme] name = "auto"`: what a recipe asks for, and the choice for the links that are there,
alike on all ranks."""

import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from detonation.choices import make
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.measure import Everyone, probe_axis
from detonation.cluster.network.profile import Step
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.optimizer.replicate import replicate
from detonation.core.schemes.registry import known_schemes
from detonation.core.schemes.scheme import Scheme
from detonation.plan.auto import PROBE_S
from detonation.plan.cost import Network, Work, spelled
from detonation.plan.losses import Goal, task_of, trained_by
from detonation.plan.search import (
    BUDGET,
    Candidate,
    Option,
    advise,
    check_budget,
    options,
    row,
    settings,
    why,
)
from detonation.train.loop.fit import backward
from detonation.train.loop.session import (
    Session,
    check_config,
    check_levels,
    scheme_of,
    shard_shapes,
    start_session,
)
from detonation.train.output import directory
from detonation.train.recipe import optimizers
from detonation.train.recipe.resolve import Layers
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import to_table
from detonation.train.run.adapt import Followed

AUTO = "auto"
_REPEATS = 5
"""Of each measurement on this machine."""


@dataclass(frozen=True)
class Auto:
    """The arguments of scheme "auto" in a recipe.

    Args:
        budget: The part of a step that full synchronisation, or the adapted setting, may spend
            waiting for the network, between 0 and 1.
        adapt: Let the setting of the chosen scheme follow the link during the run.

    Raises:
        ValueError: A value is out of range.
    """

    budget: float = BUDGET
    adapt: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        require(isinstance(self.adapt, bool), "scheme.adapt", self.adapt, "true or false")

    @classmethod
    def of(cls, config: Config) -> "Auto | None":
        """The arguments in `config`; None where it names its scheme.

        Raises `ValueError` for bad arguments.
        """
        names = [level.scheme.name for level in config.levels]
        if AUTO not in names:
            return None
        if len(names) > 1:
            raise ValueError(
                "scheme auto is for a recipe of one [scheme]: name the scheme of each [[scheme]]"
            )
        return make("scheme", {AUTO: cls}, AUTO, config.scheme.arguments)


@dataclass(frozen=True)
class Asked:
    """A run whose scheme is still to be chosen: how to choose, and the recipe with its layers."""

    auto: Auto
    layers: Layers

    def candidates(self) -> dict[str, Config]:
        """The recipe under every scheme, by spelling: as it is tuned, and at other settings that go
        with that.

        `none` is left out where the recipe's replicas must agree.
        """
        made: dict[str, Config] = {}
        full = self.layers.under("full", {})
        agreeing = full.train.log_updates or full.train.publish or full.mesh.elastic
        for name in [name for name in known_schemes() if name != "none" or not agreeing]:
            for arguments in settings(name):
                config = self.layers.under(name, arguments)
                try:
                    made.setdefault(spelled(scheme_of(config.levels[-1])), config)
                except ValueError:
                    if not arguments:  # the recipe itself is not valid
                        raise
        return made

    def under(self, scheme: Mapping[str, Any]) -> Config:
        """The recipe under the scheme of a table."""
        arguments = {key: value for key, value in scheme.items() if key != "name"}
        return check_config(self.layers.under(scheme["name"], arguments))

    def check(self) -> Config:
        """The recipe under full synchronisation.

        Raises `ValueError` for anything that would fail under some scheme.
        """
        for config in self.candidates().values():
            check_levels(config.levels)
            optimizers.check_optimizer(config.optimizer)
        return check_config(self.layers.under("full", {}))


def trained(candidates: Mapping[str, Config]) -> dict[str, Candidate]:
    """Each scheme that may be chosen, with the optimizer that the recipe trains it with."""
    return {
        name: (
            scheme_of(config.levels[-1]),
            trained_by(config.optimizer.name, config.optimizer.arguments),
        )
        for name, config in candidates.items()
    }


def goal_of(config: Config, work: Work) -> Goal:
    """The run of a recipe, for estimates of its loss."""
    return Goal(
        config.mesh.replicas,
        sum(work.sizes.values()),
        config.train.steps,
        task_of(config.model.name),
    )


def settings_in(layers: Layers, chosen: Scheme) -> dict[str, object]:
    """The arguments that a recipe must be given to train under `chosen`: those that it has
    otherwise under its name."""
    own = scheme_of(layers.under(chosen.name, {}).levels[-1]).arguments
    return {key: value for key, value in chosen.arguments.items() if value != own[key]}


def standing(layers: Layers) -> Config:
    """The configuration, with full synchronisation in the place of a scheme that is still to be
    chosen."""
    config = layers.config()
    return config if Auto.of(config) is None else layers.under("full", {})


@dataclass(frozen=True)
class Chosen:
    """The choice: its configuration, a line to show, the `plan` of the run directory, an adapter's
    first state."""

    config: Config
    line: str
    plan: Table
    followed: Followed


def again(asked: Asked, path: Path, everyone: Everyone) -> Config | None:
    """The configuration that the run in `path` has chosen before; None where rank 0 cannot read it.
    Collective.

    No other rank needs to see the directory yet.
    """
    scheme = directory.config_in(path).get("scheme")
    found = everyone.send_to_all(scheme if isinstance(scheme, dict) and "name" in scheme else None)[
        0
    ]
    return None if found is None else asked.under(found)


def decide(asked: Asked, everyone: Everyone, axis: SurvivingCommunicator | None = None) -> Chosen:
    """Measures the link and the compute of a step, and chooses; all ranks agree. Collective.

    `axis`: an elastic one. The model steps beside it: a second optimizer on it would let nobody in.
    """
    candidates, device = asked.candidates(), everyone.device
    config = asked.check()
    # for measuring only: the run makes its own weights
    session = start_session(config, device, axis and LoopbackCommunicator(config.mesh.replicas))
    measured = probe_axis(axis or session.optimizer.levels[0][0], device, PROBE_S, everyone)
    network = Network.of_axis(measured, session.config.mesh.shards)
    compute_s, _ = forward_backward(session, everyone)
    settings = session.config.train.accumulate, True, device.type != "cpu"
    work = Work(shard_shapes(session.config), compute_s, {}, True, *settings)
    best, found, work = _search(asked.auto.budget, candidates, session, everyone, network, work)
    goal = goal_of(session.config, work)
    line = why(found, network, goal, asked.auto.budget)
    config = check_config(candidates[spelled(best.cost.scheme)])
    plan = {
        "chosen": row(best, goal),
        "why": line,
        "link": asdict(measured),
        "compute_s": compute_s,
        "steps": {name: asdict(step) for name, step in work.steps.items()},
        **advise(found, work, network, goal, asked.auto.budget, partial(settings_in, asked.layers)),
    }
    followed = Followed(
        asked.auto.budget, network, compute_s, work.steps[spelled(best.cost.scheme)]
    )
    return Chosen(config, f"auto: {line}", plan, followed)


def _search(
    budget: float,
    candidates: Mapping[str, Config],
    session: Session,
    everyone: Everyone,
    network: Network,
    work: Work,
) -> tuple[Option, list[Option], Work]:
    """The choice, the options that it was made from, and the work with the optimizer steps measured
    for it.

    The step of a scheme is measured only when it would be chosen: its time changes the share that
    is spent waiting. Its steps without an exchange are the same at every setting, so the quickest
    that was measured counts for all.
    """
    pairs, goal = trained(candidates), goal_of(session.config, work)
    steps: dict[str, Step] = {}
    while True:
        work = replace(work, steps=dict(steps))
        found = options(pairs.values(), work, network, goal, budget)
        name = everyone.send_to_all(spelled(found[0].cost.scheme))[0]  # the first rank decides
        if name in steps:
            best = next(option for option in found if spelled(option.cost.scheme) == name)
            text = json.dumps(to_table(candidates[name]), sort_keys=True)
            everyone.require_same(
                {"chosen": text}, {}
            )  # raises `Mismatch` on all ranks where one has another
            return best, found, work
        step = optimizer_step(session, everyone, candidates[name])
        if step is None:  # the optimizer refuses it
            del pairs[name]
        else:
            steps[name] = step
            kind = pairs[name][0].name, pairs[name][1]
            alike = [
                each
                for each in steps
                if (pairs[each][0].name, pairs[each][1]) == kind and steps[each].local_s
            ]
            local_s = min((steps[each].local_s for each in alike), default=0.0)
            steps |= {each: replace(steps[each], local_s=local_s) for each in alike}


def forward_backward(session: Session, everyone: Everyone) -> tuple[float, float]:
    """The median time of the forward and backward passes of a step, and their spread (IQR /
    median). Collective."""
    backward(session, 0)
    low, median, high = statistics.quantiles(_times(lambda: backward(session, 0), everyone), n=4)
    return median, (high - low) / median


def optimizer_step(session: Session, everyone: Everyone, config: Config) -> Step | None:
    """The time of the optimizer's step of `config` on the model of `session`, over a loopback.
    Collective.

    None where the optimizer refuses it, such as a scheme that is larger than dense.
    """
    scheme = scheme_of(config.levels[-1])
    base = optimizers.build_optimizer(config.optimizer, session.model)
    log, mine = logging.getLogger("detonation"), threading.get_ident()
    log.addFilter(
        of_others := lambda record: record.thread != mine
    )  # replicate warns of a loss, and here is none
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

        return min(_times(again, everyone))  # what disturbs them only adds

    last = scheme.round.every - 1
    return Step(at(last), at(last - 1) if last else 0.0)


def _times(function: Callable[[], object], everyone: Everyone) -> list[float]:
    """The seconds that `function` takes, several times over; of all ranks, which begin together,
    the slowest counts."""
    times = []
    for _ in range(_REPEATS):
        everyone.barrier()
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return everyone.over(times)
