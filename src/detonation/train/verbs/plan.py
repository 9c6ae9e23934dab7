"""`detonation plan`: schemes ranked for a recipe, or a number of parameters, over links measured or given."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detonation.choices import unknown
from detonation.cluster.network.profile import Compute, Profile
from detonation.core.link.link_speed import LinkSpeed
from detonation.core.schemes.registry import SCHEMES, scheme
from detonation.core.schemes.scheme import Scheme
from detonation.plan.cost import Network, Work, changed
from detonation.plan.losses import GOAL_STEPS, Goal, optimizers, trained_by
from detonation.plan.search import Candidate, advise, options, pairs
from detonation.train.recipe.schema import Config, require

if TYPE_CHECKING:
    from detonation.train.recipe.resolve import Layers

_ROUNDED = 0.05
"""Numbers of parameters that differ by no more may be of one model: people write 1.2b."""
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Question:
    """A recipe or `parameters`, and a profile or a `link` with `step_time`; fields are named like the flags."""

    recipe: Path | None = None
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    link: str | None = None
    step_time: float | None = None
    replicas: int | None = None
    shards: int | None = None
    parameters: str | None = None
    optimizer: str | None = None
    steps: int | None = None


def plan(question: Question) -> dict[str, Any]:
    """The ranked schemes with their costs, in plain values. Raises `ValueError` for a question that is not complete."""
    if (question.recipe is None) == (question.parameters is None):
        raise ValueError("plan needs a recipe or --parameters, one of the two")
    if (question.profile is None) == (question.link is None):
        raise ValueError("plan needs --profile (made by detonation probe) or --link RATE[,LATENCY], one of the two")
    profile = Profile.read(question.profile) if question.profile else None
    if profile is not None:
        _same_world(question, profile)
    layers = _layers(question, profile) if question.recipe else None
    config = _config(layers) if layers else None
    network = _network(question, profile, config)
    work = _work(question, profile, config, network)
    goal = _goal(question, config, work, network)
    tuned = _tuned(layers, config, goal)
    ranked = options(tuned or pairs(goal), work, network, goal)
    found = advise(ranked, work, network, goal, settings=_settings(layers))
    if not tuned:  # the flags must name the optimizer; a learning rate does not carry over
        best = found["first"]
        kept = {key: value for key, value in best["optimizer_settings"].items() if key != "lr"}
        found["optimizer"] = {"name": best["optimizer"].removesuffix(" without momentum"), **kept}
    return found


def count(text: str) -> int:
    """A number of parameters, as people write it.

    >>> count("1.2b"), count("350m"), count("7000"), count("7e9"), count("7,000,000")
    (1200000000, 350000000, 7000, 7000000000, 7000000)
    """
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmb]?)", re.sub("[_,]", "", text.strip().lower()))
    try:
        number = float(found[1]) * _SUFFIXES[found[2]] if found else 0
    except ValueError:
        number = 0
    require(1 <= number < 1e15, "--parameters", text, "a number such as 1.2b, 350m or 7000")
    return round(number)


def _same_world(question: Question, profile: Profile) -> None:
    """Raises `ValueError` where the question has another number of replicas or shards than the profile.

    Another number of shards shares a node's link, and of replicas a network, in ways that nobody has measured.
    """
    asked = {"replicas": (question.replicas, profile.replicas), "shards": (question.shards, profile.shards)}
    for name, (given, measured) in asked.items():
        if given not in (None, measured):
            was = f"{question.profile} was measured with {measured}"
            raise ValueError(f"--{name} is {given}, but {was}: measure again with detonation probe, or say --link")


def _layers(question: Question, profile: Profile | None) -> "Layers":
    # imported for a recipe alone, as models and FSDP below: they take a second, and arithmetic needs none of it
    from detonation.train.recipe.resolve import read_layers

    assert question.recipe is not None
    replicas, shards = question.replicas, question.shards
    if profile is not None:
        replicas, shards = profile.replicas, profile.shards
    return read_layers(question.recipe, question.overrides, mesh={"replicas": replicas, "shards": shards})


def _config(layers: "Layers") -> Config:
    from detonation.train.loop.session import check_config
    from detonation.train.run.decide import standing

    return check_config(standing(layers))


def _goal(question: Question, config: Config | None, work: Work, network: Network) -> Goal:
    """The training that is asked about: of the recipe, or else of text."""
    optimizer = question.optimizer
    if optimizer is not None and optimizer not in optimizers():
        raise unknown("--optimizer", optimizer, optimizers())
    steps = question.steps
    require(steps is None or steps >= 1, "--steps", steps, "at least 1")
    if config is None:
        return Goal(network.replicas, sum(work.sizes.values()), steps or GOAL_STEPS, optimizer=optimizer)
    from detonation.train.run.decide import goal_of

    goal = goal_of(config, work, optimizer)
    return goal if steps is None else replace(goal, steps=steps)


def _tuned(layers: "Layers | None", config: Config | None, goal: Goal) -> list[Candidate]:
    """Each scheme with the optimizer that trains with it in the recipe, as in auto; empty without a recipe."""
    if layers is None or config is None:
        return []
    from detonation.train.run.decide import Asked, Auto, trained

    found = list(trained(Asked(Auto(), layers).candidates()).values())
    if config.scheme.name not in SCHEMES:
        chosen = config.levels[-1].scheme
        own = trained_by(config.optimizer.name, config.optimizer.arguments)
        found.append((scheme(chosen.name, chosen.arguments), own))
    return [pair for pair in found if goal.optimizer in (None, pair[1])]


def _settings(layers: "Layers | None") -> Callable[[Scheme], Mapping[str, object]]:
    """The arguments that choose a scheme: over the recipe that was asked about, or else over a scheme's defaults."""
    if layers is None:
        return changed
    from detonation.train.run.decide import settings_in

    return partial(settings_in, layers)


