"""Measured losses: how much validation loss each scheme cost, how certain that is, and where it was measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from detonation.core.schemes.scheme import Scheme

STEPS_EXPONENT = 0.205
"""Loss falls as steps ** -0.205: AdamW with full synchronisation on quick-lm, seed 1, 300 and 1,200 steps
(docs/frontier.md)."""


@dataclass(frozen=True)
class Loss:
    """One measurement: the relative loss of a scheme and an optimizer over full synchronisation at equal steps.

    Args:
        scheme, arguments: Of the scheme that was measured; arguments that are left out may have any value.
        optimizer: The class that trained under it, as `trained_by` names it.
        cost: Validation loss over that of full synchronisation, minus 1; a mean over `seeds`. Full synchronisation has
            Muon where Muon trained, and AdamW otherwise.
        interval: The 95 % confidence interval of `cost`, paired over the seeds; None with fewer than three seeds, or
            where the runs of single seeds were not kept.
        recipe, parameters, steps, replicas: Of the runs that were measured.
        source: The document that describes the measurement.
    """

    scheme: str
    arguments: dict[str, object]
    optimizer: str
    cost: float
    interval: tuple[float, float] | None
    seeds: int
    recipe: str
    parameters: int
    steps: int
    replicas: int
    source: str

    @property
    def difference_seen(self) -> bool:
        """False where the interval contains zero; without an interval the mean is taken at its word."""
        return self.interval is None or not self.interval[0] <= 0 <= self.interval[1]

    @property
    def slowdown(self) -> float:
        """Expected number of steps to a loss, relative to full synchronisation; at least 1.

        A difference below full synchronisation is not counted on: it may be the optimizer's.
        """
        return float((1 + max(0.0, self.cost)) ** (1 / STEPS_EXPONENT))

    @property
    def verdict(self) -> str:
        """The difference in words, with half the width of its interval."""
        if self.interval == (0.0, 0.0):
            return "the baseline"
        if self.interval is None:
            return f"{self.cost:+.1%} ({_counted(self.seeds, 'seed')})"
        margin = f"±{(self.interval[1] - self.interval[0]) / 2:.1%}"
        return f"{self.cost:+.1%} {margin}" if self.difference_seen else f"no difference seen ({margin})"

    @property
    def conditions(self) -> str:
        """The evidence: optimizer, parameters, replicas and steps."""
        size = f"{self.parameters / 1e6:.1f} M parameters"
        return f"{self.optimizer}, {size}, {_counted(self.replicas, 'replica')}, {self.steps} steps"

    def __str__(self) -> str:
        return f"{self.verdict} on {self.recipe} ({self.conditions}, {_counted(self.seeds, 'seed')})"


def loss_of(scheme: Scheme, replicas: int, optimizer: str | None = None) -> Loss | None:
    """The loss measured for `scheme` at these settings on the recipe where it is largest, or None.

    Args:
        scheme: With its arguments.
        replicas: How many will train.
        optimizer: The one that will train under it, as `trained_by` names it. One that nobody has measured is taken for
            AdamW, because most need dense gradients as AdamW does. Without it, the best of each recipe counts.
    """
    wanted = optimizer if optimizer in {loss.optimizer for loss in loss_table()} else optimizer and "AdamW"
    best: dict[str, Loss] = {}
    for loss in near(replicas):
        same = all(scheme.arguments.get(name) == value for name, value in loss.arguments.items())
        if loss.scheme == scheme.name and same and wanted in (None, loss.optimizer):
            best[loss.recipe] = min(loss, best.get(loss.recipe, loss), key=lambda loss: loss.cost)
    return max(best.values(), key=lambda loss: loss.cost, default=None)


def trained_by(name: str, settings: Mapping[str, Any]) -> str:
    """How an optimizer is named in `Loss`: by its class, and whether it has no momentum of its own.

    Under a scheme that remembers a momentum that makes a large difference (docs/findings.md).

    Args:
        name: Of its class.
        settings: Its defaults, or those that a recipe gives.

    Example:
        >>> trained_by("AdamW", {"lr": 1e-3, "betas": (0.0, 0.95)})
        'AdamW without momentum'
    """
    without = settings.get("betas", (None,))[0] == 0 or (name == "Muon" and settings.get("momentum") == 0)
    return f"{name} without momentum" if without else name


@cache
def near(replicas: int) -> tuple[Loss, ...]:
    """Selects one measurement per setting, optimizer and recipe.

    It is the one with the most replicas up to `replicas`, else with the fewest.
    """
    found: dict[str, Loss] = {}
    for loss in sorted(loss_table(), key=lambda loss: (loss.replicas > replicas, abs(loss.replicas - replicas))):
        found.setdefault(repr((loss.scheme, sorted(loss.arguments.items()), loss.optimizer, loss.recipe)), loss)
    return tuple(found.values())


@cache
def loss_table() -> tuple[Loss, ...]:
    """Reads all measurements from losses.json beside this module."""
    text = resources.files("detonation.plan").joinpath("losses.json").read_text(encoding="utf-8")
    return tuple(
        Loss(**{**row, "interval": tuple(row["interval"]) if row["interval"] else None}) for row in json.loads(text)
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
