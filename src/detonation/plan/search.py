"""Ranks schemes and optimizers by the expected time to a given loss, and explains the ranking."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detonation.core.schemes import LargerThanDense, Scheme, known_schemes, scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Cost, Network, Work, changed, close_bytes, cost, spelled
from detonation.plan.losses import Estimate, Goal, estimate, loss_table, optimizers
from detonation.report.words import duration

BUDGET = 0.1
"""Default budget: full synchronisation is the first choice if it waits for the network for at most
this share of a step.
"""

_VALUES = {"precision": "fp32", "error_feedback": True}
_SIGN = {"precision": "sign", "error_feedback": False}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "full": [{"precision": "bf16"}],
    "demo": [{"topk": topk, **precision} for topk in (1, 4, 16) for precision in (_VALUES, _SIGN)],
    "random": [{"rate": 1 / n} for n in (4, 16, 64)],
    "random_sign": [{"rate": 1 / n} for n in (2, 4, 8, 16)],
    "diloco": [{"every": every} for every in (20, 100, 500)],
}
"""Settings of each scheme to try, in addition to its defaults and its measured settings."""

FEWEST_ROUNDS = 3

LEAST_GAIN = 1.05
"""Several machines pay if a single machine takes at least this many times as long. Predicted times
are not exact enough to show a smaller gain.
"""
LONG_WAIT = 0.5
"""If the first choice waits for a larger share of a step, the advice names remedies."""

Candidate = tuple[Scheme, str]
"""A scheme, and the name of its optimizer as `trained_by` returns it."""


@dataclass(frozen=True)
class Option:
    """A scheme with an optimizer, its predicted cost, and the estimate of its loss if a loss was
    measured.
    """

    cost: Cost
    optimizer: str
    estimate: Estimate | None

    def seconds(self, goal: Goal) -> float | None:
        """Returns the seconds until the run reaches the baseline's loss, by a cautious estimate;
        None if unknown.
        """
        if self.estimate is None:
            return None
        return goal.steps * self.cost.total_s * self.estimate.steps_factor

    @property
    def is_full(self) -> bool:
        """True if the scheme is full synchronisation of fp32 values."""
        return self.cost.scheme.name == "full" and self.cost.scheme.arguments["precision"] == "fp32"

    def __str__(self) -> str:
        return f"{spelled(self.cost.scheme)} with {self.optimizer}"


def settings(name: str) -> list[dict[str, Any]]:
    """Returns the arguments with which a scheme is tried: its defaults, `SETTINGS`, and all
    measured settings.

    Measured settings contain all arguments that affect training, even those at their defaults. So
    they also override such arguments of a recipe.
    """
    measured = [dict(loss.arguments) for loss in loss_table() if loss.scheme == name]
    return [{}, *SETTINGS.get(name, []), *measured]


def candidate_settings() -> list[Scheme]:
    """Builds each registered scheme, including users' own, with all its `settings`."""
    found = [scheme(name, arguments) for name in known_schemes() for arguments in settings(name)]
    return list({(s.name, tuple(s.arguments.items())): s for s in found}.values())


def pairs(goal: Goal) -> list[Candidate]:
    """Returns each candidate scheme with the goal's optimizer. If the goal has no optimizer,
    returns each scheme with each optimizer with which the scheme was measured.

    A scheme without measurements appears only once, with the optimizer of the baseline.
    """
    found: list[Candidate] = []
    for one in candidate_settings():
        if goal.optimizer:
            known = [goal.optimizer]
        else:
            known = [o for o in optimizers() if estimate(one, o, goal)]
        found += [(one, optimizer) for optimizer in known or [goal.baseline]]
    return found


def options(
    among: Iterable[Candidate], work: Work, network: Network, goal: Goal, budget: float = BUDGET
) -> list[Option]:
    """Ranks the candidates; the best option comes first.

    Omits schemes that send more than full synchronisation, and schemes whose round is a third of
    the run or longer. The order is:

    1. Full synchronisation, if it waits for at most `budget` of a step, and if no option is faster
       by more than this share.
    2. Options with a known loss, by the expected time to the loss of the baseline.
    3. Full synchronisation with unknown loss.
    4. Other schemes with unknown loss, by the time of a step.
    5. Schemes that exchange nothing.

    If two times are equal, the scheme that sends fewer bytes comes first.
    """
    among = [(one, optimizer) for one, optimizer in among if _has_rounds(one, goal.steps)]
    schemes = {spelled(one): one for one, _ in among}
    prices = {name: _price(one, work, network) for name, one in schemes.items()}
    ranked = []
    for one, optimizer in among:
        price = prices[spelled(one)]
        if price:
            ranked.append(Option(price, optimizer, estimate(one, optimizer, goal)))
    times = (option.seconds(goal) for option in ranked)
    soonest = min(filter(None, times), default=math.inf)
    latest = (1 + budget) * soonest
    return sorted(ranked, key=lambda option: _order(option, goal, budget, latest))


