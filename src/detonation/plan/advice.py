"""Turns ranked options into advice: plain values for programs and a reason in words."""

from collections.abc import Sequence
from typing import Any

from detonation.core.schemes.registry import scheme
from detonation.plan.choice import BUDGET, choose
from detonation.plan.cost import Network, Work
from detonation.plan.search import TOLERANCE, Option, break_even, options
from detonation.plan.spelling import spelled


def advise(ranked: Sequence[Option], work: Work, network: Network) -> dict[str, Any]:
    """Describes the plan: every option, the reason for the first, and the first on a slower and a faster network.

    `auto` in the result is the choice that `scheme = "auto"` makes with its default budget.
    """
    best = ranked[0]
    candidates = [option.cost.scheme for option in ranked]
    half, twice = (options(candidates, work, network.faster(times))[0] for times in (0.5, 2.0))
    return {
        "options": [row(option) for option in ranked],
        "first": row(best),
        "reason": reason(best, ranked, network),
        "if_half_the_rate": row(half),
        "if_twice_the_rate": row(twice),
        "break_even_times": break_even(best.cost.scheme, scheme("full", {}), work, network),
        "replicas": network.replicas,
        "shards": network.shards,
        "rate_bits_per_s": network.rate_bits_per_s,
        "auto": row(choose(ranked, BUDGET)),
        "auto_budget": BUDGET,
    }


def row(option: Option) -> dict[str, Any]:
    """One option as plain values."""
    cost, loss = option.cost, option.loss
    return {
        "scheme": cost.scheme.name,
        "spelled": spelled(cost.scheme),
        "arguments": dict(cost.scheme.arguments),
        "seconds": cost.total_s,
        "compute_s": cost.compute_s,
        "step_s": cost.step_s,
        "exposed_s": cost.exposed_s,
        "efficiency": cost.efficiency,
        "bytes_per_step": cost.bytes_sent,
        "bytes_per_day": cost.bytes_per_day,
        "memory_bytes": cost.memory_bytes,
        "loss_cost": loss.cost if loss else None,
        "loss_source": f"{loss}, {loss.source}" if loss else "unknown",
    }


def reason(best: Option, ranked: Sequence[Option], network: Network) -> str:
    """Explains in a few sentences why `best` is ranked first."""
    full = next((o for o in ranked if o.cost.scheme.name == "full" and o.cost.scheme.codec.precision.summable), None)
    cost = best.cost
    text = f"{spelled(cost.scheme)} waits {cost.exposed_s:.3g} s for the network in a step of {cost.total_s:.3g} s"
    if full is not None and full is not best:
        text += f", {full.cost.total_s / cost.total_s:.3g} times as fast as full synchronisation"
    if best.loss is not None:
        text += f"; its measured cost in loss is {best.loss}"
    faster = [o for o in ranked if o.cost.total_s < 0.98 * cost.total_s and o.cost.scheme.signal != "nothing"]
    if faster:
        fastest = min(faster, key=lambda option: option.cost.total_s)
        why = f"cost {fastest.loss.cost:+.1%} in loss" if fastest.loss else "have an unknown cost in loss"
        times = cost.total_s / fastest.cost.total_s
        text += (
            f". {len(faster)} would be faster, such as {spelled(fastest.cost.scheme)} ({times:.2f} times), but {why}"
        )
    return text + f". A first choice may cost at most {TOLERANCE:.0%} in loss."
