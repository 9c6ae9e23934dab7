"""`[scheme] name = "auto"`: measures the link, and chooses one scheme on all ranks."""

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
"""Number of repetitions of each measurement on this machine."""


@dataclass(frozen=True)
class Auto:
    """Arguments of scheme "auto" in a recipe.

    Args:
        budget: Part of a step, between 0 and 1, that full synchronisation or the adapted setting
            may spend waiting for the network.
        adapt: Change the setting of the chosen scheme when the link changes during the run.

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
        """Arguments in `config`; None for another scheme. Raises `ValueError` for bad arguments."""
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
    """A run whose scheme is still to be chosen.

    Args:
        auto: Rules of the choice.
        layers: The recipe, its overrides and its defaults for each scheme.
    """

    auto: Auto
    layers: Layers

    def candidates(self) -> dict[str, Config]:
        """The recipe under every scheme, each with several settings: also the recipe's own.

        Omits `none` if the recipe requires equal replicas.
        """
        found: dict[str, Config] = {}
        full = self.layers.under("full", {})
        equal = full.train.log_updates or full.train.publish or full.mesh.elastic
        for name in known_schemes():
            if name == "none" and equal:
                continue
            for arguments in settings(name):
                config = self.layers.under(name, arguments)
                try:
                    found.setdefault(spelled(scheme_of(config.levels[-1])), config)
                except ValueError:
                    if not arguments:  # the error is in the recipe itself
                        raise
        return found

    def under(self, scheme: Mapping[str, Any]) -> Config:
        """The recipe with the scheme of a table."""
        arguments = {key: value for key, value in scheme.items() if key != "name"}
        return check_config(self.layers.under(scheme["name"], arguments))

    def check(self) -> Config:
        """The recipe with full synchronisation.

        Raises `ValueError` for anything that would fail with one of the schemes.
        """
        for config in self.candidates().values():
            check_levels(config.levels)
            optimizers.check_optimizer(config.optimizer)
        return check_config(self.layers.under("full", {}))


def trained(candidates: Mapping[str, Config]) -> dict[str, Candidate]:
    """Candidate schemes, each with the recipe's optimizer for it."""
    found = {}
    for name, config in candidates.items():
        optimizer = trained_by(config.optimizer.name, config.optimizer.arguments)
        found[name] = (scheme_of(config.levels[-1]), optimizer)
    return found


def goal_of(config: Config, work: Work) -> Goal:
    """The goal of a recipe, for which losses are estimated."""
    return Goal(
        config.mesh.replicas,
        sum(work.sizes.values()),
        config.train.steps,
        task_of(config.model.name),
    )


def settings_in(layers: Layers, chosen: Scheme) -> dict[str, object]:
    """Arguments of `chosen` that differ from those that the recipe sets for this scheme."""
    own = scheme_of(layers.under(chosen.name, {}).levels[-1]).arguments
    return {key: value for key, value in chosen.arguments.items() if value != own[key]}


def standing(layers: Layers) -> Config:
    """The configuration; an unchosen scheme is replaced by full synchronisation."""
    config = layers.config()
    if Auto.of(config) is None:
        return config
    return layers.under("full", {})


@dataclass(frozen=True)
class Chosen:
    """The choice.

    Args:
        config: Configuration with the chosen scheme.
        line: Reason, as a line to print.
        plan: Contents of `plan.json` in the run directory.
        followed: First state of an adapter.
    """

    config: Config
    line: str
    plan: Table
    followed: Followed


def again(asked: Asked, path: Path, everyone: Everyone) -> Config | None:
    """The configuration that the run in `path` chose earlier; None if rank 0 cannot read it.
    Collective.

    The other ranks need not see the directory.
    """
    scheme = directory.config_in(path).get("scheme")
    if not isinstance(scheme, dict) or "name" not in scheme:
        scheme = None
    found = everyone.send_to_all(scheme)[0]
    if found is None:
        return None
    return asked.under(found)


