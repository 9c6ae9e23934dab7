"""Ranks schemes and optimizers by the expected time to a loss, and says why in plain values and
sentences."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detonation.core.schemes.registry import known_schemes, scheme
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import LargerThanDense
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Cost, Network, Work, changed, close_bytes, cost, spelled
from detonation.plan.losses import Estimate, Goal, estimate, loss_table, optimizers
from detonation.report.words import duration

BUDGET = 0.1
"""Default share of a step that full synchronisation may spend waiting for the network and still
come first."""

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

FEWEST_ROUNDS = 3

LONG_WAIT = 0.5
"""The share of a step that a first choice may wait before the advice says what would help."""

Candidate = tuple[Scheme, str]
"""A scheme, and the optimizer that trains under it, as `trained_by` names it."""


@dataclass(frozen=True)
class Option:
    """A scheme with its optimizer, the predicted cost of a step, and what is expected of the loss,
    None if unknown."""

    cost: Cost
    optimizer: str
    estimate: Estimate | None

    def seconds(self, goal: Goal) -> float | None:
        """Seconds until the run has surely reached the loss of its baseline; None if unknown."""
        return (
            None
            if self.estimate is None
            else goal.steps * self.cost.total_s * self.estimate.steps_factor
        )

    @property
    def is_full(self) -> bool:
        """True for full synchronisation with values that the network adds as they are."""
        return self.cost.scheme.name == "full" and self.cost.scheme.arguments["precision"] == "fp32"

    def __str__(self) -> str:
        return f"{spelled(self.cost.scheme)} with {self.optimizer}"


def settings(name: str) -> list[dict[str, Any]]:
    """Lists the arguments that are considered for a scheme: its defaults, `SETTINGS`, and all
    measured settings.

    Those that were measured are whole, for they may be laid over a recipe that has others.
    """
    measured = [dict(loss.arguments) for loss in loss_table() if loss.scheme == name]
    return [{}, *SETTINGS.get(name, []), *measured]


def candidate_settings() -> list[Scheme]:
    """Makes every registered scheme, those of users included, at all its `settings`."""
    found = [scheme(name, arguments) for name in known_schemes() for arguments in settings(name)]
    return list({(s.name, tuple(s.arguments.items())): s for s in found}.values())


def pairs(goal: Goal) -> list[Candidate]:
    """Pairs each candidate with the optimizer that must stay, or else with each that it was
    measured with.

    A scheme that nobody has measured comes once, with the optimizer of the baseline.
    """
    found: list[Candidate] = []
    for one in candidate_settings():
        known = (
            [goal.optimizer]
            if goal.optimizer
            else [o for o in optimizers() if estimate(one, o, goal)]
        )
        found += [(one, optimizer) for optimizer in known or [goal.baseline]]
    return found


def options(
    among: Iterable[Candidate], work: Work, network: Network, goal: Goal, budget: float = BUDGET
) -> list[Option]:
    """Ranks the candidates, best first; without those that send more than full synchronisation, or
    whose round is a third of the run or longer.

    Full synchronisation comes first where it waits at most `budget` of a step, and nothing is
    sooner by more than that. Those with a known loss follow, by the expected time to the loss of
    the run's baseline, then full synchronisation of an unknown loss, then the others by the time of
    a step, and schemes that exchange nothing. Of equal times the scheme that sends less comes
    first.
    """
    among = [(one, optimizer) for one, optimizer in among if _has_rounds(one, goal.steps)]
    prices = {
        name: _price(one, work, network)
        for name, one in {spelled(one): one for one, _ in among}.items()
    }
    priced = [(prices[spelled(one)], one, optimizer) for one, optimizer in among]
    ranked = [
        Option(price, optimizer, estimate(one, optimizer, goal))
        for price, one, optimizer in priced
        if price
    ]
    soonest = min(filter(None, (option.seconds(goal) for option in ranked)), default=math.inf)
    return sorted(ranked, key=lambda option: _order(option, goal, budget, (1 + budget) * soonest))


def _has_rounds(scheme: Scheme, steps: int) -> bool:
    """True where a run of `steps` has more than `FEWEST_ROUNDS` rounds: no loss was measured with so
    few."""
    return scheme.round.every == 1 or FEWEST_ROUNDS * scheme.round.every < steps


def one_machine(
    ranked: Sequence[Option], network: Network, goal: Goal
) -> tuple[str, Estimate, float] | None:
    """The fastest way to the loss on one machine that takes all the examples of a step: the
    optimizer, and seconds.

    Its steps take as many times longer as there are replicas, without a network. It may take each
    optimizer of the options. None where nothing is known.
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
        raise ValueError(
            f"budget is {budget!r}, must be a part of a step that may be waited for, between 0 and"
            " 1: 0.1"
        )
    return float(budget)