def _has_rounds(scheme: Scheme, steps: int) -> bool:
    """True if a scheme exchanges in every step, or if a run of `steps` steps has more than
    `FEWEST_ROUNDS` rounds. No loss was measured with fewer rounds.
    """
    return scheme.round.every == 1 or FEWEST_ROUNDS * scheme.round.every < steps


def one_machine(
    ranked: Sequence[Option], network: Network, goal: Goal
) -> tuple[str, Estimate, float] | None:
    """Finds the optimizer with which a single machine is the first to reach the loss of the
    baseline. The machine processes all examples of each step. It has no network, but forward and
    backward take `replicas` times longer. The optimizers to choose from are those of the `ranked`
    options.

    Returns this optimizer, the estimate of its loss, and the seconds to the loss of the baseline.
    Returns None if no loss is known.
    """
    full = next((option.cost for option in ranked if option.is_full), None)
    if network.replicas == 1 or full is None:
        return None
    step_s = network.replicas * full.compute_s + full.step_s
    ways = []
    for optimizer in dict.fromkeys(option.optimizer for option in ranked):
        found = estimate(full.scheme, optimizer, goal)
        if found:
            ways.append((optimizer, found, goal.steps * step_s * found.steps_factor))
    return min(ways, key=lambda way: way[2], default=None)


