"""Base optimizers by name, checked before anything starts, and the schedule of their learning rate."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from detonation.choices import find_function, make
from detonation.core.optim.muon import Muon
from detonation.core.optim.signsgd import SignSGD
from detonation.train.recipe.schema import OptimizerConfig, ScheduleConfig

RATIO = "lr_ratio"
"""Key of a group whose learning rate differs from the recipe's: the first divided by the second."""

REFUSED = {
    "LBFGS": (
        "it evaluates the loss several times per step, and replicas would not take the same number"
        " of evaluations"
    ),
    "SparseAdam": "it takes sparse gradients only, and sharded gradients are dense",
    **dict.fromkeys(("Adafactor", "Rprop"), "torch has no step of it for shards"),
}
"""Optimizers of torch that cannot be used, and why."""


def optimizer_classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """The usable optimizers by name: classes of torch.optim, SignSGD, and a Muon that takes all
    shapes."""
    classes = {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    own: dict[str, Callable[..., torch.optim.Optimizer]] = {"SignSGD": SignSGD, "Muon": Muon}
    return {
        name: made for name, made in (classes | own).items() if name not in (*REFUSED, "Optimizer")
    }


def require_optimizer(name: str) -> None:
    """Raises `ValueError` for an optimizer that does not exist or cannot be used; imports none of
    one's own."""
    if name in REFUSED:
        raise ValueError(f"optimizer {name} cannot be used: {REFUSED[name]}")
    if ":" not in name:
        find_function("optimizer", name, optimizer_classes())


def check_optimizer(chosen: OptimizerConfig) -> None:
    """Raises `ValueError` unless `chosen` names an optimizer that can be built with its arguments."""
    build_optimizer(chosen, torch.nn.Linear(1, 1, bias=False))


def build_optimizer(chosen: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `chosen` describes, over all parameters of `model`.

    Besides `optimizer_classes`, a name may be "package.module:function" for a class or a function
    that takes parameter groups and `lr`. Where it gives groups learning rates of their own, the
    schedule scales each. Raises `ValueError` for a wrong name or argument.
    """
    arguments = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in chosen.arguments.items()
    }
    found = find_function("optimizer", chosen.name, optimizer_classes())
    function = partial(found, _groups(chosen, model))
    try:
        made = make(
            "optimizer", {chosen.name: function}, chosen.name, {"lr": chosen.lr, **arguments}
        )
    except (TypeError, RuntimeError, ValueError, LookupError) as error:
        if str(error).startswith(("unknown ", f"optimizer {chosen.name} needs")):
            raise
        raise ValueError(f"optimizer {chosen.name} does not accept {arguments}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer {chosen.name} makes a {type(made).__name__}, must make a"
            " torch.optim.Optimizer"
        )
    for group in made.param_groups:
        # the schedule moves each group in its own proportion
        if group.get("lr", chosen.lr) != chosen.lr:
            group[RATIO] = float(group["lr"]) / chosen.lr
    return made


def _groups(chosen: OptimizerConfig, model: torch.nn.Module) -> list[dict[str, Any]]:
    """All parameters in one group; for Muon, embeddings and the output layer in another, which
    AdamW updates."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    apart = {id(p) for module in [*tables, head] if module is not None for p in module.parameters()}
    if chosen.name != "Muon" or not apart:
        return [{"params": list(model.parameters())}]
    inner = [p for p in model.parameters() if id(p) not in apart]
    return [
        {"params": inner},
        {"params": [p for p in model.parameters() if id(p) in apart], "orthogonal": False},
    ]


def lr_factor(schedule: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """The factor of lr at step 0 .. steps - 1; never 0 at the first step; `floor` at the last of
    "linear" and "cosine".

    >>> [round(lr_factor(ScheduleConfig("linear", warmup=2, floor=0.0), 5)(step), 2) for step in range(5)]
    [0.5, 1.0, 0.67, 0.33, 0.0]
    """

    def factor(step: int) -> float:
        if step < schedule.warmup:
            return (step + 1) / schedule.warmup
        if schedule.name == "constant":
            return 1.0
        if schedule.name == "step":
            return schedule.gamma ** sum(
                step >= milestone * steps for milestone in schedule.milestones
            )
        after = max(schedule.warmup - 1, 0)
        progress = min((step - after) / max(steps - 1 - after, 1), 1.0)
        share = (
            1 - progress if schedule.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        )
        return schedule.floor + (1 - schedule.floor) * share

    return factor