def largest_within(among: Iterable[Scheme], work: Work, network: Network, budget: float) -> Scheme:
    """Picks the setting of one scheme that sends most among those that wait at most `budget` of a
    step.

    Where nothing fits, those count whose step is at most `budget` longer than the shortest: where
    the wait is latency, fewer bytes gain nothing.
    """
    prices = [
        price for price in (_price(each, work, network) for each in among) if price is not None
    ]
    within = [price for price in prices if price.waiting <= budget]
    if within:
        return max(within, key=lambda price: (price.bytes_sent, spelled(price.scheme))).scheme
    longest = (1 + budget) * min(price.total_s for price in prices)
    return max(
        (price for price in prices if price.total_s <= longest), key=lambda price: price.bytes_sent
    ).scheme


def _price(candidate: Scheme, work: Work, network: Network) -> Cost | None:
    try:
        return cost(candidate, work, network)
    except LargerThanDense:
        return None


def _order(
    option: Option, goal: Goal, budget: float, late_s: float
) -> tuple[int, float, float, str]:
    seconds = option.seconds(goal)
    if option.is_full and option.cost.waiting <= budget and (seconds is None or seconds <= late_s):
        group = 0
    else:
        nothing, known = option.cost.scheme.signal == "nothing", seconds is not None
        group = 4 if nothing else 1 if known else 2 if option.is_full else 3
    per_step = option.cost.total_s if seconds is None else seconds / goal.steps
    return group, round(per_step, 6), option.cost.bytes_sent, str(option)


def advise(
    ranked: Sequence[Option],
    work: Work,
    network: Network,
    goal: Goal,
    budget: float = BUDGET,
    settings: Callable[[Scheme], Mapping[str, object]] = changed,
) -> dict[str, Any]:
    """Describes the plan: every option, the reason for the first, and the first on a slower and a
    faster network.

    settings: The arguments that choose a scheme where it is trained. `rate_bits_per_s`: None where
    nothing limits it.
    """
    best = ranked[0]
    among = [(option.cost.scheme, option.optimizer) for option in ranked]
    pays, machines = _second_machine(ranked, network, goal)
    reason = why(ranked, network, goal, budget)
    if pays is False:  # what matters most comes first
        reason, machines = f"{machines}. With them {reason}", ""
    found, evidence = best.estimate, list[str]()
    if found is not None and found.interval != (0.0, 0.0):
        evidence = [
            f"evidence: {found.verdict} to the baseline, on {found.evidence} ({found.loss.source})"
        ]
    half, twice = (
        options(among, work, network.faster(times), goal, budget)[0] for times in (0.5, 2.0)
    )
    return {
        "options": [row(option, goal) for option in ranked],
        "first": row(best, goal),
        "settings": {"name": best.cost.scheme.name, **settings(best.cost.scheme)},
        "reason": reason,
        "pays": pays,
        "notes": [*filter(None, [machines]), *evidence, *_help(ranked)],
        "baseline": f"full() with {goal.baseline}",
        "after_steps": goal.steps,
        "if_half_the_rate": row(half, goal),
        "if_twice_the_rate": row(twice, goal),
        "replicas": network.replicas,
        "shards": network.shards,
        "rate_bits_per_s": (
            rate
            if network.replicas > 1 and math.isfinite(rate := network.rate_bits_per_s)
            else None
        ),
        "budget": budget,
        "parameters": goal.parameters,
    }


