"""Methods that are compared with the same budget of tuning, and judged on seeds that did not tune them.

Seed 0 tunes a method: the three learning rates in the middle of its grid, then the next one as long as the last one of
an end is the best, then other settings (variants) at the best rate. Seeds from 1 on judge the best setting. Rows are
kept in a file, so that runs can be stopped.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.compare.paired import Measured, judged, percent, scheme_of
from benchmarks.compare.rows import Cell, Row, rows

Rows = dict[tuple[object, ...], Row]


@dataclasses.dataclass(frozen=True)
class Method:
    """One line of a table.

    sets: settings without a learning rate and a variant; rates: learning rates in their order, an odd number; variants:
    settings of which the first goes with each rate, and the others with the best. A single setting needs no try.
    """

    study: str
    name: str
    recipe: str
    sets: str
    rates: tuple[float, ...]
    total: int
    replicas: int = 2
    seeds: int = 3
    variants: tuple[str, ...] = ("schedule.floor=0.1",)

    def cell(self, rate: float, variant: str) -> Cell:
        sets = f"{self.sets} optimizer.lr={rate} {variant}"
        return Cell(
            self.study,
            self.name,
            self.recipe,
            tuple(sets.split()),
            self.replicas,
            self.total,
            seed=0,
        )

    def tried(self, done: Rows) -> list[Cell]:
        """The settings that seed 0 tries, as far as they follow from the runs that are done."""
        every = [self.cell(rate, self.variants[0]) for rate in self.rates]
        middle = len(every) // 2
        low, high = max(middle - 1, 0), min(middle + 2, len(every))
        while True:
            cells = every[low:high]
            if any(cell.key not in done for cell in cells):
                return cells
            best = min(range(low, high), key=lambda number: loss(done[every[number].key]))
            if best == low > 0:
                low -= 1
            elif best == high - 1 < len(every) - 1:
                high += 1
            else:
                return [
                    *cells,
                    *(self.cell(self.rates[best], variant) for variant in self.variants[1:]),
                ]

    def best(self, done: Rows) -> Cell | None:
        """The setting that seed 0 chose; None until it has tried all."""
        tried = self.tried(done)
        if len(tried) == 1:
            return tried[0]
        if any(cell.key not in done for cell in tried):
            return None
        return min(tried, key=lambda cell: loss(done[cell.key]))

    def judging(self, done: Rows) -> dict[int, Cell]:
        """The best setting with each judging seed; empty until it is known."""
        best = self.best(done)
        return self._seeded(best) if best else {}

    def judged(self, done: Rows) -> dict[int, Row]:
        """The judging runs of the best setting that are done and did not diverge, by seed."""
        best = self.best(done)
        return self.runs(best, done) if best else {}

    def runs(self, cell: Cell, done: Rows) -> dict[int, Row]:
        """The judging runs of a setting that are done and did not diverge, by seed."""
        keys = {seed: each.key for seed, each in self._seeded(cell).items()}
        return {
            seed: done[key] for seed, key in keys.items() if key in done and done[key]["val_loss"]
        }

    def diverges(self, cell: Cell, done: Rows) -> bool:
        """True if a judging run of a setting diverged: the mean of the others would flatter it."""
        return any(
            each.key in done and not done[each.key]["val_loss"]
            for each in self._seeded(cell).values()
        )

    def _seeded(self, cell: Cell) -> dict[int, Cell]:
        return {seed: dataclasses.replace(cell, seed=seed) for seed in range(1, self.seeds + 1)}

    def chosen(self, done: Rows) -> str:
        """The learning rate that seed 0 chose, and in what the variants differ; an edge of the grid is marked."""
        best = self.best(done)
        if best is None:
            return ""
        settings = best.settings
        edge = (
            " (edge)"
            if len(self.rates) > 1 and best.rate in (self.rates[0], self.rates[-1])
            else ""
        )
        variants = [dict(each.split("=") for each in variant.split()) for variant in self.variants]
        odd = [key for key in variants[0] if len({each[key] for each in variants}) > 1]
        return ", ".join(
            [
                f"{best.rate:g}{edge}",
                *(f"{key.split('.')[1]} {float(settings[key]):g}" for key in odd),
            ]
        )


def loss(row: Row) -> float:
    """The validation loss; infinite where the run diverged."""
    return float(row["val_loss"] or math.inf)


def run_missing(
    methods: Sequence[Method],
    path: Path,
    run: Callable[[Cell], Row],
    only: str = "",
    limit: int = 10**9,
) -> None:
    """Runs what is missing in `path`, of methods whose study, name, recipe and R=number; hold all words of `only`."""
    wanted = [
        m
        for m in methods
        if all(w in f"{m.study} {m.name} {m.recipe} R={m.replicas};" for w in only.split())
    ]
    for _ in range(limit):
        cell = next(missing(wanted, rows(path)), None)
        if cell is None:
            return
        row = run(cell)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            cell.study,
            cell.method,
            *cell.sets[-2:],
            f"R={cell.replicas} seed={cell.seed}",
            loss(row),
            flush=True,
        )


def missing(methods: Iterable[Method], done: Rows) -> Iterator[Cell]:
    """Runs that are not done: a method's tuning, then its judging seeds, then the next method."""
    for method in methods:
        tried = method.tried(done)
        cells = [*(tried if len(tried) > 1 else ()), *method.judging(done).values()]
        yield from (cell for cell in cells if cell.key not in done)


def measured(method: Method, done: Rows) -> Iterator[Measured]:
    """What the planner learns of a method: every setting that three seeds judged."""
    for cell in method.tried(done):
        runs = method.runs(cell, done)
        if len(runs) >= 3 and not method.diverges(cell, done):
            if (
                scheme := scheme_of([one for one in cell.sets if one.startswith("scheme.")])
            ) is None:
                continue
            yield scheme, method.recipe, method.replicas, runs, method.study, "docs/findings.md"


def losses(runs: Mapping[int, Row]) -> dict[int, float]:
    """The validation losses of runs, by seed."""
    return {seed: row["val_loss"] for seed, row in runs.items()}


def against(runs: dict[int, Row], reference: dict[int, Row]) -> str:
    """Mean and 95 % interval of the relative difference on equal seeds, in percent; empty below three seeds."""
    if runs == reference or len(set(runs) & set(reference)) < 3:
        return ""
    return percent(*judged(runs, losses(reference))[:2])
