"""Turns ranked options into advice: plain values for programs, and sentences for people."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import ParameterScheme, Scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work, changed, spelled
from detonation.plan.losses import Goal
from detonation.plan.search import BUDGET, Option, one_machine, options
from detonation.report.words import duration

LONG_WAIT = 0.5
"""The share of a step that a first choice may wait before the advice says what would help."""
LONGER_ROUNDS = (30, 100, 300, 500)
"""Steps of rounds that are offered without a measured loss."""


def advise(
    ranked: Sequence[Option],
    work: Work,
    network: Network,
    goal: Goal,
    budget: float = BUDGET,
    settings: Callable[[Scheme], Mapping[str, object]] = changed,
) -> dict[str, Any]:
    """Describes the plan: every option, the reason for the first, and the first on a slower and a faster network.

    settings: The arguments that choose a scheme where it is trained. `rate_bits_per_s` is None without a limit.
    """
    best = ranked[0]
    among = [(option.cost.scheme, option.optimizer) for option in ranked]
    pays, machines = _second_machine(ranked, network, goal)
    reason = why(ranked, network, goal, budget)
    if pays is False:  # what matters most comes first
        reason, machines = f"{machines}. With them {reason}", ""
    half, twice = (options(among, work, network.faster(times), goal, budget)[0] for times in (0.5, 2.0))
    return {
        "options": [row(option, goal) for option in ranked],
        "first": row(best, goal),
        "settings": {"name": best.cost.scheme.name, **settings(best.cost.scheme)},
        "reason": reason,
        "pays": pays,
        "notes": [*filter(None, [machines]), *_evidence(best), *_help(ranked, work, network, goal)],
        "baseline": f"full() with {goal.baseline}",
        "after_steps": goal.steps,
        "if_half_the_rate": row(half, goal),
        "if_twice_the_rate": row(twice, goal),
        "replicas": network.replicas,
        "shards": network.shards,
        "rate_bits_per_s": network.rate_bits_per_s if math.isfinite(network.rate_bits_per_s) else None,
        "budget": budget,
        "parameters": goal.parameters,
    }


def row(option: Option, goal: Goal) -> dict[str, Any]:
    """One option as plain values."""
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
    link = f"at {LinkSpeed(network.rate_bits_per_s)} per node" if network.replicas > 1 else "with one node"
    waits = f"it waits {best.cost.waiting:.0%} of a step of {duration(best.cost.total_s)} {link}"
    if best.is_full and best.cost.waiting <= budget:
        waits += f", within the budget of {budget:.0%}"
    seconds = best.seconds(goal)
    if seconds is None:
        return f"{best}: {waits}; its loss is not measured here"
    text = f"{best} reaches the loss of {goal.baseline} in full after {goal.steps:,} steps within {duration(seconds)}"
    full = next((each for each in ranked if each.is_full and each.optimizer == goal.baseline), None)
    if full is None or full is best:
        return f"{text}; {waits}"
    there = duration(goal.steps * full.cost.total_s)
    return f"{text}, full() with {goal.baseline} in {there}, of which it would wait {full.cost.waiting:.0%}; {waits}"


def _second_machine(ranked: Sequence[Option], network: Network, goal: Goal) -> tuple[bool | None, str]:
    """Says whether the other machines pay: against one with the same examples per step, and in the same seconds."""
    alone, seconds = one_machine(ranked, network, goal), ranked[0].seconds(goal)
    if alone is None or seconds is None:
        return None, ""
    optimizer, found, alone_s = alone
    known = f"one machine with {optimizer} and the same examples per step is there within {duration(alone_s)}"
    ahead = (seconds / alone_s) ** -found.exponent - 1  # of one machine's loss when the others are there
    if alone_s <= seconds:
        machines = f"{network.replicas} machines within {duration(seconds)}"
        return False, f"No second machine pays: {known}, {machines}, when the loss of one is {-ahead:.1%} lower"
    lead = f"{alone_s / seconds:.2g} times as long; in the same seconds its loss is {ahead:.1%} higher"
    return True, f"{network.replicas} machines pay: {known}, {lead}"


def _evidence(best: Option) -> list[str]:
    if best.estimate is None:
        return []
    found = best.estimate
    if found.interval == (0.0, 0.0):
        return []
    return [f"evidence: {found.verdict} to the baseline, on {found.evidence} ({found.loss.source})"]


def _help(ranked: Sequence[Option], work: Work, network: Network, goal: Goal) -> list[str]:
    """What would help where the first choice waits more than half of its time."""
    best = ranked[0]
    if best.cost.waiting <= LONG_WAIT:
        return []
    times = best.cost.exposed_s / (best.cost.compute_s + best.cost.step_s)
    lines = [f"more work per step: with {times:,.0f} times the examples (train.accumulate) half of a step is waiting"]
    known = [option for option in ranked[1:] if option.estimate and option.cost.waiting < 0.8 * best.cost.waiting]
    if known:
        less = min(known, key=lambda option: option.cost.waiting)
        assert less.estimate
        lines.append(f"fewer bytes: {less} waits {less.cost.waiting:.0%}, and its loss is {less.estimate.verdict}")
    longer = _longer_rounds(ranked, work, network, goal)
    if longer:
        waits = f"waits {longer.cost.waiting:.0%} of {duration(longer.cost.total_s)}"
        lines.append(f"longer rounds: {longer} {waits}; its loss is not measured here")
    return lines


def _longer_rounds(ranked: Sequence[Option], work: Work, network: Network, goal: Goal) -> Option | None:
    """The first measured scheme of rounds with longer ones: the shortest that wait at most half, or the longest."""
    rounds = [option for option in ranked if option.estimate and isinstance(option.cost.scheme, ParameterScheme)]
    if not rounds:
        return None
    now, optimizer = rounds[0].cost.scheme, rounds[0].optimizer
    found: list[Option] = []
    for every in LONGER_ROUNDS:
        if every > now.round.every and "every" in now.arguments:
            made = scheme(now.name, {**now.arguments, "every": every})
            found += options([(made, optimizer)], work, network, goal)
    unknown = [option for option in found if option.estimate is None]
    return next((option for option in unknown if option.cost.waiting <= LONG_WAIT), unknown[-1] if unknown else None)