def row(option: Option, goal: Goal) -> dict[str, Any]:
    cost, found, seconds = option.cost, option.estimate, option.seconds(goal)
    return {
        "scheme": cost.scheme.name,
        "spelled": spelled(cost.scheme),
        "arguments": dict(cost.scheme.arguments),
        "changed": changed(cost.scheme),
        "optimizer": option.optimizer,
        "optimizer_settings": dict(found.loss.settings) if found else {},
        "seconds": cost.total_s,
        "compute_s": cost.compute_s,
        "step_s": cost.step_s,
        "exposed_s": cost.exposed_s,
        "efficiency": 1 - cost.waiting,
        "bytes_per_step": cost.bytes_sent,
        "bytes_per_day": cost.bytes_per_day,
        "close_bytes_per_step": close_bytes(
            cost.scheme, option.optimizer, goal.parameters, goal.replicas
        ),
        "memory_bytes": cost.memory_bytes,
        "time_to_loss_s": seconds,
        "time_to_loss": "unknown" if seconds is None else duration(seconds),
        "loss_cost": found.cost if found else None,
        "loss_interval": list(found.interval) if found else None,
        "loss_text": found.verdict if found else "not measured",
        "loss_source": f"{found.evidence} ({found.loss.source})" if found else "not measured",
    }


def why(ranked: Sequence[Option], network: Network, goal: Goal, budget: float = BUDGET) -> str:
    """Says in a sentence or two what comes first, and how soon it is there."""
    best = ranked[0]
    link = (
        f"at {LinkSpeed(network.rate_bits_per_s)} per node"
        if network.replicas > 1
        else "with one node"
    )
    waits = f"it waits {best.cost.waiting:.0%} of a step of {duration(best.cost.total_s)} {link}"
    if best.is_full and best.cost.waiting <= budget:
        waits += f", within the budget of {budget:.0%}"
    seconds = best.seconds(goal)
    if seconds is None:
        return f"{best}: {waits}; its loss is not measured here"
    text = (
        f"{best} reaches the loss of {goal.baseline} in full after {goal.steps:,} steps within"
        f" {duration(seconds)}"
    )
    full = next((each for each in ranked if each.is_full and each.optimizer == goal.baseline), None)
    if full is None or full is best:
        return f"{text}; {waits}"
    there = duration(goal.steps * full.cost.total_s)
    return (
        f"{text}, full() with {goal.baseline} in {there}, of which it would wait"
        f" {full.cost.waiting:.0%}; {waits}"
    )


def _second_machine(
    ranked: Sequence[Option], network: Network, goal: Goal
) -> tuple[bool | None, str]:
    """Says whether the other machines pay: against one with the same examples per step, and in the
    same seconds."""
    alone, seconds = one_machine(ranked, network, goal), ranked[0].seconds(goal)
    if alone is None or seconds is None:
        return None, ""
    optimizer, found, alone_s = alone
    known = f"one machine with {optimizer} and the same examples per step has the baseline's loss"
    ahead = (
        seconds / alone_s
    ) ** -found.exponent - 1  # of one machine's loss when the others are there
    if alone_s <= seconds:
        both = f"within {duration(alone_s)}, {network.replicas} machines within {duration(seconds)}"
        return (
            False,
            f"No second machine pays: {known} {both}; by then that of one is {-ahead:.1%} lower",
        )
    lead = (
        f"{alone_s / seconds:.2g} times as long; in the same seconds its loss is {ahead:.1%} higher"
    )
    return True, f"{network.replicas} machines pay: {known} within {duration(alone_s)}, {lead}"


def _help(ranked: Sequence[Option]) -> list[str]:
    """Remedies where the first choice waits more than half of its time."""
    best = ranked[0]
    if best.cost.waiting <= LONG_WAIT:
        return []
    times = math.ceil(
        best.cost.exposed_s / (best.cost.compute_s + best.cost.step_s)
    )  # accumulate is a whole number
    lines = [
        f"more work per step: with {times:,} times the examples (train.accumulate) half of a step"
        " is waiting"
    ]
    known = [
        option
        for option in ranked[1:]
        if option.estimate and option.cost.waiting < 0.8 * best.cost.waiting
    ]
    if known:
        less = min(known, key=lambda option: option.cost.waiting)
        assert less.estimate
        lines.append(
            f"fewer bytes: {less} waits {less.cost.waiting:.0%}, and its loss is"
            f" {less.estimate.verdict}"
        )
    return lines