def check_budget(budget: float) -> float:
    """Returns `budget`; raises `ValueError` unless it is a number above 0 and below 1."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
        raise ValueError(
            f"budget is {budget!r}, must be the share of a step that may be spent waiting, above"
            " 0 and below 1, such as 0.1"
        )
    return float(budget)


def _price(candidate: Scheme, work: Work, network: Network) -> Cost | None:
    try:
        return cost(candidate, work, network)
    except LargerThanDense:
        return None


def _order(
    option: Option, goal: Goal, budget: float, late_s: float
) -> tuple[int, float, float, str]:
    seconds = option.seconds(goal)
    per_step = option.cost.total_s
    if seconds is not None:
        per_step = seconds / goal.steps
    group = 3
    if option.is_full and option.cost.waiting <= budget and (seconds is None or seconds <= late_s):
        group = 0
    elif option.cost.scheme.signal == "nothing":
        group = 4
    elif seconds is not None:
        group = 1
    elif option.is_full:
        group = 2
    return group, round(per_step, 6), option.cost.bytes_sent, str(option)


def advise(
    ranked: Sequence[Option],
    work: Work,
    network: Network,
    goal: Goal,
    budget: float = BUDGET,
    settings: Callable[[Scheme], Mapping[str, object]] = changed,
) -> dict[str, Any]:
    """Describes the plan: all options, the reason for the first choice, and the first choices on a
    network of half the rate and of twice the rate.

    Args:
        settings: Function that returns the arguments to print for a scheme.
    """
    best = ranked[0]
    among = [(option.cost.scheme, option.optimizer) for option in ranked]
    pays, machines = _second_machine(ranked, network, goal)
    reason = why(ranked, network, goal, budget)
    notes = []
    # if several machines are not faster than one machine, this important fact comes first
    if pays is False:
        reason = f"{machines}. With them {reason}"
    elif machines:
        notes.append(machines)
    found = best.estimate
    if found is not None and found.interval != (0.0, 0.0):
        notes.append(
            f"evidence ({found.kind}): {found.verdict} to the baseline, on {found.evidence}"
            f" ({found.loss.source})"
        )
    half = options(among, work, network.faster(0.5), goal, budget)[0]
    twice = options(among, work, network.faster(2.0), goal, budget)[0]
    rate: float | None = network.rate_bits_per_s
    if network.replicas == 1 or not math.isfinite(network.rate_bits_per_s):
        rate = None
    return {
        "options": [row(option, goal) for option in ranked],
        "first": row(best, goal),
        "settings": {"name": best.cost.scheme.name, **settings(best.cost.scheme)},
        "reason": reason,
        "pays": pays,
        "notes": [*notes, *_help(ranked)],
        "baseline": f"full() with {goal.baseline}",
        "after_steps": goal.steps,
        "if_half_the_rate": row(half, goal),
        "if_twice_the_rate": row(twice, goal),
        "replicas": network.replicas,
        "shards": network.shards,
        "rate_bits_per_s": rate,
        "budget": budget,
        "parameters": goal.parameters,
    }


def row(option: Option, goal: Goal) -> dict[str, Any]:
    """Returns an option (a scheme with an optimizer) as a table of plain values."""
    cost = option.cost
    seconds = option.seconds(goal)
    expected: dict[str, Any] = {
        "time_to_loss_s": seconds,
        "time_to_loss": "unknown",
        "loss_cost": None,
        "loss_interval": None,
        "loss_kind": "not measured",
        "loss_text": "not measured",
        "loss_source": "not measured",
    }
    optimizer_settings: dict[str, Any] = {}
    if option.estimate is not None and seconds is not None:
        found = option.estimate
        optimizer_settings = dict(found.loss.settings)
        expected = {
            "time_to_loss_s": seconds,
            "time_to_loss": duration(seconds),
            "loss_cost": found.cost,
            "loss_interval": list(found.interval),
            "loss_kind": found.kind,
            "loss_text": f"{found.verdict}{', law' * (found.kind == 'law')}",
            "loss_source": f"{found.evidence} ({found.loss.source})",
        }
    close = close_bytes(cost.scheme, option.optimizer, goal.parameters, goal.replicas)
    return {
        "scheme": cost.scheme.name,
        "spelled": spelled(cost.scheme),
        "arguments": dict(cost.scheme.arguments),
        "changed": changed(cost.scheme),
        "optimizer": option.optimizer,
        "optimizer_settings": optimizer_settings,
        "seconds": cost.total_s,
        "compute_s": cost.compute_s,
        "step_s": cost.step_s,
        "exposed_s": cost.exposed_s,
        "efficiency": 1 - cost.waiting,
        "bytes_per_step": cost.bytes_sent,
        "bytes_per_day": cost.bytes_per_day,
        "close_bytes_per_step": close,
        "memory_bytes": cost.memory_bytes,
        **expected,
    }


def why(ranked: Sequence[Option], network: Network, goal: Goal, budget: float = BUDGET) -> str:
    """Returns text that names the first choice, and its time to the loss of the baseline."""
    best = ranked[0]
    link = "with one node"
    if network.replicas > 1:
        link = f"at {LinkSpeed(network.rate_bits_per_s)} per node"
    waits = (
        f"the first choice waits {best.cost.waiting:.0%} of a step of"
        f" {duration(best.cost.total_s)} {link}"
    )
    if best.is_full and best.cost.waiting <= budget:
        waits += f", within the budget of {budget:.0%}"
    seconds = best.seconds(goal)
    if seconds is None:
        return f"{best}: {waits}; its loss was not measured"
    text = (
        f"{best} reaches the loss that full() with {goal.baseline} has at step {goal.steps:,}"
        f" within {duration(seconds)}"
    )
    full = next((each for each in ranked if each.is_full and each.optimizer == goal.baseline), None)
    if full is None or full is best:
        return f"{text}; {waits}"
    there = duration(goal.steps * full.cost.total_s)
    return (
        f"{text}, full() with {goal.baseline} in {there}, of which waiting takes"
        f" {full.cost.waiting:.0%}; {waits}"
    )


def _second_machine(
    ranked: Sequence[Option], network: Network, goal: Goal
) -> tuple[bool | None, str]:
    """Compares the first choice with a single machine that processes the same examples per step.
    Returns whether several machines are faster (None if this is not known), and a sentence about
    this.
    """
    alone = one_machine(ranked, network, goal)
    seconds = ranked[0].seconds(goal)
    if alone is None or seconds is None:
        return None, ""
    optimizer, found, alone_s = alone
    known = f"one machine with {optimizer} and the same examples per step has the baseline's loss"
    # relative difference between the loss of one machine after `seconds` and the baseline's loss
    ahead = (seconds / alone_s) ** -found.exponent - 1
    if alone_s < LEAST_GAIN * seconds:
        text = (
            f"No second machine pays: {known} within {duration(alone_s)}, {network.replicas:,}"
            f" machines within {duration(seconds)}"
        )
        if ahead < -0.001:
            text += f"; by then the loss of one machine is {-ahead:.1%} lower"
        return False, text
    lead = f"{alone_s / seconds:.2g} times as long; after {duration(seconds)} its loss is"
    lead += f" {ahead:.1%} higher"
    return True, f"{network.replicas:,} machines pay: {known} within {duration(alone_s)}, {lead}"


def _help(ranked: Sequence[Option]) -> list[str]:
    """Returns remedies if the first choice waits for more than `LONG_WAIT` of a step; otherwise an
    empty list.
    """
    best = ranked[0]
    if best.cost.waiting <= LONG_WAIT:
        return []
    times = math.ceil(best.cost.exposed_s / (best.cost.compute_s + best.cost.step_s))
    lines = [
        f"more work per step: with {times:,} times the examples (train.accumulate), waiting takes"
        " half of a step"
    ]
    less_waiting = [each for each in ranked[1:] if each.cost.waiting < 0.8 * best.cost.waiting]
    known = [each for each in less_waiting if each.estimate]
    if known:
        less = min(known, key=lambda option: option.cost.waiting)
        assert less.estimate
        lines.append(
            f"fewer bytes: {less} waits {less.cost.waiting:.0%}, and its loss is"
            f" {less.estimate.verdict}"
        )
    return lines
