"""Measured losses, and estimates for other runs from these losses: the loss of a run relative to a
baseline, and the steps to a given loss.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any

from detonation.core.schemes import Scheme
from detonation.plan.law import LONGEST, REPLICAS, SIZES, carried

TEXT = "quick-lm"
"""Recipe whose measured losses are used if the task of a model is unknown."""
GOAL_STEPS = 1000
"""Default number of steps of a run. It equals the longest measured run on text."""
STEPS_EXPONENT = 0.205
"""Assumed fall of the loss: proportional to steps ** -0.205. It was measured for AdamW with full
synchronisation on quick-lm with seed 1, at 300 and at 1,200 steps (research/frontier.md). A study
whose baseline was validated during training has its own exponent.
"""
HALVING = math.log10(10 / 3)
"""A lead over the baseline halves if training is 10 / 3 times as long. The constant is the decimal
logarithm of 10 / 3. Muon's lead over AdamW fell from 21.9 % at 300 steps to 10.9 % at 1,000 steps
(docs/findings.md).
"""
PER_DECADE = 0.01
"""For each factor of ten in parameters between the run and the measurement, the interval of an
estimate becomes wider by this value at both ends. The value is the largest measured change of a
mean relative loss, from 0.6 to 4.3 million parameters (docs/findings.md).
"""
PER_LONGER = 0.04
"""For each factor of ten in steps between the run and the measurement, the interval of an estimate
becomes wider by this value. With eight replicas, the lead of `random_sign` fell from 6.4 % at 300
steps to 1.2 % at 1,000 steps (docs/findings.md).
"""
PER_DOUBLING = 0.12
"""For each factor of two in replicas between the run and the measurement, the interval of an
estimate becomes wider by this value. The value is the largest measured change of a mean relative
loss, for AdamW with an exchange every 300 steps (docs/findings.md).
"""
PER_FEWER_ROUNDS = 0.034
"""For each factor of ten fewer rounds, the interval of an estimate becomes wider by this value
times log2(replicas). With an exchange every 30 steps and two replicas, the loss of `muloco`
relative to the baseline is +1.0 % over 100 rounds and +4.4 % over 10 rounds. With eight replicas
this loss is +6.2 % and +17.9 % (docs/findings.md).
"""
TWO_RATES = "embedding_lr_ratio"
"""Setting of an optimizer that gives embeddings, output layer and norms a learning rate of their
own. `_comparable` says when measurements with and without this setting may be compared.
"""
ONE_RATE = 0.099
"""If embeddings have a learning rate of their own, AdamW's loss after 300 steps on quick-lm is
lower by this fraction (docs/findings.md). So the planner reduces a lead over a baseline with one
learning rate by this fraction. Like a lead, the fraction shrinks in longer training: after 3,000
steps it was 2.7 %.
"""
SPREAD = 0.07
"""Half width of the 95 % interval of an estimate that comes from a single seed. It was measured
with three seeds on text (docs/findings.md).
"""
# fmt: off
STUDENT = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
    2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
    2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 2.040,
]
# fmt: on
"""Student's t for a two-sided 95 % interval, for 1 to 31 degrees of freedom."""


