"""Ranks schemes by the expected time to a loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detonation.core.schemes.registry import scheme, schemes
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import LargerThanDense
from detonation.plan.cost import Cost, Network, Work, cost
from detonation.plan.losses import Loss, loss_of, loss_table
from detonation.plan.spelling import spelled

BUDGET = 0.1
"""Default share of a step that full synchronisation may spend waiting for the network and still come first."""

_VALUES = {"precision": "fp32", "error_feedback": True}
_SIGN = {"precision": "sign", "error_feedback": False}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "full": [{"precision": "bf16"}],
    "demo": [{"topk": topk, **precision} for topk in (1, 4, 16) for precision in (_VALUES, _SIGN)],
    "random": [{"rate": 1 / n} for n in (4, 16, 64)],
    "random_sign": [{"rate": 1 / n} for n in (2, 4, 8, 16)],
    "diloco": [{"every": every} for every in (20, 100, 500)],
}
"""Settings that are considered in addition to a scheme's defaults and its measured settings."""


@dataclass(frozen=True)
class Option:
    """A scheme with its predicted cost and the measured loss that counts (`loss_of`), None without one."""

    cost: Cost
    loss: Loss | None

    @property
    def time_to_loss_s(self) -> float | None:
        """Seconds until training has surely come as far as in one step of full synchronisation; None if unknown."""
        return None if self.loss is None else self.cost.total_s * self.loss.slowdown

    @property
    def other_settings(self) -> str:
        """Says that the loss was measured at other settings of the scheme, where it was; otherwise empty."""
        return "" if self.loss is None or self.loss.fits(self.cost.scheme) else ", other settings"


def waiting(option: Option) -> float:
    """Returns the share of a step that is spent waiting for the network."""
    return option.cost.exposed_s / option.cost.total_s


def is_full(option: Option) -> bool:
    """True for full synchronisation with values that the network adds as they are."""
    return option.cost.scheme.name == "full" and option.cost.scheme.arguments["precision"] == "fp32"


def settings(name: str) -> list[dict[str, Any]]:
    """Lists the arguments that are considered for a scheme: its defaults, `SETTINGS`, and all measured settings.

    Those that were measured are whole, for they may be laid over a recipe that has others.
    """
    measured = [dict(loss.arguments) for loss in loss_table() if loss.scheme == name]
    return [{}, *SETTINGS.get(name, []), *measured]


def candidate_settings() -> list[Scheme]:
    """Makes every registered scheme, those of users and of installed packages included, at all its `settings`."""
    found = [scheme(name, arguments) for name in list(schemes()) for arguments in settings(name)]
    return list({(s.name, tuple(s.arguments.items())): s for s in found}.values())


def options(
    candidates: Sequence[Scheme],
    work: Work,
    network: Network,
    budget: float = BUDGET,
    optimizers: Mapping[str, str] | None = None,
) -> list[Option]:
    """Ranks the candidates, best first; leaves out those that would send more than full synchronisation.

    Full synchronisation comes first where it waits at most `budget` of a step. Schemes with a measured loss follow,
    by expected time to a loss, then schemes without one by the time of a step, and schemes that exchange nothing. Of
    equal times the scheme that sends less comes first.

    optimizers: The optimizer that trains under a scheme (`trained_by`), by the spelling of the scheme: losses measured
        with another do not count. Under a scheme that is not named, any does.
    """
    ranked, trained = [], optimizers or {}
    for candidate in candidates:
        try:
            price = cost(candidate, work, network)
        except LargerThanDense:
            continue
        loss = loss_of(candidate, network.replicas, trained.get(spelled(candidate)))
        ranked.append(Option(price, loss))
    return sorted(ranked, key=lambda option: _order(option, budget))


def _order(option: Option, budget: float) -> tuple[int, float, float, str]:
    time_s, scheme = option.time_to_loss_s, option.cost.scheme
    if is_full(option) and waiting(option) <= budget:
        group = 0
    else:
        group = 3 if scheme.signal == "nothing" else 2 if time_s is None else 1
    return group, round(time_s or option.cost.total_s, 4), option.cost.bytes_sent, spelled(scheme)


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
