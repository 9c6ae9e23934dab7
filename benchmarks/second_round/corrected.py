"""Which differences of benchmarks/second_round are left when all of them are judged together.

A 95 % interval that excludes zero is wrong once in twenty where there is no difference. Benjamini
and Hochberg (1995) bound the share of such errors among all differences that are named: with m
differences in the order of their p-values, those up to the last with p <= 0.05 * rank / m are kept.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.compare.tuning import Rows, losses
from benchmarks.second_round.grid import ALSO, PAIRS, REFERENCES, methods

SHARE = 0.05


@dataclass(frozen=True)
class Difference:
    """A method against another, in words, and its two-sided p-value over equal seeds."""

    name: str
    p: float


def differences(done: Rows) -> Iterator[Difference]:
    """Each pair of methods that a table or `pairs` compares over three seeds or more, once."""
    every = {(each.study, each.name, each.replicas): each for each in methods()}
    asked = [(key, base) for key in every for base in REFERENCES.get(key[0], ()) if key != base]
    asked += [(key, base) for study in ALSO for key in ALSO[study] for base in REFERENCES[study]]
    asked += [(("text", *one), ("text", *other)) for one, other in PAIRS]
    for one, other in dict.fromkeys(asked):
        p = paired_p(losses(every[one].judged(done)), losses(every[other].judged(done)))
        if p is not None:
            yield Difference(f"{_words(one)} to {_words(other)}", p)


def _words(key: tuple[str, str, int]) -> str:
    study, name, replicas = key
    return f"{study}: {name}, R={replicas}"


def paired_p(own: Mapping[int, float], base: Mapping[int, float]) -> float | None:
    """The p-value of Student's t over the differences on equal seeds; None below three of them."""
    found = [own[seed] - base[seed] for seed in sorted(set(own) & set(base))]
    if len(found) < 3:
        return None
    error = statistics.stdev(found) / math.sqrt(len(found))
    return two_sided(statistics.fmean(found) / error, len(found) - 1)


def two_sided(t: float, freedom: int) -> float:
    """The probability of a larger |t| by chance: the finite series for whole degrees of freedom.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> round(two_sided(4.303, 2), 3), round(two_sided(2.365, 7), 3)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return 1 - inside


def threshold(found: list[Difference]) -> float:
    """The largest p-value that is kept; 0 if none is."""
    values = sorted(each.p for each in found)
    count = len(values)
    kept = [p for rank, p in enumerate(values, 1) if p <= SHARE * rank / count]
    return max(kept, default=0.0)


def report(done: Rows) -> str:
    """How many differences there are, the threshold, and what excludes zero alone but not among all."""
    found = list(differences(done))
    limit = threshold(found)
    alone = [each for each in found if each.p <= SHARE]
    lost = [each for each in alone if each.p > limit]
    lines = [
        f"{len(found)} differences, {len(alone)} exclude zero; all with p <= {limit:.4f} are kept,"
        f" and {len(lost)} are not:"
    ]
    lines += [f"  {each.name}: p = {each.p:.3f}" for each in lost]
    return "\n".join(lines)
