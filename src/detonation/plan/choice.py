"""Chooses one scheme: least expected loss among those whose wait for the network fits a budget."""

import math
from collections.abc import Sequence

from detonation.core.link.link_speed import LinkSpeed
from detonation.plan.cost import Network
from detonation.plan.search import Option
from detonation.plan.spelling import spelled

BUDGET = 0.1
"""Default share of a step that may be spent waiting for the network."""


def check_budget(budget: float) -> float:
    """Returns `budget`; raises `ValueError` unless it is a number between 0 and 1, both excluded."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
        raise ValueError(f"budget is {budget!r}, must be a part of a step that may be waited for, between 0 and 1: 0.1")
    return float(budget)


def choose(ranked: Sequence[Option], budget: float) -> Option:
    """Picks the option with the least expected loss among those that wait at most `budget` of a step.

    Ties go to full synchronisation, then to the scheme that sends most. Where nothing fits the budget, the option that
    waits least wins. Schemes that exchange nothing are never chosen. The result does not depend on the order of
    `ranked`.
    """
    communicating = [option for option in ranked if option.cost.scheme.signal != "nothing"]
    within = [option for option in communicating if waiting(option) <= budget]
    if within:
        return min(within, key=_order)
    return min(communicating, key=lambda option: (round(option.cost.exposed_s, 6), *_order(option)))


def waiting(option: Option) -> float:
    """Returns the share of a step that is spent waiting for the network."""
    return option.cost.exposed_s / option.cost.total_s


def why(chosen: Option, ranked: Sequence[Option], network: Network, budget: float) -> str:
    """Explains in one line why `choose` picked `chosen`."""
    cost = chosen.cost
    fits = sum(waiting(option) <= budget and option.cost.scheme.signal != "nothing" for option in ranked)
    link = f"at {LinkSpeed(network.rate_bits_per_s)} per node" if network.replicas > 1 else "with one node"
    share = f"waits {waiting(chosen):.1%} of a step of {cost.total_s:.3g} s {link}"
    if not fits:
        return f"{spelled(cost.scheme)} {share}, the least of all: none stays within the budget of {budget:.0%}"
    full = next((o for o in ranked if spelled(o.cost.scheme) == "full()"), chosen)
    best = "the only option" if fits == 1 else f"of {fits} options the one with the least expected loss"
    text = f"{spelled(cost.scheme)} {share}; {best} within the budget of {budget:.0%}: {_loss_text(chosen)}"
    return text if full is chosen else f"{text}; full() would wait {waiting(full):.0%}"


def _loss_text(option: Option) -> str:
    if option.loss is not None:
        return f"measured {option.loss}"
    guess = option.expected
    return f"{guess:+.1%} expected, from other settings of the scheme" if guess < math.inf else "its loss is unknown"


def _order(option: Option) -> tuple[float, bool, float, str]:
    scheme = option.cost.scheme
    return option.expected, scheme.name != "full", -option.cost.bytes_sent, spelled(scheme)