@dataclass(frozen=True)
class Loss:
    """One measurement: the final validation losses of a scheme with an optimizer.

    Args:
        scheme: Name of the scheme.
        arguments: Arguments of the scheme that affect training.
        optimizer: Class of the optimizer, as `trained_by` names it.
        settings: Arguments of the optimizer, with the best learning rate of those tried.
        study: Name of a study; its runs share data, batch and validation.
        recipe: Recipe of the runs.
        losses: Losses by seed. The learning rate was chosen with seed 0.
        curve: Steps and mean losses of validations during the runs.
        source: Document that describes the measurement.
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
        """True if full synchronisation of fp32 gradients was measured, which is a baseline."""
        return self.scheme == "full" and self.arguments["precision"] == "fp32"

    @property
    def has_two_rates(self) -> bool:
        """True if embeddings had a learning rate of their own. Muon updates embeddings by AdamW, so
        a run with Muon always has two learning rates.
        """
        return TWO_RATES in self.settings or self.optimizer.startswith("Muon")

    @property
    def has_law(self) -> bool:
        """True if the law of rounds (`plan/law.py`) predicts the loss for other model sizes and
        other numbers of replicas. The law holds for AdamW on text, in rounds of at most `LONGEST`
        steps that exchange all coordinates.
        """
        every = self.arguments.get("every")
        rounds = isinstance(every, int) and 1 < every <= LONGEST
        whole = "topk" not in self.arguments
        return rounds and whole and self.optimizer == "AdamW" and self.recipe == TEXT

    @property
    def task(self) -> tuple[str, str, int, int]:
        """The study, recipe, size and number of steps. Two losses are comparable if these values
        are equal.
        """
        return self.study, self.recipe, self.parameters, self.steps

    def doublings(self, replicas: int) -> float:
        """Returns how often the measured number of replicas must double to give `replicas`: a
        negative number for fewer replicas, and 0 for full synchronisation.
        """
        if self.scheme == "full":
            return 0.0
        return math.log2(replicas / self.replicas)

    def fits(self, scheme: Scheme) -> bool:
        """True if `scheme` was measured, with the same arguments."""
        same = all(scheme.arguments.get(name) == value for name, value in self.arguments.items())
        return scheme.name == self.scheme and same

    @property
    def conditions(self) -> str:
        size = f"{self.parameters / 1e6:.1f} M parameters"
        return f"{self.recipe}, {size}, {_counted(self.replicas, 'replica')}, {self.steps:,} steps"


@dataclass(frozen=True)
class Goal:
    """The training run for which a plan is made. Its goal is the loss of the baseline after `steps`
    steps.

    Args:
        recipe: Recipe with measured losses, see `task_of`.
        optimizer: The only allowed optimizer, as `trained_by` names it; None for any.
    """

    replicas: int
    parameters: int
    steps: int = GOAL_STEPS
    recipe: str = TEXT
    optimizer: str | None = None

    @cached_property
    def baseline(self) -> str:
        """The optimizer of the baseline. This is `optimizer` if full synchronisation was measured
        with `optimizer`, and otherwise AdamW.
        """
        known = any(loss.is_full and loss.optimizer == self.optimizer for loss in loss_table())
        if known and self.optimizer:
            return self.optimizer
        return "AdamW"


@dataclass(frozen=True)
class Estimate:
    """The estimate of the loss of a run, derived from one measurement.

    Args:
        cost: Loss relative to the baseline at equal steps; below 0 for a lower loss.
        interval: 95 % interval of `cost` over seeds, wider if the measurement differs from the run.
        seeds: Number of compared pairs of runs.
        exponent: The baseline's loss falls as steps ** -exponent.
        far: Differences between the run and the measurement, in words.
        reduced: Fraction by which a second learning rate would lower the baseline's loss, if `cost`
            takes this into account; otherwise 0.
        kind: "law" if the law of rounds gives `cost` for the size or the replicas of the run,
            otherwise "measured".
        beyond: True if the run has more parameters or replicas than the law was fitted to.
    """

    loss: Loss
    cost: float
    interval: tuple[float, float]
    seeds: int
    exponent: float
    far: tuple[str, ...] = field(default=())
    reduced: float = 0.0
    kind: str = "measured"
    beyond: bool = False

    @property
    def steps_factor(self) -> float:
        """Number of steps to the baseline's loss, divided by the steps of the baseline.

        The upper end of `interval` makes the factor more cautious if the measurement has few seeds
        or differs much from the run.
        """
        return float((1 + self.interval[1]) ** (1 / self.exponent))

    @property
    def verdict(self) -> str:
        """The loss relative to the loss of the baseline, with a 95 % interval, in percent."""
        if self.interval == (0.0, 0.0):
            return "the baseline"
        low, high = (f"{100 * end:+.1f}" for end in self.interval)
        return f"{self.cost:+.1%} [{low}, {high}]"

    @property
    def evidence(self) -> str:
        """The conditions of the measurement, and how the run differs from these conditions."""
        far = ""
        if self.far:
            far = f"; this run has {', '.join(self.far)}, for which the interval is wider"
        if self.kind == "law":
            fitted = (
                f"{SIZES[0] / 1e6:.0f} M to {SIZES[1] / 1e9:.1f} B parameters and up to"
                f" {REPLICAS} replicas"
            )
            far = f"; this run has {', '.join(self.far)}, and its cost follows the law of rounds"
            far += f", which was fitted for {fitted}"
            if self.beyond:
                far += ": this run exceeds that"
        rates = ""
        if self.reduced:
            rates = (
                "; the baseline there had one learning rate, and with a second one for embeddings"
                f" its loss would be {self.reduced:.1%} lower: the estimate includes this"
            )
        return f"{self.loss.conditions}, {_counted(self.seeds, 'seed')}{far}{rates}"


def estimate(scheme: Scheme, optimizer: str, goal: Goal) -> Estimate | None:
    """Returns the estimate for `scheme` with `optimizer`; None if no comparable run was measured.

    The estimate uses the nearest measurement of the goal's recipe, not the best one. The nearest
    measurement has the nearest number of replicas. Among measurements with equally near numbers of
    replicas, one with two learning rates is preferred to one with a single learning rate. Further
    ties are broken by the nearest number of steps, then the most seeds, then the nearest size. Size
    comes last, because it has the smallest effect.
    """
    found = [loss for loss in loss_table() if loss.optimizer == optimizer and loss.fits(scheme)]
    found = [loss for loss in found if loss.recipe == goal.recipe]
    full = [loss for loss in loss_table() if loss.is_full and loss.optimizer == goal.baseline]
    full.sort(key=lambda base: not base.has_two_rates)
    for loss in sorted(found, key=lambda loss: _distance(loss, goal)):
        for base in full:
            if _comparable(loss, base):
                return _expected(loss, base, goal)
    return None


def task_of(model: str) -> str:
    """Returns the recipe whose losses are used for the model with this name. This is the recipe for
    text, unless the name contains a key of `_TASKS`.

    >>> task_of("hf:google-t5/t5-base"), task_of("vit"), task_of("olmo2")
    ('t5-translation', 'vit-fashion', 'quick-lm')
    """
    return next((recipe for part, recipe in _TASKS.items() if part in model.lower()), TEXT)


def trained_by(name: str, settings: Mapping[str, Any]) -> str:
    """Returns the name of an optimizer as in `Loss`: its class, and "without momentum" if it has no
    momentum.

    Under a scheme that has momentum itself, the momentum of the optimizer makes a large difference
    (docs/findings.md).

    >>> trained_by("AdamW", {"lr": 1e-3, "betas": (0.0, 0.95)})
    'AdamW without momentum'
    """
    plain_adam = [*settings.get("betas", ())][:1] == [0]
    plain_muon = name == "Muon" and settings.get("momentum") == 0
    if plain_adam or plain_muon:
        return f"{name} without momentum"
    return name


def optimizers() -> list[str]:
    return list(dict.fromkeys(loss.optimizer for loss in loss_table()))


def recipes() -> list[str]:
    return list(dict.fromkeys(loss.recipe for loss in loss_table()))


@cache
def loss_table() -> tuple[Loss, ...]:
    """Returns all measurements, read from losses.json."""
    text = resources.files("detonation.plan").joinpath("losses.json").read_text(encoding="utf-8")
    rows = json.loads(text)
    for row in rows:
        row["losses"] = {int(seed): loss for seed, loss in row["losses"].items()}
    return tuple(Loss(**row) for row in rows)


def relative(
    losses: Mapping[int, float], base: Mapping[int, float]
) -> tuple[float, tuple[float, float] | None, int]:
    """Compares `losses` with `base` on the seeds that occur in both of them.

    Returns the mean difference divided by the mean of `base`, the 95 % interval of this value, and
    the number of pairs. Learning rates were chosen with seed 0, so seed 0 is used only if there is
    no other common seed. With fewer than three pairs there is no interval.
    """
    common = losses.keys() & base.keys()
    seeds = sorted(common - {0}) or sorted(common)
    differences = [losses[s] - base[s] for s in seeds]
    mean = statistics.fmean(base[s] for s in seeds)
    if len(seeds) < 3:
        return statistics.fmean(differences) / mean, None, len(seeds)
    middle, half = spread(differences)
    interval = (middle - half) / mean, (middle + half) / mean
    return middle / mean, interval, len(seeds)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of `values`, and half the width of the 95 % interval of this mean."""
    count = len(values)
    half = STUDENT[count - 2] * statistics.stdev(values) / math.sqrt(count)
    return statistics.fmean(values), half


