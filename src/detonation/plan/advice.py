"""Turns ranked options into advice: plain values for programs and a reason in words."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme
from detonation.plan.choice import why
from detonation.plan.cost import Network, Work
from detonation.plan.losses import loss_table
from detonation.plan.search import BUDGET, Option, break_even, options
from detonation.plan.spelling import changed, spelled


def advise(
    ranked: Sequence[Option],
    work: Work,
    network: Network,
    budget: float = BUDGET,
    optimizers: Mapping[str, str] | None = None,
    settings: Callable[[Scheme], Mapping[str, object]] = changed,
) -> dict[str, Any]:
    """Describes the plan: every option, the reason for the first, and the first on a slower and a faster network.

    optimizers: As of `options`. settings: The arguments that choose a scheme where it is trained. `rate_bits_per_s` is
        None where nothing limits it, as with one node.
    """
    best = ranked[0]
    candidates = [option.cost.scheme for option in ranked]
    half, twice = (options(candidates, work, network.faster(times), budget, optimizers)[0] for times in (0.5, 2.0))
    return {
        "options": [row(option) for option in ranked],
        "first": row(best),
        "settings": {"name": best.cost.scheme.name, **settings(best.cost.scheme)},
        "reason": why(best, ranked, network, budget) + _faster(best, ranked),
        "if_half_the_rate": row(half),
        "if_twice_the_rate": row(twice),
        "break_even_times": break_even(best.cost.scheme, scheme("full", {}), work, network),
        "replicas": network.replicas,
        "shards": network.shards,
        "rate_bits_per_s": network.rate_bits_per_s if math.isfinite(network.rate_bits_per_s) else None,
        "budget": budget,
        "parameters": sum(math.prod(shape) for shapes in work.shards for shape in shapes.values()),
        "measured_parameters": max(loss.parameters for loss in loss_table()),
    }


def row(option: Option) -> dict[str, Any]:
    """One option as plain values."""
    cost, loss = option.cost, option.loss
    return {
        "scheme": cost.scheme.name,
        "spelled": spelled(cost.scheme),
        "arguments": dict(cost.scheme.arguments),
        "changed": changed(cost.scheme),
        "seconds": cost.total_s,
        "compute_s": cost.compute_s,
        "step_s": cost.step_s,
        "exposed_s": cost.exposed_s,
        "efficiency": cost.efficiency,
        "bytes_per_step": cost.bytes_sent,
        "bytes_per_day": cost.bytes_per_day,
        "memory_bytes": cost.memory_bytes,
        "time_to_loss_s": option.time_to_loss_s,
        "loss_cost": loss.cost if loss else None,
        "loss_interval": list(loss.interval) if loss and loss.interval else None,
        "loss_text": f"{loss.verdict}; {loss.conditions}{option.other_settings}" if loss else "unknown",
        "loss_source": f"{loss}{option.other_settings}, {loss.source}" if loss else "unknown",
    }


def _faster(best: Option, ranked: Sequence[Option]) -> str:
    """The options with a shorter step than the first, in a clause of the reason."""
    faster = [o for o in ranked if o.cost.total_s < 0.98 * best.cost.total_s and o.cost.scheme.signal != "nothing"]
    if not faster:
        return ""
    fastest = min(faster, key=lambda option: option.cost.total_s)
    loss = f"cost {fastest.loss.verdict} in loss" if fastest.loss else "have an unknown cost in loss"
    times = best.cost.total_s / fastest.cost.total_s
    return f". {len(faster)} have shorter steps, such as {spelled(fastest.cost.scheme)} ({times:.2f} times), but {loss}"
