"""Losses: what schemes were measured to cost in loss, with where that stands."""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

from detonation.core.schemes.scheme import Scheme


@dataclass(frozen=True)
class Loss:
    """`cost`: validation loss over that of full synchronisation with AdamW at equal steps, minus 1.

    A mean over `seeds`. recipe, steps, replicas: of what was measured. source: the document that says how.
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
    """The largest loss that `scheme` was measured to cost at these settings; None where nobody has measured it."""
    found = [loss for loss in near(replicas) if loss.scheme == scheme.name and _same(loss, scheme)]
    return max(found, key=lambda loss: loss.cost, default=None)


UNTRIED = 0.02
"""What is added, in parts of the loss, to what a scheme was measured to cost at other settings than these."""


def expected(scheme: Scheme, replicas: int) -> float:
    """The loss that `scheme` is expected to cost, at least 0: what is below full synchronisation's is noise.

    What it was measured to cost; else the most that it was at other settings, and a little more; infinite where nobody
    has measured any.
    """
    measured = loss_of(scheme, replicas)
    if measured is not None:
        return max(0.0, measured.cost)
    relatives = [loss.cost for loss in near(replicas) if loss.scheme == scheme.name]
    return max(0.0, *relatives) + UNTRIED if relatives else math.inf


@cache
def near(replicas: int) -> tuple[Loss, ...]:
    """Of each setting and recipe what was measured with the most replicas up to so many, else with the fewest."""
    found: dict[str, Loss] = {}
    for loss in sorted(table(), key=lambda loss: (loss.replicas > replicas, abs(loss.replicas - replicas))):
        found.setdefault(repr((loss.scheme, sorted(loss.arguments.items()), loss.recipe)), loss)
    return tuple(found.values())


def _same(loss: Loss, scheme: Scheme) -> bool:
    """Whether the measured arguments are those of `scheme`, which has a value for each."""
    return all(scheme.arguments.get(name) == value for name, value in loss.arguments.items())


@cache
def table() -> tuple[Loss, ...]:
    """All that was measured, from losses.json beside this module."""
    text = resources.files("detonation.plan").joinpath("losses.json").read_text(encoding="utf-8")
    return tuple(Loss(**row) for row in json.loads(text))
