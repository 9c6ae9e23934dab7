"""Measured losses, and what they say about a run: its loss relative to a baseline, and the steps to
a loss."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from detonation.core.schemes.scheme import Scheme

TEXT = "quick-lm"
"""The recipe whose losses count for a model of which nothing else is known."""
GOAL_STEPS = 1000
"""The length of a run of which nothing is said: that of the longest measured on text."""
STEPS_EXPONENT = 0.205
"""Loss falls as steps ** -0.205: AdamW with full synchronisation on quick-lm, seed 1, 300 and 1,200
steps (research/frontier.md). For a study whose baseline was validated on the way, its own curve
counts."""
HALVING = math.log10(10 / 3)
"""A lead halves for each so many powers of ten of a longer goal: Muon's over AdamW from 300 to
1,000 steps, -21.9 % to -10.9 % (docs/findings.md)."""
PER_DECADE = 0.01
"""How much wider an interval grows at both ends for each factor of ten in parameters: the largest
change of a mean from 0.6 to 4.3 million parameters (docs/findings.md)."""
PER_LONGER = 0.04
"""The same for each factor of ten in length: `random_sign` with eight replicas lost more than half
of its lead from 300 to 1,000 steps, -6.4 % to -1.2 % (docs/findings.md)."""
PER_DOUBLING = 0.12
"""The same for each factor of two in replicas: the largest change of a mean, AdamW every 300
(docs/findings.md)."""
PER_FEWER_ROUNDS = 0.034
"""The same for each factor of ten by which a run has fewer rounds, times log2(replicas): `muloco`
every 30 over 100 and over 10 rounds, +1.0 and +4.4 % with two replicas, +6.2 and +17.9 % with eight
(docs/findings.md)."""
SPREAD = 0.07
"""Half of a 95 % interval of three seeds on text (docs/findings.md), for a single seed."""
# fmt: off
STUDENT = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 2.040,
]
# fmt: on
"""Student's t for a two-sided 95 % interval, from 1 degree of freedom to 31."""


@dataclass(frozen=True)
class Loss:
    """One measurement: the validation losses of a scheme and an optimizer at the end of their runs.

    Args:
        scheme, arguments: Of the scheme that was measured; its other arguments do not change what
            is trained.
        optimizer: The class that trained under it, as `trained_by` names it.
        settings: Its arguments, at the best learning rate of those tried.
        study: Its runs have the same data, batch and validation.
        recipe, parameters, steps, replicas: Of the runs.
        losses: By seed. Seed 0 chose the learning rate.
        curve: Steps and mean losses on the way, where the runs were validated there.
        source: The document that describes the measurement.
    """

    scheme: str
    arguments: Mapping[str, object]
    optimizer: str
    settings: Mapping[str, Any]
    study: str
    recipe: str
    parameters: int
    steps: int
    replicas: int
    losses: Mapping[int, float]
    source: str
    curve: Sequence[tuple[int, float]] = ()

    @property
    def is_full(self) -> bool:
        """True for full synchronisation of fp32 gradients, a baseline."""
        return self.scheme == "full" and self.arguments["precision"] == "fp32"

    @property
    def task(self) -> tuple[str, str, int, int]:
        """The training and its length: losses of one task can be compared."""
        return self.study, self.recipe, self.parameters, self.steps

    def doublings(self, replicas: int) -> float:
        """How often the replicas of the measurement double to `replicas`; 0 for full
        synchronisation at any number."""
        return 0.0 if self.scheme == "full" else math.log2(replicas / self.replicas)

    def fits(self, scheme: Scheme) -> bool:
        """True where `scheme` was measured at these settings."""
        same = all(scheme.arguments.get(name) == value for name, value in self.arguments.items())
        return scheme.name == self.scheme and same

    @property
    def conditions(self) -> str:
        size = f"{self.parameters / 1e6:.1f} M parameters"
        return f"{self.recipe}, {size}, {_counted(self.replicas, 'replica')}, {self.steps:,} steps"


