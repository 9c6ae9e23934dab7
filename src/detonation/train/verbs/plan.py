"""`detonation plan`: schemes ranked for a recipe, or a number of parameters, over links measured or
given."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from detonation.choices import unknown
from detonation.cluster.network.profile import Compute, Profile
from detonation.core.schemes.registry import known_schemes, scheme
from detonation.core.schemes.scheme import Scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Shapes, Work
from detonation.plan.losses import GOAL_STEPS, TEXT, Goal, optimizers, task_of, trained_by
from detonation.plan.search import Candidate, advise, options, pairs
from detonation.train.recipe.schema import require

_ROUNDED = 0.05
"""Numbers of parameters that differ by no more may be of one model: people write 1.2b."""
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Question:
    """A recipe or `parameters`, and a profile or a `link` with `step_time`; fields are named like
    the flags."""

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
    """Ranks schemes by cost. Returns plain values.

    Raises:
        ValueError: The question is incomplete, or a value is out of range.
    """
    _check(question)
    profile = Profile.read(question.profile) if question.profile else None
    if profile is not None:
        _same_world(question, profile)
    if question.recipe:
        training = _of_recipe(question, profile)
    else:
        training = _of_parameters(question, profile)
    network = _network(question, profile, training)
    work = _work(question, profile, training)
    steps = question.steps or training.steps
    parameters = sum(work.sizes.values())
    goal = Goal(training.replicas, parameters, steps, training.losses_of, question.optimizer)
    tuned = [pair for pair in training.tuned if question.optimizer in (None, pair[1])]
    candidates = options(tuned or pairs(goal), work, network, goal)
    found = advise(candidates, work, network, goal, settings=training.settings)
    if not tuned:
        found["optimizer"] = _named_optimizer(found["first"])
    return found


def _check(question: Question) -> None:
    """Raises `ValueError` for a question that names too little, too much or an unknown optimizer."""
    if (question.recipe is None) == (question.parameters is None):
        raise ValueError("plan needs a recipe or --parameters, one of the two")
    if (question.profile is None) == (question.link is None):
        raise ValueError(
            "plan needs --profile (made by detonation probe) or --link RATE[,LATENCY], "
            "one of the two"
        )
    if question.optimizer is not None and question.optimizer not in optimizers():
        raise unknown("--optimizer", question.optimizer, optimizers())
    require(question.steps is None or question.steps >= 1, "--steps", question.steps, "at least 1")


def _network(question: Question, profile: Profile | None, training: "_Training") -> Network:
    """The network between the replicas, as measured or as the question states it."""
    if profile is not None:
        return Network.of_axis(profile.axes["replicate"], profile.shards)
    link = LinkSpeed.parse(question.link or "")
    return Network.of_link_speed(link, training.replicas, training.shards)


def _named_optimizer(best: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer of a candidate as flags name it, without a learning rate, which does not carry
    over."""
    kept = {key: value for key, value in best["optimizer_settings"].items() if key != "lr"}
    return {"name": best["optimizer"].removesuffix(" without momentum"), **kept}


def count(text: str) -> int:
    """A number of parameters, as people write it.

    >>> count("1.2b"), count("350m"), count("7000"), count("7e9"), count("7,000,000")
    (1200000000, 350000000, 7000, 7000000000, 7000000)
    """
    found = re.fullmatch(
        r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmb]?)", re.sub("[_,]", "", text.strip().lower())
    )
    try:
        number = float(found[1]) * _SUFFIXES[found[2]] if found else 0
    except ValueError:
        number = 0
    require(1 <= number < 1e15, "--parameters", text, "a number such as 1.2b, 350m or 7000")
    return round(number)


def _same_world(question: Question, profile: Profile) -> None:
    """Raises `ValueError` where the question has another number of replicas or shards than the
    profile.

    Another number of shards shares a node's link, and of replicas a network, in ways that nobody
    has measured.
    """
    asked = {
        "replicas": (question.replicas, profile.replicas),
        "shards": (question.shards, profile.shards),
    }
    for name, (given, measured) in asked.items():
        if given not in (None, measured):
            was = f"{question.profile} was measured with {measured}"
            raise ValueError(
                f"--{name} is {given}, but {was}: measure again with detonation probe, or say"
                " --link"
            )


