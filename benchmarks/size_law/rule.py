"""The rule of the learning rate: a power of the size, whose exponent a reference sets."""

import math
import statistics
from collections.abc import Mapping

from benchmarks.compare.tuning import Method, Rows, loss
from benchmarks.size_law.sizes import Size

Tries = Mapping[Size, Method]
"""By size, a method with the rates that were tried."""


def rule(reference: Tries, own: Tries, size: Size, done: Rows) -> float:
    """The rate at `size`: the exponent of `reference`, through the middle of the best of `own`.

    Both means are of logarithms. Two digits are kept.
    """
    slope = exponent({each: best_rate(tries, done) for each, tries in reference.items()})
    logs = [
        math.log(best_rate(tries, done)) - slope * math.log(each.parameters)
        for each, tries in own.items()
    ]
    rate = math.exp(statistics.fmean(logs) + slope * math.log(size.parameters))
    return float(f"{rate:.2g}")


def exponent(best: Mapping[Size, float]) -> float:
    """The slope of a line through the logarithms of sizes and rates, by least squares."""
    sizes = [math.log(each.parameters) for each in best]
    rates = [math.log(rate) for rate in best.values()]
    return statistics.linear_regression(sizes, rates).slope


def best_rate(tries: Method, done: Rows) -> float:
    """The lowest point of the parabola through the best rate and its neighbours, in logarithms.

    The best rate itself where it is at an end, where a neighbour diverged, or where two are equal.
    """
    variant = tries.variants[0]
    found = {
        rate: loss(done[cell.key])
        for rate in tries.rates
        if (cell := tries.cell(rate, variant)).key in done
    }
    rates = sorted(found)
    middle = rates.index(min(found, key=lambda rate: found[rate]))
    if not 0 < middle < len(rates) - 1:
        return rates[middle]
    below, best, above = (found[rate] for rate in rates[middle - 1 : middle + 2])
    curvature = below - 2 * best + above
    if not 0 < curvature < math.inf:
        return rates[middle]
    step = math.log(rates[middle] / rates[middle - 1])
    return rates[middle] * math.exp(step * (below - above) / (2 * curvature))