@dataclass(frozen=True)
class Goal:
    """The training that a plan is for.

    Args:
        steps: Its length; the baseline's loss after so many steps is to be reached.
        recipe: One of those whose losses were measured (`task_of`).
        optimizer: The one that must stay, as `trained_by` names it; None where any may train.
    """

    replicas: int
    parameters: int
    steps: int = GOAL_STEPS
    recipe: str = TEXT
    optimizer: str | None = None

    @property
    def baseline(self) -> str:
        """The optimizer whose full synchronisation everything is compared with: the one that stays,
        or AdamW."""
        known = any(loss.is_full and loss.optimizer == self.optimizer for loss in loss_table())
        return self.optimizer if known and self.optimizer else "AdamW"


@dataclass(frozen=True)
class Estimate:
    """The expectation of a run from a measurement.

    Args:
        cost: The loss of the run relative to that of the baseline at equal steps; below 0 for a
            lower loss.
        interval: 95 % of `cost` over seeds, wider the farther the measurement is from the run.
        seeds: Pairs of runs that were compared.
        exponent: The baseline's loss falls as steps to the power of minus this.
        far: In what the run differs from the measurement, in words.
    """

    loss: Loss
    cost: float
    interval: tuple[float, float]
    seeds: int
    exponent: float
    far: tuple[str, ...] = field(default=())

    @property
    def steps_factor(self) -> float:
        """Steps to the baseline's loss, over the baseline's own, at the upper end of the interval.

        The upper end makes few seeds and far evidence count less than many seeds and near evidence.
        """
        return float((1 + self.interval[1]) ** (1 / self.exponent))

    @property
    def verdict(self) -> str:
        """The difference with its interval, in percent."""
        if self.interval == (0.0, 0.0):
            return "the baseline"
        low, high = (f"{100 * end:+.1f}" for end in self.interval)
        return f"{self.cost:+.1%} [{low}, {high}]"

    @property
    def evidence(self) -> str:
        """Where it was measured, and how far that is from the run."""
        far = (
            f"; this run has {', '.join(self.far)}, for which the interval is wider"
            if self.far
            else ""
        )
        return f"{self.loss.conditions}, {_counted(self.seeds, 'seed')}{far}"


def estimate(scheme: Scheme, optimizer: str, goal: Goal) -> Estimate | None:
    """The expectation of `scheme` under `optimizer` in `run`; None where nothing comparable was
    measured.

    Of several measurements the nearest counts, never the best: first by replicas, then by steps,
    then the one of most seeds, then by size, which changes least. Losses of another recipe than the
    run's do not count.
    """
    found = [loss for loss in loss_table() if loss.optimizer == optimizer and loss.fits(scheme)]
    near = sorted(
        (loss for loss in found if loss.recipe == goal.recipe),
        key=lambda loss: _distance(loss, goal),
    )
    full = [loss for loss in loss_table() if loss.is_full and loss.optimizer == goal.baseline]
    for loss in near:
        base = next(
            (
                each
                for each in full
                if each.task == loss.task and set(each.losses) & set(loss.losses)
            ),
            None,
        )
        if base is not None:
            return _expected(loss, base, goal)
    return None


def task_of(model: str) -> str:
    """The recipe whose losses count for a model by its name: of images, of translation, or else of
    text.

    >>> task_of("hf:google-t5/t5-base"), task_of("vit"), task_of("olmo2")
    ('t5-translation', 'vit-fashion', 'quick-lm')
    """
    return next((recipe for part, recipe in _TASKS.items() if part in model.lower()), TEXT)


