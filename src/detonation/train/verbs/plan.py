"""`detonation plan`: ranks schemes for a recipe or a model size, over a link that is measured or
given.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from detonation.choices import unknown
from detonation.cluster.network.profile import Compute, Profile, Step
from detonation.core.schemes import Scheme, known_schemes, scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Shapes, Work
from detonation.plan.losses import (
    GOAL_STEPS,
    TEXT,
    TWO_RATES,
    Goal,
    optimizers,
    task_of,
    trained_by,
)
from detonation.plan.search import Candidate, advise, options, pairs
from detonation.train.recipe.schema import OptimizerConfig, require, spelled_optimizer

_ROUNDED = 0.05
"""Largest relative difference between two parameter counts of the same model. A count such as 1.2b
is rounded.
"""
_MOST = {"replicas": 100_000, "shards": 100_000, "steps": 10**12}
"""Largest accepted values; larger ones are mistakes, and would overflow in the predictions."""
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Question:
    """A user's command; its fields are named after the flags of `detonation plan`.

    Either `recipe` or `parameters` is needed. Either `profile` or `link` is needed, and `link`
    needs `step_time`, too.
    """

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
    """Ranks schemes by what they cost a training run. Returns the result as plain values.

    Raises:
        ValueError: The question is incomplete, or a value is out of range.
    """
    _check(question)
    profile = None
    if question.profile:
        profile = Profile.read(question.profile)
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
    of_recipe = training.optimizer(found["first"]["scheme"])
    found["notes"] += _rates(found["first"], of_recipe)
    return found


def _check(question: Question) -> None:
    """Raises `ValueError` if fields are missing or conflict, or if the optimizer is unknown."""
    if (question.recipe is None) == (question.parameters is None):
        raise ValueError("plan needs either a recipe or --parameters")
    if (question.profile is None) == (question.link is None):
        raise ValueError(
            "plan needs --profile (made by detonation probe) or --link RATE[,LATENCY]: give exactly"
            " one of them"
        )
    if question.optimizer is not None and question.optimizer not in optimizers():
        raise unknown("--optimizer", question.optimizer, optimizers())
    for name, most in _MOST.items():
        given = getattr(question, name)
        allowed = f"from 1 to {most:,}"
        require(given is None or 1 <= given <= most, f"--{name}", given, allowed)


def _network(question: Question, profile: Profile | None, training: "_Training") -> Network:
    if profile is not None:
        return Network.of_axis(profile.axes["replicate"], profile.shards)
    link = LinkSpeed.parse(question.link or "")
    return Network.of_link_speed(link, training.replicas, training.shards)


def _named_optimizer(best: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer of a candidate without its learning rate, because the learning rate
    must be tuned for each model.
    """
    kept = {key: value for key, value in best["optimizer_settings"].items() if key != "lr"}
    return {"name": best["optimizer"].removesuffix(" without momentum"), **kept}


def _rates(best: Mapping[str, Any], of_recipe: OptimizerConfig | None) -> list[str]:
    """Returns a line with the learning rates with which the candidate `best` was measured.

    Returns an empty list if no learning rate is known. With a recipe, the list is also empty unless
    embeddings had a learning rate of their own in the measurement, and the recipe sets another
    ratio of learning rates.
    """
    measured = best["optimizer_settings"]
    ratio = measured.get(TWO_RATES, 1.0)
    if "lr" not in measured or (of_recipe and ratio in (1.0, of_recipe.embedding_lr_ratio)):
        return []
    rates = f"optimizer.lr={measured['lr']:g}"
    own = "tune it for your model"
    if ratio != 1:
        rates += f" optimizer.{TWO_RATES}={ratio:g}"
        own = "tune both for your model"
    if of_recipe:
        own += f", because the recipe has {spelled_optimizer(of_recipe)}"
    return [f"the first choice was measured with {rates}: {own}"]


def count(text: str) -> int:
    """Returns the number of parameters that `text` names.

    >>> count("1.2b"), count("350m"), count("7000"), count("7e9"), count("7,000,000")
    (1200000000, 350000000, 7000, 7000000000, 7000000)
    """
    digits = re.sub("[_,]", "", text.strip().lower())
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmb]?)", digits)
    number = 0.0
    if found:
        with contextlib.suppress(ValueError):  # for text such as 1.2.3
            number = float(found[1]) * _SUFFIXES[found[2]]
    require(1 <= number < 1e15, "--parameters", text, "a number such as 1.2b, 350m or 7000")
    return round(number)