@dataclass(frozen=True)
class _Training:
    """The facts about a training that a plan needs.

    Args:
        shapes: Of the parameters on each shard.
        examples: Of a rank in a step; 0 where nothing is said of them.
        steps, losses_of: Its length, and the recipe whose losses count for it.
        tuned: Each scheme with the optimizer that trains with it in the recipe; empty without one.
        settings: The arguments that choose a scheme: those that the recipe has otherwise, all where
            it is not known.
    """

    replicas: int
    shards: int
    shapes: Sequence[Shapes]
    accumulate: int = 1
    examples: int = 0
    steps: int = GOAL_STEPS
    losses_of: str = TEXT
    tuned: Sequence[Candidate] = ()
    settings: Callable[[Scheme], Mapping[str, object]] = lambda chosen: chosen.arguments


def _of_parameters(question: Question, profile: Profile | None) -> _Training:
    """A training of text, whose parameters are one long one."""
    world = question if profile is None else profile
    replicas, shards = (
        2 if world.replicas is None else world.replicas,
        1 if world.shards is None else world.shards,
    )
    require(replicas >= 1, "--replicas", replicas, "at least 1")
    require(shards >= 1, "--shards", shards, "at least 1")
    return _Training(
        replicas, shards, [{"all": (-(-count(question.parameters or "") // shards),)}] * shards
    )


def _of_recipe(question: Question, profile: Profile | None) -> _Training:
    # imported for a recipe alone: models and FSDP take a second, and arithmetic needs none of it
    from detonation.train.loop.session import check_config, shard_shapes
    from detonation.train.recipe.resolve import read_layers
    from detonation.train.run.decide import Asked, Auto, settings_in, standing, trained

    assert question.recipe is not None
    world = question if profile is None else profile
    mesh = {"replicas": world.replicas, "shards": world.shards}
    layers = read_layers(question.recipe, question.overrides, mesh=mesh)
    config = check_config(standing(layers))
    require(
        len(config.levels) == 1,
        "scheme",
        config.schemes,
        "one level: schemes are ranked for one axis",
    )
    tuned, chosen, train = (
        [*trained(Asked(Auto(), layers).candidates()).values()],
        config.scheme,
        config.train,
    )
    if chosen.name not in known_schemes():
        own = trained_by(config.optimizer.name, config.optimizer.arguments)
        tuned.append((scheme(chosen.name, chosen.arguments), own))
    return _Training(
        config.mesh.replicas,
        config.mesh.shards,
        shard_shapes(config),
        train.accumulate,
        train.batch_size * train.accumulate,
        train.steps,
        task_of(config.model.name),
        tuned,
        partial(settings_in, layers),
    )


def _work(question: Question, profile: Profile | None, training: _Training) -> Work:
    measured = profile.compute if profile and question.step_time is None else None
    seconds = question.step_time
    if measured is not None:
        _same_model(
            question,
            measured,
            sum(math.prod(shape) for shard in training.shapes for shape in shard.values()),
        )
        seconds = measured.forward_backward_s
        if training.examples and measured.examples:
            seconds *= training.examples / measured.examples
    if seconds is None:
        raise ValueError(
            "plan needs --step-time, the seconds of forward and backward, or a profile of the"
            " recipe"
        )
    require(0 < seconds < math.inf, "--step-time", seconds, "above 0")
    steps, reports = measured.steps if measured else {}, question.recipe is not None
    gpus = profile is not None and "nccl" in profile.backend
    return Work(training.shapes, seconds, steps, True, training.accumulate, reports, gpus)


def _same_model(question: Question, measured: Compute, parameters: int) -> None:
    """Raises `ValueError` where the question is about another model than the one whose step was
    measured."""
    if question.recipe is None:
        same = math.isclose(parameters, measured.parameters, rel_tol=_ROUNDED)
    else:
        same = (question.recipe.stem, parameters) == (measured.recipe, measured.parameters)
    if not same:
        was = (
            f"{question.profile} is of the recipe {measured.recipe} with {measured.parameters:,}"
            " parameters"
        )
        raise ValueError(
            f"{was}, and this model has {parameters:,}: probe again, or say --step-time"
        )