_TASKS = {"vit": "vit-fashion", "t5": "t5-translation"}


def _distance(loss: Loss, goal: Goal) -> tuple[float, bool, float, int, float]:
    replicas = abs(loss.doublings(goal.replicas))
    steps = abs(math.log(loss.steps / goal.steps))
    size = abs(math.log(loss.parameters / goal.parameters))
    return replicas, not loss.has_two_rates, steps, -len(loss.losses), size


def _comparable(loss: Loss, base: Loss) -> bool:
    """True if `loss` and `base` have the same task and a seed in common. If both have the same
    optimizer, both must also have one learning rate, or both must have two. Otherwise the
    comparison would measure the second learning rate instead of the scheme.
    """
    same_rates = loss.optimizer != base.optimizer or loss.has_two_rates == base.has_two_rates
    return base.task == loss.task and bool(base.losses.keys() & loss.losses.keys()) and same_rates


def _second_rate(loss: Loss, base: Loss) -> float:
    """Returns the fraction by which a second learning rate would lower the loss of the baseline
    `base`, to which the measurement `loss` is compared.

    If a baseline has one learning rate, the lead of another optimizer over this baseline is partly
    due to the missing second learning rate. In measurements, the leads of Muon, SignSGD and votes
    shrank by 7 to 11 percentage points when AdamW got a second learning rate (docs/findings.md).

    Returns 0 if `base` already has two learning rates, or if the recipe does not train on text.
    Also returns 0 if `loss` and `base` have the same optimizer, because a second learning rate
    would lower both losses alike.
    """
    if base.has_two_rates or loss.optimizer == base.optimizer or loss.recipe != TEXT:
        return 0.0
    return ONE_RATE * _kept_lead(loss.steps / 300)


