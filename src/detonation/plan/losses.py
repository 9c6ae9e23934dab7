"""Measured losses: how much validation loss each scheme cost, how certain that is, and where it was measured."""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from detonation.core.schemes import registry
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import mean_bytes

STEPS_EXPONENT = 0.205
"""Loss falls as steps ** -0.205: AdamW with full synchronisation on quick-lm, seed 1, 300 and 1,200 steps
(research/frontier.md)."""
SPREAD = 0.07
"""Half of a 95 % interval of three seeds on text (docs/findings.md), for measurements that have none of their own."""


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
    def task(self) -> tuple[str, int]:
        """The problem that was trained: recipe and parameters."""
        return self.recipe, self.parameters

    @property
    def difference_seen(self) -> bool:
        """False where the interval contains zero; without an interval the mean is taken at its word."""
        return self.interval is None or not self.interval[0] <= 0 <= self.interval[1]

    @property
    def upper(self) -> float:
        """The upper end of the interval, or `SPREAD` above a mean that has none."""
        return self.cost + SPREAD if self.interval is None else self.interval[1]

    @property
    def slowdown(self) -> float:
        """Number of steps to a loss, relative to full synchronisation, at the upper end of the interval; at least 1.

        The upper end makes few seeds count less than many. A loss below that of full synchronisation is not counted on:
        it may be the optimizer's.
        """
        return float((1 + max(0.0, self.upper)) ** (1 / STEPS_EXPONENT))

    def fits(self, scheme: Scheme) -> bool:
        """True where `scheme` was measured at these settings."""
        same = all(scheme.arguments.get(name) == value for name, value in self.arguments.items())
        return scheme.name == self.scheme and same

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
    """The measurement of `scheme` that promises least: of the task where its upper end is largest.

    On a task where these settings were not tried, or with fewer replicas than others of the scheme, the best of those
    that send no more counts as well; where all send more, the one that sends least. So settings that were tried on
    little do not come first for that reason.

    Args:
        scheme: With its arguments.
        replicas: How many will train.
        optimizer: The one that will train under it, as `trained_by` names it. One that nobody has measured is taken for
            AdamW, because most need dense gradients as AdamW does. Without it, the best of each task counts.

    Returns:
        The measurement; None where these settings were not measured on any task.
    """
    wanted = optimizer if optimizer in {loss.optimizer for loss in loss_table()} else optimizer and "AdamW"
    tasks: dict[tuple[str, int], list[Loss]] = {}
    for loss in near(replicas):
        if loss.scheme == scheme.name and wanted in (None, loss.optimizer):
            tasks.setdefault(loss.task, []).append(loss)
    if not any(loss.fits(scheme) for same in tasks.values() for loss in same):
        return None
    return max((_counted_on(same, scheme) for same in tasks.values()), key=_upper)


def _counted_on(same: Sequence[Loss], scheme: Scheme) -> Loss:
    """The measurement of one task that counts for `scheme`; `same` has the nearest number of replicas first."""
    nearest = [loss for loss in same if loss.replicas == same[0].replicas]
    own = [loss for loss in nearest if loss.fits(scheme)]
    if own:
        return min(own, key=_upper)
    sent = [_sent(registry.scheme(loss.scheme, loss.arguments)) for loss in nearest]
    enough = max(_sent(scheme), min(sent))
    others = [loss for loss in same if loss.fits(scheme)], [nearest[i] for i in range(len(sent)) if sent[i] <= enough]
    return max((min(each, key=_upper) for each in others if each), key=_upper)


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
    """Selects one measurement per setting, optimizer and task, the nearest number of replicas first.

    It is the one with the most replicas up to `replicas`, else with the fewest, and of those the longest run.
    """

    def order(loss: Loss) -> tuple[bool, int, int]:
        return loss.replicas > replicas, abs(loss.replicas - replicas), -loss.steps

    found: dict[str, Loss] = {}
    for loss in sorted(loss_table(), key=order):
        found.setdefault(repr((loss.scheme, sorted(loss.arguments.items()), loss.optimizer, loss.task)), loss)
    return tuple(found.values())


@cache
def loss_table() -> tuple[Loss, ...]:
    """Reads all measurements from losses.json beside this module."""
    text = resources.files("detonation.plan").joinpath("losses.json").read_text(encoding="utf-8")
    return tuple(
        Loss(**{**row, "interval": tuple(row["interval"]) if row["interval"] else None}) for row in json.loads(text)
    )


_upper = operator.attrgetter("upper")


def _sent(scheme: Scheme) -> float:
    """Bytes per step that one of two replicas sends, of a few large tensors."""
    return mean_bytes(scheme, scheme.codec.layout({str(number): (1 << 16,) for number in range(16)}), replicas=2)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
