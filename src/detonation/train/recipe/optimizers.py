"""Base optimizers by name, and the schedule of their learning rate."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from detonation.choices import find_function, make
from detonation.core.optim import SignSGD
from detonation.muon.muon import Muon
from detonation.train.recipe.schema import OptimizerConfig, ScheduleConfig

RATIO = "lr_ratio"
"""Key in a parameter group. Its value is the learning rate of the group, divided by the learning
rate of the recipe. Only groups with a different learning rate have this key.
"""

REFUSED = {
    "LBFGS": (
        "it evaluates the loss several times per step, and replicas would not take the same number"
        " of evaluations"
    ),
    "SparseAdam": "it takes sparse gradients only, and sharded gradients are dense",
    **dict.fromkeys(("Adafactor", "Rprop"), "its step does not work on shards"),
}
"""Optimizers of torch that this library refuses, each with the reason."""


def optimizer_classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Returns the supported optimizers by name: classes of torch.optim, SignSGD, and a Muon that
    accepts parameters of all shapes.
    """
    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    classes |= {"SignSGD": SignSGD, "Muon": Muon}
    return {name: made for name, made in classes.items() if name not in (*REFUSED, "Optimizer")}


def require_optimizer(name: str) -> None:
    """Raises `ValueError` if an optimizer does not exist or is refused.

    Does not import or check a name such as "package.module:function".
    """
    if name in REFUSED:
        raise ValueError(
            f"optimizer {name} cannot be used: {REFUSED[name]}; choose another optimizer"
        )
    if ":" not in name:
        find_function("optimizer", name, optimizer_classes())


def check_optimizer(chosen: OptimizerConfig) -> None:
    """Raises `ValueError` if the optimizer `chosen` cannot be built with its arguments."""
    build_optimizer(chosen, torch.nn.Linear(1, 1, bias=False))


def build_optimizer(chosen: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer `chosen` over all parameters of `model`.

    The name is one of `optimizer_classes`, or "package.module:function" for a class or a function
    that takes parameter groups and `lr`. If parameter groups have different learning rates, the
    schedule scales each of these learning rates. Raises `ValueError` for a wrong name or argument.
    """
    arguments = dict(chosen.arguments)
    for key, value in arguments.items():
        if isinstance(value, list):
            arguments[key] = tuple(value)
    found = find_function("optimizer", chosen.name, optimizer_classes())
    function = partial(found, _groups(chosen, model))
    given = {"lr": chosen.lr, **arguments}
    try:
        made = make(
            "optimizer", {chosen.name: function}, chosen.name, given, ["embedding_lr_ratio"]
        )
    except (TypeError, RuntimeError, ValueError, LookupError) as error:
        if str(error).startswith(("unknown ", f"optimizer {chosen.name} needs")):
            raise
        raise ValueError(f"optimizer {chosen.name} does not accept {arguments}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer {chosen.name} returns a {type(made).__name__}, but must return"
            " a torch.optim.Optimizer"
        )
    for group in made.param_groups:
        if group.get("lr", chosen.lr) != chosen.lr:
            group[RATIO] = float(group["lr"]) / chosen.lr
    return made


def _groups(chosen: OptimizerConfig, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns the parameter groups of `model`: one group, or two groups if some parameters need
    other settings.

    For Muon, the second group holds the embeddings and the output layer, because AdamW updates
    them. If `embedding_lr_ratio` is not 1, the second group also holds the vectors (norms, biases).
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        layers.append(head)
    apart = {id(p) for layer in layers for p in layer.parameters()}
    every = list(model.parameters())
    options: dict[str, Any] = {}
    if chosen.embedding_lr_ratio != 1:
        apart |= {id(p) for p in every if p.ndim < 2}
        options["lr"] = chosen.embedding_lr_ratio * chosen.lr
    if chosen.name == "Muon":
        options["orthogonal"] = False
    if not options:
        return [{"params": every}]
    groups = (
        {"params": [p for p in every if id(p) not in apart]},
        {"params": [p for p in every if id(p) in apart], **options},
    )
    return [group for group in groups if group["params"]]


def lr_factor(schedule: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Returns the factor of the learning rate as a function of the step, from 0 to steps - 1.

    The factor at the first step is above 0; "linear" and "cosine" end at `floor`.

    >>> factor = lr_factor(ScheduleConfig("linear", warmup=2, floor=0.0), 5)
    >>> [round(factor(step), 2) for step in range(5)]
    [0.5, 1.0, 0.67, 0.33, 0.0]
    """

    def factor(step: int) -> float:
        if step < schedule.warmup:
            return (step + 1) / schedule.warmup
        if schedule.name == "constant":
            return 1.0
        if schedule.name == "step":
            passed = sum(step >= milestone * steps for milestone in schedule.milestones)
            return schedule.gamma**passed
        after = max(schedule.warmup - 1, 0)
        length = max(steps - 1 - after, 1)
        progress = min((step - after) / length, 1.0)
        if schedule.name == "linear":
            share = 1 - progress
        else:
            share = (1 + math.cos(math.pi * progress)) / 2
        return schedule.floor + (1 - schedule.floor) * share

    return factor