def _expected(loss: Loss, base: Loss, goal: Goal) -> Estimate:
    cost, interval, seeds = relative(loss.losses, base.losses)
    exponent = _exponent(base)
    if loss is base:
        return Estimate(loss, 0.0, (0.0, 0.0), seeds, exponent)
    low, high = interval or (cost - SPREAD, cost + SPREAD)
    reduced = _second_rate(loss, base)
    if reduced:
        cost, low, high = ((1 + value) / (1 - reduced) - 1 for value in (cost, low, high))
    length = goal.steps / loss.steps
    lead = _kept_lead(length)
    wider = _wider(loss, length)
    cost = _shorter(cost, lead)
    ends = (_shorter(low, lead) - wider, _shorter(high, lead) + wider)
    cost, ends = _at_size(loss, goal, cost, ends)
    moved = _moved(loss, goal)
    far = (*moved, *_times(length, "length"))
    kind = "measured"
    if moved and _uses_law(loss, goal):
        kind = "law"
    beyond = kind == "law" and (goal.parameters > SIZES[1] or goal.replicas > REPLICAS)
    return Estimate(loss, cost, ends, seeds, exponent, far, reduced, kind, beyond)


def _exponent(base: Loss) -> float:
    """Returns the exponent with which the loss of the baseline falls in the second half of its run.
    If the baseline was not validated after half of its steps, returns `STEPS_EXPONENT`.
    """
    curve = dict(base.curve)
    half = base.steps // 2
    if half in curve:
        return math.log2(curve[half] / curve[base.steps])
    return STEPS_EXPONENT


def _uses_law(loss: Loss, goal: Goal) -> bool:
    return loss.has_law and goal.replicas > 1


def _at_size(
    loss: Loss, goal: Goal, cost: float, ends: tuple[float, float]
) -> tuple[float, tuple[float, float]]:
    """Converts `cost` and the `ends` of its interval to the model size and replicas of `goal`.
    `cost` is the increase of the loss over the baseline's loss, as a fraction.

    If the law of rounds applies, it gives the new cost and interval. Otherwise the cost stays, and
    the interval becomes wider.
    """
    size = goal.parameters / loss.parameters
    if _uses_law(loss, goal):
        return carried(cost, ends, size, (loss.replicas, goal.replicas))
    wider = PER_DECADE * abs(math.log10(size))
    wider += PER_DOUBLING * abs(loss.doublings(goal.replicas))
    return cost, (max(-1.0, ends[0] - wider), ends[1] + wider)  # a loss is not below 0


def _moved(loss: Loss, goal: Goal) -> list[str]:
    """Describes in words how the number of replicas and the size of the run differ from those of
    the measurement.
    """
    found = _times(goal.parameters / loss.parameters, "size")
    if loss.doublings(goal.replicas):
        return [_counted(goal.replicas, "replica"), *found]
    return found


def _times(times: float, noun: str) -> list[str]:
    """Returns a factor as text in a list; an empty list if the factor is near 1."""
    if times >= 10:
        return [f"{times:,.0f} times the {noun}"]
    if not 0.5 < times < 2:
        return [f"{times:,.2g} times the {noun}"]
    return []


def _wider(loss: Loss, length: float) -> float:
    """Returns by how much the interval becomes wider at both ends in a run `length` times as long
    as the measurement.
    """
    wider = PER_LONGER * max(0.0, math.log10(length))
    if loss.arguments.get("every", 1) != 1:
        shorter = max(0.0, -math.log10(length))
        wider += PER_FEWER_ROUNDS * math.log2(loss.replicas) * shorter
    return wider


def _kept_lead(length: float) -> float:
    """Returns the part of a lead over the baseline that remains in a run `length` times as long as
    the measured run; at most 1.
    """
    return float(0.5 ** (max(0.0, math.log10(length)) / HALVING))


def _shorter(cost: float, factor: float) -> float:
    """Multiplies a lead over the baseline by `factor`, because leads shrink in longer training. A
    loss above the baseline does not change.
    """
    if cost < 0:
        return cost * factor
    return cost


def _counted(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"