def _network(question: Question, profile: Profile | None, config: Config | None) -> Network:
    if profile is not None:
        return Network(profile.replicas, profile.shards, profile.axes["replicate"].operations)
    assert question.link is not None
    asked = (2 if question.replicas is None else question.replicas, 1 if question.shards is None else question.shards)
    replicas, shards = (config.mesh.replicas, config.mesh.shards) if config else asked
    require(replicas >= 1, "--replicas", replicas, "at least 1")
    require(shards >= 1, "--shards", shards, "at least 1")
    return Network.of_link_speed(LinkSpeed.parse(question.link), replicas, shards)


def _work(question: Question, profile: Profile | None, config: Config | None, network: Network) -> Work:
    shapes = _shapes(question, config, network.shards)
    measured = profile.compute if profile and question.step_time is None else None
    if measured is not None:
        _same_model(question, measured, sum(math.prod(shape) for shard in shapes for shape in shard.values()))
    seconds = _measured_s(measured, config) if measured else question.step_time
    if seconds is None:
        raise ValueError("plan needs --step-time, the seconds of forward and backward, or a profile of the recipe")
    require(0 < seconds < math.inf, "--step-time", seconds, "above 0")
    accumulate = config.train.accumulate if config else 1
    return Work(shapes, seconds, measured.steps if measured else {}, accumulate=accumulate)


def _measured_s(measured: Compute, config: Config | None) -> float:
    """Seconds of forward and backward in proportion to the examples of the recipe, where both numbers are known."""
    if config is None or not measured.examples:
        return measured.forward_backward_s
    return measured.forward_backward_s * (config.train.batch_size * config.train.accumulate / measured.examples)


def _same_model(question: Question, measured: Compute, parameters: int) -> None:
    """Raises `ValueError` where the question is about another model than the one whose step was measured."""
    if question.recipe is None:
        same = math.isclose(parameters, measured.parameters, rel_tol=_ROUNDED)
    else:
        same = (question.recipe.stem, parameters) == (measured.recipe, measured.parameters)
    if not same:
        was = f"{question.profile} is of the recipe {measured.recipe} with {measured.parameters:,} parameters"
        raise ValueError(f"{was}, and this model has {parameters:,}: probe again, or say --step-time")


def _shapes(question: Question, config: Config | None, shards: int) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters on each shard; without a recipe they are one long parameter."""
    if config is None:
        return [{"all": (-(-count(question.parameters or "") // shards),)}] * shards
    from detonation.train.recipe.sizes import shard_shapes

    return shard_shapes(config)
