"""Base optimizers by name, checked before anything starts, and the schedule of their learning rate."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import detonation as dt
from detonation.choices import make
from detonation.train.recipe.schema import Optimizer, Schedule

_REFUSED = {
    "LBFGS": "it evaluates the loss several times a step, and replicas would not take the same number of evaluations",
    "SparseAdam": "it takes sparse gradients only, and sharded gradients are dense",
}


def table() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Every optimizer that a recipe can name: the classes of torch.optim, SignSGD, and a Muon that takes all shapes."""
    classes = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    usable = {n: c for n, c in classes.items() if issubclass(c, torch.optim.Optimizer) and n != "Optimizer"}
    return {**usable, "SignSGD": dt.SignSGD, "Muon": dt.Muon}


def check(chosen: Optimizer) -> None:
    """Raises `ValueError` unless `chosen` names an optimizer that can be built with its arguments."""
    build(chosen, torch.nn.Linear(1, 1, bias=False))


def build(chosen: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `chosen` describes, over all parameters of `model`."""
    if chosen.name in _REFUSED:
        raise ValueError(f"optimizer {chosen.name} cannot be used: {_REFUSED[chosen.name]}")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.arguments.items()}
    usable = {name: partial(value, _groups(chosen, model)) for name, value in table().items() if name not in _REFUSED}
    try:
        return make("optimizer", usable, chosen.name, {"lr": chosen.lr, **arguments})
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"optimizer {chosen.name} does not accept {arguments}: {error}") from error


def _groups(chosen: Optimizer, model: torch.nn.Module) -> list[dict[str, Any]]:
    """All parameters in one group; for Muon, embeddings and the output layer in another, which go by AdamW."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    apart = {id(p) for module in [*tables, head] if module is not None for p in module.parameters()}
    if chosen.name != "Muon" or not apart:
        return [{"params": list(model.parameters())}]
    inner = [p for p in model.parameters() if id(p) not in apart]
    return [{"params": inner}, {"params": [p for p in model.parameters() if id(p) in apart], "orthogonal": False}]


def lr_factor(schedule: Schedule, steps: int) -> Callable[[int], float]:
    """What lr is multiplied by at step 0 .. steps - 1; never 0 at the first step, `floor` at the last.

    >>> [round(lr_factor(Schedule("linear", warmup=2, floor=0.0), 5)(step), 2) for step in range(5)]
    [0.5, 1.0, 0.67, 0.33, 0.0]
    """

    def factor(step: int) -> float:
        if step < schedule.warmup:
            return (step + 1) / schedule.warmup
        after = max(schedule.warmup - 1, 0)
        progress = min((step - after) / max(steps - 1 - after, 1), 1.0)
        falls = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        share = falls[schedule.name]
        return 1.0 if schedule.name == "constant" else schedule.floor + (1 - schedule.floor) * share

    return factor
