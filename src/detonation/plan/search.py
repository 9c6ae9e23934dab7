"""Ranks schemes by measured loss and predicted step time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from detonation.core.schemes.registry import scheme, schemes
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import LargerThanDense
from detonation.plan.cost import Cost, Network, Work, cost
from detonation.plan.losses import Loss, expected, loss_of, loss_table

TOLERANCE = 0.02
"""Largest measured loss, relative to full synchronisation, that a first choice may cost."""

_SIGN = {"precision": "sign", "error_feedback": False}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "demo": [{"topk": topk, **precision} for topk in (1, 4, 16) for precision in ({}, _SIGN)],
    "random": [{"rate": 1 / n} for n in (4, 16, 64)],
    "random_sign": [{"rate": 1 / n} for n in (2, 4, 8, 16)],
    "diloco": [{"every": every} for every in (20, 100, 500)],
}
"""Settings that are considered in addition to a scheme's defaults and its measured settings."""


@dataclass(frozen=True)
class Option:
    """A scheme with its predicted cost, its measured loss (None without one) and its expected relative loss."""

    cost: Cost
    loss: Loss | None
    expected: float

    @property
    def trusted(self) -> bool:
        """True where the measured loss is at most `TOLERANCE`."""
        return self.loss is not None and self.loss.cost <= TOLERANCE


def settings(name: str) -> list[dict[str, Any]]:
    """Lists the arguments that are considered for a scheme: its defaults, `SETTINGS`, and all measured settings."""
    defaults = scheme(name, {}).arguments
    measured = [loss.arguments.items() for loss in loss_table() if loss.scheme == name]
    return [{}, *SETTINGS.get(name, []), *({k: v for k, v in found if v != defaults[k]} for found in measured)]


def candidate_settings() -> list[Scheme]:
    """Makes every registered scheme, those of users and of installed packages included, at all its `settings`."""
    found = [scheme(name, arguments) for name in list(schemes()) for arguments in settings(name)]
    return list({(s.name, tuple(s.arguments.items())): s for s in found}.values())


def options(candidates: Sequence[Scheme], work: Work, network: Network) -> list[Option]:
    """Ranks the candidates, best first; leaves out those that would send more than full synchronisation.

    Schemes with a measured loss of at most `TOLERANCE` come first, then schemes without a measurement, then the rest.
    Within each group the shorter step comes first, and of equal steps the one that sends less.
    """
    ranked, replicas = [], network.replicas
    for candidate in candidates:
        try:
            price = cost(candidate, work, network)
        except LargerThanDense:
            continue
        ranked.append(Option(price, loss_of(candidate, replicas), expected(candidate, replicas)))
    return sorted(ranked, key=_order)


def _order(option: Option) -> tuple[int, float, float]:
    group = 0 if option.trusted else 1 if option.loss is None and option.cost.scheme.signal != "nothing" else 2
    return group, round(option.cost.total_s, 4), option.cost.bytes_sent


def break_even(option: Scheme, against: Scheme, work: Work, network: Network) -> float | None:
    """Finds the factor on the network's rate at which a step of `against` takes as long as a step of `option`.

    Returns:
        The factor, by bisection between 1e-6 and 1e6; 0 where `against` is never slower, None where it always is.
    """

    def slower(times: float) -> bool:
        scaled = network.faster(times)
        return cost(against, work, scaled).total_s > cost(option, work, scaled).total_s

    low, high = 1e-6, 1e6
    if slower(high):
        return None
    if not slower(low):
        return 0.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slower(middle) else (low, middle)
    return high
