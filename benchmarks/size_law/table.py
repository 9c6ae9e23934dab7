"""The tables of benchmarks/size_law: losses by scheme and size, and what the tries have chosen."""

import statistics
from collections.abc import Iterator

from benchmarks.compare.rows import per_parameter
from benchmarks.compare.tuning import Rows, against, losses
from benchmarks.size_law.grid import (
    FIRST,
    FOURTH,
    FULL,
    SECOND,
    SETS_EXPONENT,
    SIZES,
    THIRD,
    chosen,
    judging,
    optima,
)
from benchmarks.size_law.rule import best_rate, exponent
from benchmarks.size_law.sizes import LARGEST, Size

EVERY = *FIRST, *SECOND, *THIRD, *FOURTH
HEADER = (
    "size | scheme | replicas | rate | seeds | held-out loss | to AdamW, full, % | "
    "bytes per parameter and step | processor-minutes"
)


def table(done: Rows) -> str:
    """One line per size, scheme and number of replicas that a seed has judged; then the tries."""
    lines = [f"| {HEADER} |", "|---" * (HEADER.count("|") + 1) + "|"]
    for size in (*SIZES, LARGEST):
        lines += [f"| {' | '.join(line)} |" for line in _judged(size, done)]
    return "\n".join([*lines, "", *_tuned(done)])


def _judged(size: Size, done: Rows) -> Iterator[list[str]]:
    reference = runs_of(size, FULL, 1, done)
    for scheme, replicas in EVERY:
        for method in judging(size, ((scheme, replicas),), done):
            runs = method.judged(done)
            if runs:
                minutes = statistics.fmean(row["cpu_s"] for row in runs.values()) / 60
                yield [
                    size.name,
                    scheme.name,
                    str(replicas),
                    f"{method.rates[0]:g}",
                    str(len(runs)),
                    f"{statistics.fmean(losses(runs).values()):.4f}",
                    against(runs, reference),
                    f"{per_parameter(next(iter(runs.values()))):.4f}",
                    f"{minutes:.1f}",
                ]


def runs_of(size: Size, scheme: object, replicas: int, done: Rows) -> dict[int, dict[str, object]]:
    """The judging runs of a scheme, by seed."""
    part = [each for each in EVERY if each == (scheme, replicas)]
    found = [method.judged(done) for method in judging(size, part, done)]
    return found[0] if found else {}


def _tuned(done: Rows) -> Iterator[str]:
    yield "| scheme | replicas | settings | best rate by size | exponent |"
    yield "|---|---|---|---|---|"
    for scheme, replicas in EVERY:
        tries = optima(scheme, replicas, done)
        if tries:
            rates = {size: best_rate(each, done) for size, each in tries.items()}
            shown = ", ".join(f"{size.name} {rate:.2g}" for size, rate in rates.items())
            sets = (chosen(scheme, replicas, done) or "").replace("optimizer.", "")
            fixed = SETS_EXPONENT[scheme.optimizer] == (scheme, replicas)
            slope = f"{exponent(rates):+.2f}" if fixed else ""
            yield f"| {scheme.name} | {replicas} | {sets} | {shown} | {slope} |"
