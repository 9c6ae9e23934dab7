"""Advice: the ranked options in words and numbers, for people and for programs."""

from collections.abc import Sequence
from typing import Any

from detonation.core.schemes.registry import scheme
from detonation.plan.choice import BUDGET, choose
from detonation.plan.cost import Network, Work
from detonation.plan.search import TOLERANCE, Option, break_even, options
from detonation.plan.spelling import spelled


def advise(found: Sequence[Option], work: Work, network: Network) -> dict[str, Any]:
    """The plan: a row for each of `found`, why the first is first, and what would change that.

    auto: what the choice would be that `scheme = "auto"` makes within its default budget.
    """
    best = found[0]
    return {
        "options": [row(option) for option in found],
        "first": row(best),
        "reason": reason(best, found, network),
        "if_half_the_rate": _elsewhere(found, work, network, 0.5),
        "if_twice_the_rate": _elsewhere(found, work, network, 2.0),
        "break_even_times": break_even(best.cost.scheme, scheme("full", {}), work, network),
        "replicas": network.replicas,
        "shards": network.shards,
        "rate_bits_per_s": network.rate_bits_per_s,
        "auto": row(choose(found, BUDGET)),
        "auto_budget": BUDGET,
    }


def row(option: Option) -> dict[str, Any]:
    """One option in plain values."""
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
        "bytes_per_day": cost.bytes_a_day,
        "memory_bytes": cost.memory_bytes,
        "loss_cost": loss.cost if loss else None,
        "loss_source": f"{loss}, {loss.source}" if loss else "unknown",
    }


def reason(best: Option, found: Sequence[Option], network: Network) -> str:
    """Why `best` comes first, in a sentence or two."""
    full = next((o for o in found if o.cost.scheme.name == "full" and o.cost.scheme.codec.precision.summable), None)
    cost = best.cost
    text = f"{spelled(best.cost.scheme)} waits {cost.exposed_s:.3g} s for the network in a step of {cost.total_s:.3g} s"
    if full is not None and full is not best:
        text += f", {full.cost.total_s / cost.total_s:.3g} times as fast as full synchronisation"
    if best.loss is not None:
        text += f"; it was measured to cost {best.loss}"
    quicker = [o for o in found if o.cost.total_s < 0.98 * cost.total_s and o.cost.scheme.signal != "nothing"]
    if quicker:
        first = min(quicker, key=lambda option: option.cost.total_s)
        why = f"cost {first.loss.cost:+.1%} in loss" if first.loss else "have an unknown cost in loss"
        times = cost.total_s / first.cost.total_s
        text += (
            f". {len(quicker)} would be quicker, such as {spelled(first.cost.scheme)} ({times:.2f} times), but {why}"
        )
    return text + f". No more than {TOLERANCE:.0%} in loss is tolerated."


def _elsewhere(found: Sequence[Option], work: Work, network: Network, times: float) -> dict[str, Any]:
    """The first choice on a link with `times` the rate."""
    return row(options([option.cost.scheme for option in found], work, network.faster(times))[0])