def _same_world(question: Question, profile: Profile) -> None:
    """Raises `ValueError` if the numbers of replicas or shards differ from those in the profile.

    The profile does not show how a different number of ranks would share the links.
    """
    for name in ("replicas", "shards"):
        given = getattr(question, name)
        measured = getattr(profile, name)
        if given not in (None, measured):
            was = f"{question.profile} was measured with {measured}"
            raise ValueError(
                f"--{name} is {given}, but {was}: measure again with detonation probe, or give"
                " --link"
            )


@dataclass(frozen=True)
class _Training:
    """Properties of a training run that a plan needs.

    Args:
        shapes: Shapes of the parameters on each shard.
        examples: Examples of a rank in a step; 0 if unknown.
        steps: Length of the run.
        losses_of: Recipe whose measured losses the plan uses.
        tuned: Each scheme with the optimizer that the recipe uses for it; empty without a recipe.
        settings: Function that returns the arguments to print for a scheme: with a recipe, the
            arguments that differ from the recipe; otherwise all arguments.
        optimizer: Function that returns the recipe's optimizer for the scheme with a given name;
            None without a recipe.
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
    optimizer: Callable[[str], OptimizerConfig | None] = lambda name: None


def _of_parameters(question: Question, profile: Profile | None) -> _Training:
    """Returns the training of a text model whose parameters are treated as one long vector."""
    replicas, shards = _world(question, profile)
    if replicas is None:
        replicas = 2
    if shards is None:
        shards = 1
    shape = (-(-count(question.parameters or "") // shards),)
    return _Training(replicas, shards, [{"all": shape}] * shards)


def _world(question: Question, profile: Profile | None) -> tuple[int | None, int | None]:
    """Returns the numbers of replicas and shards in the profile. Without a profile, returns the
    numbers that the user gave, or None.
    """
    if profile is None:
        return question.replicas, question.shards
    return profile.replicas, profile.shards


def _of_recipe(question: Question, profile: Profile | None) -> _Training:
    # Import here, because only a recipe needs models and FSDP, and their import takes a second.
    from detonation.train.choice.asked import Asked, Auto, settings_in, standing, trained
    from detonation.train.loop.checks import check_config, shard_shapes
    from detonation.train.recipe.resolve import read_layers

    assert question.recipe is not None
    replicas, shards = _world(question, profile)
    mesh = {"replicas": replicas, "shards": shards}
    layers = read_layers(question.recipe, question.overrides, mesh=mesh)
    config = check_config(standing(layers))
    allowed = "one level: schemes are ranked for one axis"
    require(len(config.levels) == 1, "scheme", config.schemes, allowed)
    tuned = [*trained(Asked(Auto(), layers).candidates()).values()]
    chosen = config.scheme
    train = config.train
    if chosen.name not in known_schemes():
        own = trained_by(config.optimizer.name, config.optimizer.arguments)
        tuned.append((scheme(chosen.name, chosen.arguments), own))
    shapes = shard_shapes(config)
    examples = train.batch_size * train.accumulate
    losses_of = task_of(config.model.name)
    settings = partial(settings_in, layers)
    return _Training(
        config.mesh.replicas,
        config.mesh.shards,
        shapes,
        train.accumulate,
        examples,
        train.steps,
        losses_of,
        tuned,
        settings,
        lambda name: layers.under(name, {}).optimizer,
    )


def _work(question: Question, profile: Profile | None, training: _Training) -> Work:
    measured = None
    if profile and question.step_time is None:
        measured = profile.compute
    seconds = question.step_time
    if measured is not None:
        shapes = [shape for shard in training.shapes for shape in shard.values()]
        _same_model(question, measured, sum(map(math.prod, shapes)))
        seconds = measured.forward_backward_s
        if training.examples and measured.examples:
            seconds *= training.examples / measured.examples
    if seconds is None:
        raise ValueError(
            "plan needs --step-time, the seconds of forward and backward, or a profile of the"
            " recipe"
        )
    require(0 < seconds <= 1e6, "--step-time", seconds, "above 0 and at most 1,000,000 seconds")
    steps: Mapping[str, Step] = {}
    if measured:
        steps = measured.steps
    reports = question.recipe is not None
    gpus = profile is not None and "nccl" in profile.backend
    return Work(training.shapes, seconds, steps, True, training.accumulate, reports, gpus)


def _same_model(question: Question, measured: Compute, parameters: int) -> None:
    """Raises `ValueError` if the profile holds the step time of another model."""
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
            f"{was}, and this model has {parameters:,}: probe again, or give --step-time"
        )
