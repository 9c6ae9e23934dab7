"""Measured losses: how much validation loss each scheme cost, and where the measurement is documented."""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

from detonation.core.schemes.scheme import Scheme

UNTRIED = 0.02
"""Relative loss that is added where a scheme was measured only at other settings."""


@dataclass(frozen=True)
class Loss:
    """One measurement: the relative loss of a scheme over full synchronisation with AdamW at equal steps.

    Args:
        scheme, arguments: Of the scheme that was measured; arguments that are left out may have any value.
        cost: Validation loss over that of full synchronisation, minus 1; a mean over `seeds`.
        recipe, steps, replicas: Of the run that was measured.
        source: The document that describes the measurement.
    """

    scheme: str
    arguments: dict[str, object]
    cost: float
    seeds: int
    recipe: str
    steps: int
    replicas: int
    source: str

    def __str__(self) -> str:
        return f"{self.cost:+.1%} on {self.recipe} ({self.steps} steps, {self.replicas} replicas, {self.seeds} seeds)"


def loss_of(scheme: Scheme, replicas: int) -> Loss | None:
    """Returns the largest loss measured for `scheme` at these settings, over all recipes, or None."""
    found = [
        loss
        for loss in near(replicas)
        if loss.scheme == scheme.name
        and all(scheme.arguments.get(name) == value for name, value in loss.arguments.items())
    ]
    return max(found, key=lambda loss: loss.cost, default=None)


def expected(scheme: Scheme, replicas: int) -> float:
    """Predicts the relative loss that `scheme` costs, at least 0: differences below full synchronisation are noise.

    Returns the measured loss. Without one, returns the largest loss measured at other settings of the scheme plus
    `UNTRIED`, and infinity where the scheme was never measured.
    """
    measured = loss_of(scheme, replicas)
    if measured is not None:
        return max(0.0, measured.cost)
    relatives = [loss.cost for loss in near(replicas) if loss.scheme == scheme.name]
    return max(0.0, *relatives) + UNTRIED if relatives else math.inf


@cache
def near(replicas: int) -> tuple[Loss, ...]:
    """Selects one measurement per setting and recipe: with the most replicas up to `replicas`, else with the fewest."""
    found: dict[str, Loss] = {}
    for loss in sorted(loss_table(), key=lambda loss: (loss.replicas > replicas, abs(loss.replicas - replicas))):
        found.setdefault(repr((loss.scheme, sorted(loss.arguments.items()), loss.recipe)), loss)
    return tuple(found.values())


@cache
def loss_table() -> tuple[Loss, ...]:
    """Reads all measurements from losses.json beside this module."""
    text = resources.files("detonation.plan").joinpath("losses.json").read_text(encoding="utf-8")
    return tuple(Loss(**row) for row in json.loads(text))
