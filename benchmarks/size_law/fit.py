"""The law of a scheme: loss / loss of full synchronisation = R^(a N^-k), fitted to paired ratios.

Its logarithm is a N^-k ln R, times (H / 30)^h where rounds of several lengths count. For given
exponents a follows by least squares; the exponents are searched. An interval is a bootstrap over
sizes and, within each size and number of replicas, over seeds.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

DRAWS = 1000
ROUND = 30
"""Steps of the rounds to which (H / 30)^h is 1."""
GOLDEN = (math.sqrt(5) - 1) / 2
EXPONENTS = -1.5, 2.5
"""Where exponents are searched."""


@dataclasses.dataclass(frozen=True)
class Point:
    """What a size has shown: ln(loss / loss of full) of each seed. every: Steps of a round."""

    parameters: float
    replicas: int
    logs: tuple[float, ...]
    every: int = ROUND


@dataclasses.dataclass(frozen=True)
class Law:
    """R^(a N^-size (H / 30)^every) - 1 is the cost. At an `every` of 0 rounds do not count."""

    a: float
    size: float
    every: float = 0.0

    def log(self, parameters: float, replicas: int, every: int = ROUND) -> float:
        """ln(loss / loss of full)."""
        return self.a * math.log(replicas) * self._shape(parameters, every)

    def cost(self, parameters: float, replicas: int, every: int = ROUND) -> float:
        """The loss relative to that of full synchronisation; below 0 for a gain."""
        return math.expm1(self.log(parameters, replicas, every))

    def _shape(self, parameters: float, every: int) -> float:
        return parameters**-self.size * (every / ROUND) ** self.every


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A law without the largest size, and what that size has shown. `low` and `high` are 95 %."""

    parameters: float
    replicas: int
    expected: float
    low: float
    high: float
    found: float

    @property
    def supported(self) -> bool:
        return self.low <= self.found <= self.high


def fit(points: Sequence[Point], rounds: bool = False) -> Law:
    """The law with the least squares over all seeds. rounds: Whether the length of rounds counts.

    Raises:
        ValueError: Fewer than two sizes, or with `rounds` fewer than two lengths.
    """
    require(len({point.parameters for point in points}) >= 2, "sizes")
    require(not rounds or len({point.every for point in points}) >= 2, "lengths of rounds")
    size = every = 0.0
    for _ in range(40 if rounds else 1):
        before = size, every
        size = least(lambda x, every=every: _error(points, x, every))
        if rounds:
            every = least(lambda x, size=size: _error(points, size, x))
        if math.dist(before, (size, every)) < 1e-7:
            break
    return Law(_scale(points, size, every), size, every)


def require(holds: bool, noun: str) -> None:
    if not holds:
        raise ValueError(f"a law needs at least two {noun}: run more of the grid")


def least(error: Callable[[float], float]) -> float:
    """The exponent of the least error: a grid, then the golden section around its best."""
    low, high = EXPONENTS
    step = (high - low) / 80
    middle = min((low + step * number for number in range(81)), key=error)
    low, high = middle - step, middle + step
    while high - low > 1e-9:
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if error(left) < error(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _scale(points: Sequence[Point], size: float, every: float) -> float:
    """The `a` of least squares at given exponents."""
    middle, along, square = _sums(points, size, every)
    return middle * along / square


def _error(points: Sequence[Point], size: float, every: float) -> float:
    """The squares that are left at given exponents, less those of the points themselves."""
    _, along, square = _sums(points, size, every)
    return -along * along / square


def _sums(points: Sequence[Point], size: float, every: float) -> tuple[float, float, float]:
    """The scale of the law's regressor x, and the sums of x y and of x x over all seeds.

    Sizes count from their geometric mean, so that nothing overflows.
    """
    middle = math.fsum(math.log(point.parameters) for point in points) / len(points)
    unit = Law(math.exp(size * middle), size, every)
    along = square = 0.0
    for point in points:
        x = unit.log(point.parameters, point.replicas, point.every)
        along += x * math.fsum(point.logs)
        square += x * x * len(point.logs)
    return unit.a, along, square


def draws(points: Sequence[Point], rounds: bool = False, count: int = DRAWS) -> list[Law]:
    """The laws of `resampled` points."""
    return [fit(each, rounds) for each in resampled(points, count)]


def resampled(points: Sequence[Point], count: int = DRAWS) -> Iterator[list[Point]]:
    """Draws sizes with replacement, at least three different ones or all, and then their seeds."""
    chance = random.Random(0)
    sizes = sorted({point.parameters for point in points})
    while count:
        drawn = chance.choices(sizes, k=len(sizes))
        if len(set(drawn)) < min(3, len(sizes)):
            continue
        count -= 1
        yield [
            dataclasses.replace(p, logs=tuple(chance.choices(p.logs, k=len(p.logs))))
            for size in drawn
            for p in points
            if p.parameters == size
        ]


def per_decade(points: Sequence[Point]) -> float:
    """The change of ln(loss / loss of full) when a model is ten times as large: a line through all.

    For schemes whose cost is too near to zero for a law.
    """
    pairs = [(math.log10(point.parameters), y) for point in points for y in point.logs]
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope


def interval(values: Sequence[float]) -> tuple[float, float]:
    """From the 2.5th to the 97.5th percentile."""
    cuts = statistics.quantiles(values, n=40, method="inclusive")
    return cuts[0], cuts[-1]


def spread(points: Sequence[Point]) -> float:
    """The standard deviation over seeds within a size, over all points with two seeds or more."""
    groups = [point.logs for point in points if len(point.logs) > 1]
    left = math.fsum(statistics.variance(logs) * (len(logs) - 1) for logs in groups)
    return math.sqrt(left / sum(len(logs) - 1 for logs in groups))


def held_out(points: Sequence[Point], count: int = DRAWS) -> list[Predicted]:
    """Predicts the largest size from the others, for each number of replicas.

    The interval is of a mean over as many seeds as the size has: the law is uncertain, and so is
    that mean.
    """
    largest = max(point.parameters for point in points)
    others = [point for point in points if point.parameters < largest]
    law, laws, noise = fit(others), draws(others, count=count), spread(others)
    chance = random.Random(1)
    found = list[Predicted]()
    for point in points:
        if point.parameters == largest:
            error = noise / math.sqrt(len(point.logs))
            where = point.parameters, point.replicas, point.every
            logs = [each.log(*where) + chance.gauss(0, error) for each in laws]
            low, high = interval(logs)
            ends = (law.log(*where), low, high, statistics.fmean(point.logs))
            found.append(Predicted(largest, point.replicas, *map(math.expm1, ends)))
    return found


def residuals(points: Sequence[Point], law: Law) -> dict[tuple[float, int], float]:
    """By size and replicas, the mean of what was found, relative to the law."""
    return {
        (p.parameters, p.replicas): math.expm1(
            statistics.fmean(p.logs) - law.log(p.parameters, p.replicas, p.every)
        )
        for p in points
    }
