"""Choice: the one scheme that is expected to cost least loss, of those that wait for the network within a budget."""

import math
from collections.abc import Sequence

from detonation.core.link.link_speed import Pace
from detonation.plan.cost import Network
from detonation.plan.search import Option
from detonation.plan.spelling import spelled

BUDGET = 0.1
"""The part of a step that may be waited for the network, where nobody says otherwise."""


def check_budget(budget: float) -> float:
    """`budget`. Raises `ValueError` unless it can be a part of a step."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
        raise ValueError(f"budget is {budget!r}, must be a part of a step that may be waited for, between 0 and 1: 0.1")
    return float(budget)


def choose(found: Sequence[Option], budget: float) -> Option:
    """The option of `found` with the least expected loss of those that wait no more than `budget` of a step.

    Of those that cost the same it is full synchronisation, or else the one that tells most. Where nothing fits, the one
    that waits least. The same options always give the same choice.
    """
    talking = [option for option in found if option.cost.scheme.signal != "nothing"]
    within = [option for option in talking if waiting(option) <= budget]
    if within:
        return min(within, key=_order)
    return min(talking, key=lambda option: (round(option.cost.exposed_s, 6), *_order(option)))


def waiting(option: Option) -> float:
    """The part of a step in which all wait for the network."""
    return option.cost.exposed_s / option.cost.total_s


def why(chosen: Option, found: Sequence[Option], network: Network, budget: float) -> str:
    """The reason for `chosen`, in one line."""
    cost = chosen.cost
    fits = sum(waiting(option) <= budget and option.cost.scheme.signal != "nothing" for option in found)
    pace = f"at {Pace(network.rate_bits_per_s)} a node" if network.replicas > 1 else "with one node"
    share = f"waits {waiting(chosen):.1%} of a step of {cost.total_s:.3g} s {pace}"
    if not fits:
        return f"{spelled(cost.scheme)} {share}, the least of all: none stays within the budget of {budget:.0%}"
    full = next((o for o in found if spelled(o.cost.scheme) == "full()"), chosen)
    best = "the only one" if fits == 1 else f"of {fits} the one that should cost least loss,"
    text = f"{spelled(cost.scheme)} {share}; {best} within the budget of {budget:.0%}: {_known(chosen)}"
    return text if full is chosen else f"{text}; full() would wait {waiting(full):.0%}"


def _known(option: Option) -> str:
    """What is known of the loss."""
    if option.loss is not None:
        return f"measured {option.loss}"
    guess = option.expected
    return f"{guess:+.1%} expected, from other settings of it" if guess < math.inf else "nobody has measured it"


def _order(option: Option) -> tuple[float, bool, float, str]:
    chosen = option.cost.scheme
    return option.expected, chosen.name != "full", -option.cost.bytes_sent, spelled(chosen)
