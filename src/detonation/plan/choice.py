"""The budget of waiting: the settings of a scheme that fit it, and the reason for a choice in words."""

from collections.abc import Sequence

from detonation.core.link.link_speed import LinkSpeed
from detonation.plan.cost import Network
from detonation.plan.search import BUDGET, Option, is_full, waiting
from detonation.plan.spelling import spelled


def check_budget(budget: float) -> float:
    """Returns `budget`; raises `ValueError` unless it is a number between 0 and 1, both excluded."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
        raise ValueError(f"budget is {budget!r}, must be a part of a step that may be waited for, between 0 and 1: 0.1")
    return float(budget)


def largest_within(settings: Sequence[Option], budget: float) -> Option:
    """Picks the setting of one scheme that sends most among those that wait at most `budget` of a step.

    Where nothing fits the budget, the setting that waits least wins.
    """
    within = [option for option in settings if waiting(option) <= budget]
    if within:
        return max(within, key=lambda option: (option.cost.bytes_sent, spelled(option.cost.scheme)))
    return min(settings, key=lambda option: (round(option.cost.exposed_s, 6), -option.cost.bytes_sent))


def why(chosen: Option, ranked: Sequence[Option], network: Network, budget: float = BUDGET) -> str:
    """Explains in one line why `chosen`, the first of `ranked`, is first."""
    cost = chosen.cost
    link = f"at {LinkSpeed(network.rate_bits_per_s)} per node" if network.replicas > 1 else "with one node"
    text = f"{spelled(cost.scheme)} waits {waiting(chosen):.1%} of a step of {cost.total_s:.3g} s {link}"
    full = next((option for option in ranked if is_full(option)), None)
    if full is chosen:
        return f"{text}, within the budget of {budget:.0%}" if waiting(chosen) <= budget else text
    if chosen.loss is not None:
        text += f"; of the {sum(o.loss is not None for o in ranked)} with a measured loss it is expected to reach a "
        text += f"loss first: {chosen.loss}{chosen.other_settings}"
    if full is not None:
        times = full.cost.total_s / cost.total_s
        text += f"; full() would wait {waiting(full):.0%} and take {times:.3g} times as long per step"
    return text
