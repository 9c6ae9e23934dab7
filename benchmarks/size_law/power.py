"""What the grid can tell: exponents that it tells from zero with 80 % power.

A scheme costs ln(loss / loss of full) = a N^-k ln R. Its logarithm is a line in ln N of slope -k;
each size weighs by its seeds and by how far the cost is from zero in its own spread.
"""

import math
from collections.abc import Mapping, Sequence

from benchmarks.size_law.sizes import SIZES

from detonation.plan.law import EXPONENT, SCALE

POWER = 1.960 + 0.842
"""Standard errors between zero and what is found with 80 % power at 5 %, two-sided."""
PUBLISHED = SCALE, EXPONENT
"""Of `diloco` every 30: L(R) / L(1) = R^(a N^-k), a fit to Charles et al., arXiv 2503.09799."""
SPREADS = {
    ("diloco 30", 8): (0.022, 1.0),
    ("diloco 30", 2): (0.010, 1.0),
    ("muloco 30, 2bit", 8): (0.006, 0.41),
    ("muloco 30, 2bit", 2): (0.002, 0.21),
}
"""By scheme and replicas, from the rows of long rounds: the standard deviation over seeds of the
logarithm of the paired ratio, and the cost at 0.14M as a share of the published one."""
LEVEL = 0.020, 0.027
"""The same of schemes whose loss is level with full synchronisation."""


def cost(parameters: float, replicas: int, law: tuple[float, float] = PUBLISHED) -> float:
    """ln(loss / loss of full) by the law."""
    a, k = law
    return math.log(replicas) * a * parameters**-k


def line_error(logs: Sequence[float], errors: Sequence[float]) -> float:
    """The standard error of the slope of a weighted line."""
    weights = [error**-2 for error in errors]
    middle = math.fsum(w * x for w, x in zip(weights, logs, strict=True)) / math.fsum(weights)
    return math.fsum(w * (x - middle) ** 2 for w, x in zip(weights, logs, strict=True)) ** -0.5


def exponent_error(spread: float, share: float, replicas: int, seeds: Mapping[float, int]) -> float:
    """The standard error of k. seeds: By the parameters of a size."""
    logs = [math.log(parameters) for parameters in seeds]
    errors = [
        spread / math.sqrt(count) / (share * cost(parameters, replicas))
        for parameters, count in seeds.items()
    ]
    return line_error(logs, errors)


def decade_error(spread: float, seeds: Mapping[float, int]) -> float:
    """The standard error of the change of ln(loss / loss of full) per decade of size."""
    logs = [math.log10(parameters) for parameters in seeds]
    return line_error(logs, [spread / math.sqrt(count) for count in seeds.values()])


def table() -> str:
    """One line per scheme, at its expected costs, and one per spread of level schemes."""
    grid = {float(size.parameters): size.seeds for size in SIZES}
    lines = [
        "| scheme | replicas | spread, % | expected cost by size, % | smallest exponent told |",
        "|---|---|---|---|---|",
    ]
    for (name, replicas), (spread, share) in SPREADS.items():
        costs = ", ".join(f"{100 * math.expm1(share * cost(each, replicas)):.1f}" for each in grid)
        told = POWER * exponent_error(spread, share, replicas, grid)
        lines.append(f"| {name} | {replicas} | {100 * spread:.1f} | {costs} | {told:.3f} |")
    for spread in LEVEL:
        told = 100 * POWER * decade_error(spread, grid)
        lines.append(f"| level | any | {100 * spread:.1f} | 0 | {told:.1f} % per decade |")
    return "\n".join(lines)