def decide(asked: Asked, everyone: Everyone, axis: SurvivingCommunicator | None = None) -> Chosen:
    """Measures the link and the compute of a step, and chooses one scheme for all. Collective.

    Args:
        axis: Axis of an elastic run. Steps are measured on a loopback instead, because a second
            optimizer on this axis would keep guests out.
    """
    candidates = asked.candidates()
    device = everyone.device
    config = asked.check()
    # This session only measures: the run builds another one with its own weights.
    session = start_session(config, device, axis and LoopbackCommunicator(config.mesh.replicas))
    measured = probe_axis(axis or session.optimizer.levels[0][0], device, PROBE_S, everyone)
    network = Network.of_axis(measured, session.config.mesh.shards)
    compute_s, _ = forward_backward(session, everyone)
    accumulate = session.config.train.accumulate
    on_device = device.type != "cpu"
    work = Work(shard_shapes(session.config), compute_s, {}, True, accumulate, True, on_device)
    best, found, work = _search(asked.auto.budget, candidates, session, everyone, network, work)
    goal = goal_of(session.config, work)
    line = why(found, network, goal, asked.auto.budget)
    name = spelled(best.cost.scheme)
    config = check_config(candidates[name])
    plan = {
        "chosen": row(best, goal),
        "why": line,
        "link": asdict(measured),
        "compute_s": compute_s,
        "steps": {name: asdict(step) for name, step in work.steps.items()},
        **advise(found, work, network, goal, asked.auto.budget, partial(settings_in, asked.layers)),
    }
    followed = Followed(asked.auto.budget, network, compute_s, work.steps[name])
    return Chosen(config, f"auto: {line}", plan, followed)


def _search(
    budget: float,
    candidates: Mapping[str, Config],
    session: Session,
    everyone: Everyone,
    network: Network,
    work: Work,
) -> tuple[Option, list[Option], Work]:
    """Returns the choice, all options, and the work with the measured optimizer steps.

    A scheme's step is measured only if the scheme would be chosen, because that time changes its
    share of waiting. Steps without an exchange are equal for all settings of a scheme, so the
    fastest measurement is used for all.
    """
    pairs = trained(candidates)
    goal = goal_of(session.config, work)
    steps: dict[str, Step] = {}
    while True:
        work = replace(work, steps=dict(steps))
        found = options(pairs.values(), work, network, goal, budget)
        name = everyone.send_to_all(spelled(found[0].cost.scheme))[0]  # the first rank decides
        if name in steps:
            best = next(option for option in found if spelled(option.cost.scheme) == name)
            text = json.dumps(to_table(candidates[name]), sort_keys=True)
            # require_same raises `Mismatch` on all ranks
            everyone.require_same({"chosen": text}, {})
            return best, found, work
        step = optimizer_step(session, everyone, candidates[name])
        if step is None:
            del pairs[name]
        else:
            steps[name] = step
            _share_local_time(steps, pairs, name)


def _share_local_time(
    steps: dict[str, Step], pairs: Mapping[str, Candidate], measured: str
) -> None:
    """Sets the time of a step without an exchange to the minimum over all settings of one
    scheme.
    """

    def kind(name: str) -> tuple[str, object]:
        scheme, optimizer = pairs[name]
        return scheme.name, optimizer

    settings = [name for name in steps if kind(name) == kind(measured) and steps[name].local_s]
    local_s = min((steps[name].local_s for name in settings), default=0.0)
    for name in settings:
        steps[name] = replace(steps[name], local_s=local_s)


def forward_backward(session: Session, everyone: Everyone) -> tuple[float, float]:
    """Median seconds of forward and backward of a step, and their spread (IQR / median).

    Collective.
    """
    backward(session, 0)
    low, median, high = statistics.quantiles(_times(lambda: backward(session, 0), everyone), n=4)
    return median, (high - low) / median


def optimizer_step(session: Session, everyone: Everyone, config: Config) -> Step | None:
    """Seconds of the optimizer step of `config` on the model of `session`, over a loopback
    communicator.

    Collective. None if the optimizer refuses the scheme, for example because it sends more than
    full synchronisation.
    """
    scheme = scheme_of(config.levels[-1])
    base = optimizers.build_optimizer(config.optimizer, session.model)
    log = logging.getLogger("detonation")
    mine = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != mine

    log.addFilter(of_others)  # hides warnings about the loss, because this optimizer does not train
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

        return min(_times(again, everyone))  # disturbances only lengthen a step

    last = scheme.round.every - 1
    exchange_s = at(last)
    local_s = 0.0
    if last:
        local_s = at(last - 1)
    return Step(exchange_s, local_s)


def _times(function: Callable[[], object], everyone: Everyone) -> list[float]:
    """Seconds of each of several calls of `function`. Ranks start together, and the slowest rank's
    time counts.
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
