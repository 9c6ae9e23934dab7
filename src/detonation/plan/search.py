"""Search: which schemes there are to choose from, in which order, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from detonation.core.schemes.registry import SCHEMES, scheme
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import LargerThanDense
from detonation.plan.cost import Cost, Network, Work, cost
from detonation.plan.losses import Loss, expected, loss_of, table

TOLERANCE = 0.02
"""How much more loss than full synchronisation, in parts of it, a first choice may have been measured to cost."""

_SIGN = {"precision": "sign", "error": "drop"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "demo": [{"topk": topk, **precision} for topk in (1, 4, 16) for precision in ({}, _SIGN)],
    "random": [{"rate": 1 / n} for n in (4, 16, 64)],
    "random_sign": [{"rate": 1 / n} for n in (2, 4, 8, 16)],
    "diloco": [{"every": every} for every in (20, 100, 500)],
}
"""Besides a scheme's defaults and what was measured of it, the settings that are looked at."""


@dataclass(frozen=True)
class Option:
    """A scheme that could be used: its cost, what its loss was where it was measured, and what it should be."""

    cost: Cost
    loss: Loss | None
    expected: float

    @property
    def trusted(self) -> bool:
        """Whether it was measured to cost no more loss than is tolerated."""
        return self.loss is not None and self.loss.cost <= TOLERANCE


def settings(name: str) -> list[dict[str, Any]]:
    """What is looked at of a scheme: as it comes, at settings that matter most, and at those that were measured."""
    plain = scheme(name, {}).arguments
    measured = [loss.arguments.items() for loss in table() if loss.scheme == name]
    return [{}, *SETTINGS.get(name, []), *({k: v for k, v in found if v != plain[k]} for found in measured)]


def candidates() -> list[Scheme]:
    """Every scheme at all its `settings`."""
    found = [scheme(name, arguments) for name in SCHEMES for arguments in settings(name)]
    return list({(s.name, tuple(s.arguments.items())): s for s in found}.values())


def options(schemes: Sequence[Scheme], work: Work, network: Network) -> list[Option]:
    """Those of `schemes` that send no more than full synchronisation, the best first.

    First those that were measured to cost next to no loss, then those of which nothing is known, then the others; the
    quicker step first, and of steps that take as long the one that sends less.
    """
    found, replicas = [], network.replicas
    for candidate in schemes:
        try:
            price = cost(candidate, work, network)
        except LargerThanDense:
            continue
        found.append(Option(price, loss_of(candidate, replicas), expected(candidate, replicas)))
    return sorted(found, key=_order)


def _order(option: Option) -> tuple[int, float, float]:
    known = 0 if option.trusted else 1 if option.loss is None and option.cost.scheme.signal != "nothing" else 2
    return known, round(option.cost.total_s, 4), option.cost.bytes_sent


def break_even(option: Scheme, against: Scheme, work: Work, network: Network) -> float | None:
    """How many times the rate it would take until `against` is as quick as `option`; None where it never is."""

    def slower(times: float) -> bool:
        there = network.faster(times)
        return cost(against, work, there).total_s > cost(option, work, there).total_s

    low, high = 1e-6, 1e6
    if slower(high):
        return None
    if not slower(low):
        return 0.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slower(middle) else (low, middle)
    return high
