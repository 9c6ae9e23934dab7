"""The prediction of the laws for sizes that nobody has trained yet: written down once, with a date.

    python -m benchmarks.size_law --predict

`make gpu GPU="law"` trains the first of these sizes and prints what it finds beside the prediction.
"""

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.compare.tuning import Rows
from benchmarks.size_law.fit import DRAWS, Law, Point, draws, fit, held_out, interval, spread
from benchmarks.size_law.grid import DILOCO, FULL, FULL_MUON, Scheme, judging
from benchmarks.size_law.laws import points, ranged, reference
from benchmarks.size_law.sizes import PREDICTED, TOKENS, Size
from benchmarks.size_law.table import EVERY
from benchmarks.size_law.text import SHA256

from detonation.plan.law import carried

PATH = Path(__file__).parents[1] / "results" / "size-law-prediction.json"
LEAST = 3
"""Fewest sizes of a law that is checked: the others predict the largest."""
SIGMAS = 1.96
"""Standard deviations from the middle of a 95 % interval to its ends."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is predicted of a scheme with a number of replicas, as relative losses.

    Args:
        to: Full synchronisation to which it is compared; "" for full synchronisation itself.
        sets: Settings of scheme and optimizer, with the learning rate of the rule.
        low, high: 95 % interval of the law.
        run_low, run_high: The same for a single run, whose seed counts, too.
        law: "supported" or "refuted" by the largest size that was trained; or "published", if our
            law is refuted and the published law extrapolates the cost at that size, as in `plan`.
    """

    scheme: str
    replicas: int
    to: str
    sets: tuple[str, ...]
    cost: float | None = None
    low: float = 0.0
    high: float = 0.0
    run_low: float = 0.0
    run_high: float = 0.0
    law: str = ""


def write(done: Rows, path: Path, count: int = DRAWS) -> str:
    """Writes the prediction, and returns a sentence about it.

    Raises:
        ValueError: A prediction is there already, or no law was checked by its largest size.
    """
    if path.exists():
        date = json.loads(path.read_text())["date"]
        raise ValueError(f"{path} holds the prediction of {date}, which does not change")
    costs = _costs(done, count)
    if not costs:
        raise ValueError(f"no law yet: {LEAST} sizes of a scheme must be judged")
    sizes = dict[str, Any]()
    for size in PREDICTED:
        schemes = [*_references(size, done), *(_at(size, each, done) for each in costs)]
        rows = [dataclasses.asdict(each) for each in schemes]
        sizes[size.name] = {"parameters": size.parameters, "schemes": rows}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    facts = {"date": date, "text": SHA256[:12], "tokens_per_parameter": TOKENS}
    path.write_text(json.dumps({**facts, "sizes": sizes}, indent=1) + "\n")
    return f"{path}: {len(costs)} costs at {' and '.join(sizes)} parameters"


def read(path: Path, size: str) -> tuple[dict[str, Any], list[Expected]] | None:
    """The facts of a prediction, and what it says of a size. None where nothing is predicted."""
    if not path.exists():
        return None
    facts = json.loads(path.read_text())
    found = facts.pop("sizes").get(size)
    if found is None:
        return None
    rows = [{**row, "sets": tuple(row["sets"])} for row in found["schemes"]]
    return facts, [Expected(**row) for row in rows]


def table(path: Path) -> str:
    """The costs that a prediction says, one line per size and scheme; "" if nothing is predicted."""
    if not path.exists():
        return ""
    facts = json.loads(path.read_text())
    lines = [
        f"predicted on {facts['date']}:",
        "",
        "| size | scheme | replicas | to | cost | cost of one run, % | law |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in facts["sizes"]:
        _, schemes = read(path, size) or ({}, [])
        for each in schemes:
            if each.cost is not None:
                cost = ranged(each.cost, (each.low, each.high))
                cells = [size, each.scheme, str(each.replicas), each.to, cost, _run(each), each.law]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _run(expected: Expected) -> str:
    return f"[{100 * expected.run_low:+.1f}, {100 * expected.run_high:+.1f}]"


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """A law with its draws, for one number of replicas, and what the largest size has shown."""

    scheme: Scheme
    replicas: int
    largest: Point
    law: Law
    draws: Sequence[Law]
    spread: float
    verdict: str


def _costs(done: Rows, count: int) -> list[_Fitted]:
    """The laws that were checked, for each number of replicas.

    A law is of all replicas: it is supported if each check at the largest size is.
    """
    found = list[_Fitted]()
    for scheme in dict.fromkeys(each for each, _ in EVERY if each not in (FULL, FULL_MUON)):
        own = points(scheme, done)
        if len({point.parameters for point in own}) < LEAST:
            continue
        law = fit(own)
        laws = draws(own, count=count)
        supported = all(check.supported for check in held_out(own, count))
        verdict = "supported" if supported else "refuted"
        for replicas in sorted({point.replicas for point in own}):
            same = [point for point in own if point.replicas == replicas]
            largest = max(same, key=attrgetter("parameters"))
            found.append(_Fitted(scheme, replicas, largest, law, laws, spread(own), verdict))
    return found


def _references(size: Size, done: Rows) -> list[Expected]:
    """Full synchronisation by each optimizer that is tuned."""
    found = list[Expected]()
    for scheme in (FULL, FULL_MUON):
        sets = _sets(size, scheme, 1, done)
        if sets:
            found.append(Expected(scheme.name, 1, "", sets))
    return found


def _at(size: Size, fitted: _Fitted, done: Rows) -> Expected:
    expected = Expected(
        scheme=fitted.scheme.name,
        replicas=fitted.replicas,
        to=reference(fitted.scheme).name,
        sets=_sets(size, fitted.scheme, fitted.replicas, done),
    )
    if fitted.verdict == "refuted" and fitted.scheme == DILOCO:
        return _by_published_law(size, fitted, expected)
    where = size.parameters, fitted.replicas
    chance = random.Random(1)
    low, high = interval([each.cost(*where) for each in fitted.draws])
    runs = [each.log(*where) + chance.gauss(0, fitted.spread) for each in fitted.draws]
    run_low, run_high = interval(runs)
    return dataclasses.replace(
        expected,
        cost=fitted.law.cost(*where),
        low=low,
        high=high,
        run_low=math.expm1(run_low),
        run_high=math.expm1(run_high),
        law=fitted.verdict,
    )


def _by_published_law(size: Size, fitted: _Fitted, expected: Expected) -> Expected:
    """Extrapolates the cost at the largest size by the published law, as `plan` does."""
    largest = fitted.largest
    middle = statistics.fmean(largest.logs)
    error = SIGMAS * fitted.spread / math.sqrt(len(largest.logs))
    ends = math.expm1(middle - error), math.expm1(middle + error)
    times = size.parameters / largest.parameters
    both = fitted.replicas, fitted.replicas
    cost, (low, high) = carried(math.expm1(middle), ends, times, both)
    of_a_run = SIGMAS * fitted.spread
    return dataclasses.replace(
        expected,
        cost=cost,
        low=low,
        high=high,
        run_low=math.expm1(math.log1p(low) - of_a_run),
        run_high=math.expm1(math.log1p(high) + of_a_run),
        law="published",
    )


def _sets(size: Size, scheme: Scheme, replicas: int, done: Rows) -> tuple[str, ...]:
    """Settings of scheme and optimizer at a size; none until its rule is known."""
    found = list[str]()
    for method in judging(size, ((scheme, replicas),), done):
        sets = method.cell(method.rates[0], method.variants[0]).sets
        found = [each for each in sets if each.startswith(("scheme.", "optimizer."))]
    return tuple(found)