def trained_by(name: str, settings: Mapping[str, Any]) -> str:
    """How an optimizer is named in `Loss`: by its class, and whether it has no momentum of its own.

    Under a scheme that remembers a momentum that makes a large difference (docs/findings.md).

    >>> trained_by("AdamW", {"lr": 1e-3, "betas": (0.0, 0.95)})
    'AdamW without momentum'
    """
    without = [*settings.get("betas", ())][:1] == [0] or (
        name == "Muon" and settings.get("momentum") == 0
    )
    return f"{name} without momentum" if without else name


def optimizers() -> list[str]:
    return list(dict.fromkeys(loss.optimizer for loss in loss_table()))


def recipes() -> list[str]:
    return list(dict.fromkeys(loss.recipe for loss in loss_table()))


@cache
def loss_table() -> tuple[Loss, ...]:
    text = resources.files("detonation.plan").joinpath("losses.json").read_text(encoding="utf-8")
    rows = [
        {**row, "losses": {int(seed): loss for seed, loss in row["losses"].items()}}
        for row in json.loads(text)
    ]
    return tuple(Loss(**row) for row in rows)


def relative(
    losses: Mapping[int, float], base: Mapping[int, float]
) -> tuple[float, tuple[float, float] | None, int]:
    """The mean difference of `losses` to `base` on equal seeds, over the mean of `base`; its 95 %
    interval; the pairs.

    Seed 0 chose learning rates, so it counts only where no other seed is common. Two pairs have no
    interval.
    """
    seeds = sorted(set(losses) & set(base) - {0}) or sorted(set(losses) & set(base))
    differences, mean = (
        [losses[s] - base[s] for s in seeds],
        statistics.fmean(base[s] for s in seeds),
    )
    if len(seeds) < 3:
        return statistics.fmean(differences) / mean, None, len(seeds)
    middle, half = spread(differences)
    return middle / mean, ((middle - half) / mean, (middle + half) / mean), len(seeds)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


_TASKS = {"vit": "vit-fashion", "t5": "t5-translation"}


def _distance(loss: Loss, goal: Goal) -> tuple[float, float, int, float]:
    steps, size = math.log(loss.steps / goal.steps), math.log(loss.parameters / goal.parameters)
    return abs(loss.doublings(goal.replicas)), abs(steps), -len(loss.losses), abs(size)


def _expected(loss: Loss, base: Loss, goal: Goal) -> Estimate:
    cost, interval, seeds = relative(loss.losses, base.losses)
    curve, half = dict(base.curve), base.steps // 2  # how fast its loss falls at the end of its run
    exponent = math.log2(curve[half] / curve[base.steps]) if half in curve else STEPS_EXPONENT
    if loss is base:
        return Estimate(loss, 0.0, (0.0, 0.0), seeds, exponent)
    low, high = interval or (cost - SPREAD, cost + SPREAD)
    size, length, doublings = (
        goal.parameters / loss.parameters,
        goal.steps / loss.steps,
        loss.doublings(goal.replicas),
    )
    longer, shorter = max(0.0, math.log10(length)), max(0.0, -math.log10(length))
    wider = PER_DECADE * abs(math.log10(size)) + PER_DOUBLING * abs(doublings) + PER_LONGER * longer
    if loss.arguments.get("every", 1) != 1:
        wider += PER_FEWER_ROUNDS * math.log2(loss.replicas) * shorter
    lead = 0.5 ** (longer / HALVING)
    far = [_counted(goal.replicas, "replica")] if doublings else []
    for times, noun in ((size, "size"), (length, "length")):
        if not 0.5 < times < 2:
            far.append(
                f"{times:,.2g} times the {noun}" if times < 10 else f"{times:,.0f} times the {noun}"
            )
    ends = (_shorter(low, lead) - wider, _shorter(high, lead) + wider)
    return Estimate(loss, _shorter(cost, lead), ends, seeds, exponent, tuple(far))


def _shorter(cost: float, factor: float) -> float:
    """A lead shrinks in a longer run; a loss that is higher is taken to stay so."""
    return cost * factor if cost < 0 else cost


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
