"""The laws of the schemes from the rows: `--fit` prints them, `--figure` draws that of `diloco`.
`--published` compares earlier rows with a law that others fitted.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare.drawing import drawn
from benchmarks.compare.rows import Row
from benchmarks.compare.tuning import Rows, losses
from benchmarks.size_law.fit import (
    DRAWS,
    Law,
    Point,
    draws,
    fit,
    held_out,
    interval,
    per_decade,
    resampled,
    residuals,
)
from benchmarks.size_law.grid import DILOCO, FULL, FULL_MUON, SIZES, Scheme
from benchmarks.size_law.power import PUBLISHED
from benchmarks.size_law.sizes import LARGEST, Size
from benchmarks.size_law.table import EVERY, runs_of

from detonation.plan import law as rounds_law
from detonation.plan.losses import Goal, estimate, loss_table, relative
from detonation.schemes import streaming_diloco

AT = 30e6, 125e6
"""Parameters of the models that are predicted."""
HEADER = (
    "scheme | replicas | to | sizes | runs | exponent of size | per decade, % | "
    "cost at 30M, % | cost at 125M, % | largest size: predicted without it | found | law"
)
SHADES = {2: "tab:blue", 4: "tab:green", 8: "tab:red"}


def reference(scheme: Scheme) -> Scheme:
    """Full synchronisation with the optimizer of the scheme; of AdamW for signs."""
    return FULL_MUON if scheme.optimizer == "muon" else FULL


def points(scheme: Scheme, done: Rows) -> list[Point]:
    """What each size has shown of a scheme, for each number of replicas, on the seeds of both."""
    found = list[Point]()
    for size in (*SIZES, LARGEST):
        base = losses_of(size, reference(scheme), 1, done)
        for replicas in (count for each, count in EVERY if each == scheme):
            own = losses_of(size, scheme, replicas, done)
            logs = [math.log(own[seed] / base[seed]) for seed in sorted(set(own) & set(base))]
            if logs:
                found.append(Point(size.parameters, replicas, tuple(logs)))
    return found


def losses_of(size: Size, scheme: Scheme, replicas: int, done: Rows) -> dict[int, float]:
    runs: dict[int, Row] = runs_of(size, scheme, replicas, done)
    return losses(runs)


def table(done: Rows, count: int = DRAWS) -> str:
    """One line per scheme and number of replicas that two sizes have judged; then the residuals."""
    lines = [f"| {HEADER} |", "|---" * (HEADER.count("|") + 1) + "|"]
    rest = [
        "",
        "| scheme | parameters | replicas | found, relative to the law, % |",
        "|---|---|---|---|",
    ]
    schemes = dict.fromkeys(each for each, _ in EVERY if each not in (FULL, FULL_MUON))
    for scheme in schemes:
        found = points(scheme, done)
        if len({point.parameters for point in found}) >= 2:
            lines += _lines(scheme, found, count)
            rest += [
                f"| {scheme.name} | {size:,.0f} | {replicas} | {100 * each:+.2f} |"
                for (size, replicas), each in residuals(found, fit(found)).items()
            ]
    if len(lines) == 2:
        return "no law yet: two sizes of a scheme must be judged"
    return "\n".join([*lines, *rest])


def _lines(scheme: Scheme, found: list[Point], count: int) -> list[str]:
    laws = draws(found, count=count)
    law, sizes = fit(found), sorted({point.parameters for point in found})
    checks = {each.replicas: each for each in held_out(found, count)} if len(sizes) > 2 else {}
    lines = list[str]()
    for replicas in sorted({point.replicas for point in found}):
        own = [point for point in found if point.replicas == replicas]
        check = checks.get(replicas)
        cells = [
            scheme.name,
            str(replicas),
            reference(scheme).name,
            f"{min(sizes):,.0f} to {max(sizes):,.0f}",
            str(sum(len(point.logs) for point in own)),
            bounded(law.size, [each.size for each in laws], 1, ".2f"),
            _decades(own, count),
            *(costs(law, laws, parameters, replicas) for parameters in AT),
        ]
        if check is not None:
            low, high = 100 * check.low, 100 * check.high
            cells.append(f"{100 * check.expected:+.1f} [{low:+.1f}, {high:+.1f}]")
            cells.append(f"{100 * check.found:+.1f}")
            cells.append("supported" if check.supported else "refuted")
        lines.append("| " + " | ".join(cells + [""] * (HEADER.count("|") + 1 - len(cells))) + " |")
    return lines


def _decades(own: list[Point], count: int) -> str:
    if len({point.parameters for point in own}) < 2:
        return ""
    drawn_slopes = [per_decade(each) for each in resampled(own, count)]
    return bounded(per_decade(own), drawn_slopes, 100, "+.1f")


def costs(law: Law, laws: list[Law], parameters: float, replicas: int) -> str:
    """The cost at a size by the law, with its interval, in percent."""
    every = [each.cost(parameters, replicas) for each in laws]
    return bounded(law.cost(parameters, replicas), every, 100, "+.1f")


def bounded(value: float, every: list[float], times: float, form: str) -> str:
    low, high = interval(every)
    return f"{times * value:{form}} [{times * low:{form}}, {times * high:{form}}]"


def figure(done: Rows, path: Path) -> None:
    """Draws the costs of `diloco` by size: our runs, the law that is fitted to these runs, and the
    published law (solid at the sizes to which it was fitted).
    """
    found = points(DILOCO, done)
    law, published_law = fit(found), Law(*PUBLISHED)
    with drawn(path, 7, 4) as drawing:
        axes = drawing.subplots()
        sizes = [10 ** (4.4 + step / 20) for step in range(101)]
        fitted = [size for size in sizes if size >= rounds_law.SIZES[0]]
        for replicas in sorted({point.replicas for point in found}):
            colour = SHADES[replicas]
            words = f"{replicas} replicas"
            curves = (
                (published_law, fitted, "-", f"law of Charles et al., {words}"),
                (published_law, sizes, "--", "the same law at smaller sizes"),
                (law, sizes, ":", f"power law of our runs, {words}"),
            )
            for chosen, where, style, label in curves:
                line = [100 * chosen.cost(size, replicas) for size in where]
                axes.plot(where, line, style, color=colour, label=label)
            own = [point for point in found if point.replicas == replicas]
            marks = [(point.parameters, 100 * math.expm1(y)) for point in own for y in point.logs]
            axes.plot(*zip(*marks, strict=True), ".", color=colour, label=f"our runs, {words}")
        axes.set(xscale="log", xlabel="parameters")
        axes.set_ylabel("loss relative to AdamW with\nfull synchronisation, %")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)


def published() -> str:
    """AdamW in rounds of 30 steps: what was measured, what the published law says there, and what
    the planner expects of larger models.
    """
    return "\n".join(
        [
            "| scheme | parameters | replicas | measured | law there | exponent to the law at 35M |",
            "|---|---|---|---|---|---|",
            *_measured(),
            "",
            "| parameters | 2 replicas: law; expected | 8 | 64 |",
            "|---|---|---|---|",
            *_planned(),
        ]
    )


def _measured() -> Iterator[str]:
    full = {
        row.task: row.losses for row in loss_table() if row.is_full and row.optimizer == "AdamW"
    }
    for row in loss_table():
        if row.has_law and row.arguments["every"] == rounds_law.LONGEST:
            cost, ends, _ = relative(row.losses, full[row.task])
            assert ends is not None
            kept = f", keep {row.arguments['keep']}" if "keep" in row.arguments else ""
            where = f"| `{row.scheme}`{kept} | {row.parameters:,} | {row.replicas} |"
            law = _law(row.parameters, row.replicas)
            exponent = _exponent(cost, row.parameters, row.replicas)
            yield f"{where} {ranged(cost, ends)} | {law} | {exponent:.2f} |"


def _planned() -> Iterator[str]:
    """The law, and what `plan` expects of `streaming_diloco` every 30, after 3,000 steps."""
    scheme = streaming_diloco(every=rounds_law.LONGEST, delay=5, keep=0.0)
    sizes = {"35M": 35_000_000, "125M": 125_000_000, "1B": 10**9, "8B": 8 * 10**9}
    for name, parameters in sizes.items():
        cells = [name]
        for replicas in (2, 8, 64):
            found = estimate(scheme, "AdamW", Goal(replicas, parameters, 3000))
            assert found is not None
            cells.append(f"{_law(parameters, replicas)}; {ranged(found.cost, found.interval)}")
        yield f"| {' | '.join(cells)} |"


def _law(parameters: float, replicas: int) -> str:
    return f"{100 * rounds_law.cost_of_rounds(parameters, replicas):+.1f} %"


def ranged(cost: float, ends: tuple[float, float]) -> str:
    """A cost with its interval, in percent."""
    low, high = (100 * end for end in ends)
    return f"{100 * cost:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _exponent(cost: float, parameters: float, replicas: int) -> float:
    """The exponent of size with which a measured cost reaches the law at its smallest size."""
    there = math.log1p(rounds_law.cost_of_rounds(rounds_law.SIZES[0], replicas))
    return math.log(math.log1p(cost) / there) / math.log(rounds_law.SIZES[0] / parameters)
