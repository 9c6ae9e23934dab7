"""Ranks schemes and optimizers by the expected time to a loss."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from detonation.core.schemes.registry import SCHEMES, scheme
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import LargerThanDense
from detonation.plan.cost import Cost, Network, Work, cost, spelled
from detonation.plan.losses import Estimate, Goal, estimate, loss_table, optimizers

BUDGET = 0.1
"""Default share of a step that full synchronisation may spend waiting for the network and still come first."""

_VALUES = {"precision": "fp32", "error_feedback": True}
_SIGN = {"precision": "sign", "error_feedback": False}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "full": [{"precision": "bf16"}],
    "demo": [{"topk": topk, **precision} for topk in (1, 4, 16) for precision in (_VALUES, _SIGN)],
    "random": [{"rate": 1 / n} for n in (4, 16, 64)],
    "random_sign": [{"rate": 1 / n} for n in (2, 4, 8, 16)],
    "diloco": [{"every": every} for every in (20, 100, 500)],
}
"""Settings that are considered in addition to a scheme's defaults and its measured settings."""

Candidate = tuple[Scheme, str]
"""A scheme, and the optimizer that trains under it, as `trained_by` names it."""


@dataclass(frozen=True)
class Option:
    """A scheme with its optimizer, the predicted cost of a step, and what is expected of the loss, None if unknown."""

    cost: Cost
    optimizer: str
    estimate: Estimate | None

    def seconds(self, goal: Goal) -> float | None:
        """Seconds until the run has surely reached the loss of its baseline; None if unknown."""
        return None if self.estimate is None else goal.steps * self.cost.total_s * self.estimate.steps_factor

    @property
    def is_full(self) -> bool:
        """True for full synchronisation with values that the network adds as they are."""
        return self.cost.scheme.name == "full" and self.cost.scheme.arguments["precision"] == "fp32"

    def __str__(self) -> str:
        return f"{spelled(self.cost.scheme)} with {self.optimizer}"


def settings(name: str) -> list[dict[str, Any]]:
    """Lists the arguments that are considered for a scheme: its defaults, `SETTINGS`, and all measured settings.

    Those that were measured are whole, for they may be laid over a recipe that has others.
    """
    measured = [dict(loss.arguments) for loss in loss_table() if loss.scheme == name]
    return [{}, *SETTINGS.get(name, []), *measured]


def candidate_settings() -> list[Scheme]:
    """Makes every registered scheme, those of users included, at all its `settings`."""
    found = [scheme(name, arguments) for name in SCHEMES for arguments in settings(name)]
    return list({(s.name, tuple(s.arguments.items())): s for s in found}.values())


def pairs(goal: Goal, among: Iterable[Scheme] | None = None) -> list[Candidate]:
    """Pairs each scheme with the optimizer that must stay, or else with each that it was measured with.

    A scheme that nobody has measured comes once, with the optimizer of the baseline.
    """
    found: list[Candidate] = []
    for one in candidate_settings() if among is None else among:
        known = [goal.optimizer] if goal.optimizer else [o for o in optimizers() if estimate(one, o, goal)]
        found += [(one, optimizer) for optimizer in known or [goal.baseline]]
    return found


def options(
    among: Iterable[Candidate], work: Work, network: Network, goal: Goal, budget: float = BUDGET
) -> list[Option]:
    """Ranks the candidates, best first; leaves out those that would send more than full synchronisation.

    Full synchronisation comes first where it waits at most `budget` of a step. Those with a known loss follow, by the
    expected time to the loss of the run's baseline, then full synchronisation of an unknown loss, then the others by
    the time of a step, and schemes that exchange nothing. Of equal times the scheme that sends less comes first.
    """
    prices: dict[str, Cost | None] = {}
    ranked = []
    for candidate, optimizer in among:
        name = spelled(candidate)
        if name not in prices:
            prices[name] = _price(candidate, work, network)
        price = prices[name]
        if price is not None:
            ranked.append(Option(price, optimizer, estimate(candidate, optimizer, goal)))
    return sorted(ranked, key=lambda option: _order(option, goal, budget))


def one_machine(ranked: Sequence[Option], network: Network, goal: Goal) -> tuple[str, Estimate, float] | None:
    """The fastest way to the loss on one machine that takes all the examples of a step: the optimizer, and seconds.

    Its steps take as many times longer as there are replicas, without a network. It may take each optimizer of the
    options. None where nothing is known.
    """
    full = next((option.cost for option in ranked if option.is_full), None)
    if network.replicas == 1 or full is None:
        return None
    step_s, ways = network.replicas * full.compute_s + full.step_s, []
    for optimizer in dict.fromkeys(option.optimizer for option in ranked):
        found = estimate(full.scheme, optimizer, goal)
        if found:
            ways.append((optimizer, found, goal.steps * step_s * found.steps_factor))
    return min(ways, key=lambda way: way[2], default=None)


def check_budget(budget: float) -> float:
    """Returns `budget`; raises `ValueError` unless it is a number between 0 and 1, both excluded."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
        raise ValueError(f"budget is {budget!r}, must be a part of a step that may be waited for, between 0 and 1: 0.1")
    return float(budget)


def largest_within(among: Iterable[Scheme], work: Work, network: Network, budget: float) -> Scheme:
    """Picks the setting of one scheme that sends most among those that wait at most `budget` of a step.

    Where nothing fits the budget, the setting that waits least wins.
    """
    prices = [price for price in (_price(each, work, network) for each in among) if price is not None]
    within = [price for price in prices if price.waiting <= budget]
    if within:
        return max(within, key=lambda price: (price.bytes_sent, spelled(price.scheme))).scheme
    return min(prices, key=lambda price: (round(price.exposed_s, 6), -price.bytes_sent)).scheme


def _price(candidate: Scheme, work: Work, network: Network) -> Cost | None:
    try:
        return cost(candidate, work, network)
    except LargerThanDense:
        return None


def _order(option: Option, goal: Goal, budget: float) -> tuple[int, float, float, str]:
    seconds = option.seconds(goal)
    if option.is_full and option.cost.waiting <= budget:
        group = 0
    else:
        nothing, known = option.cost.scheme.signal == "nothing", seconds is not None
        group = 4 if nothing else 1 if known else 2 if option.is_full else 3
    per_step = option.cost.total_s if seconds is None else seconds / goal.steps
    return group, round(per_step, 6), option.cost.bytes_sent, str(option)
