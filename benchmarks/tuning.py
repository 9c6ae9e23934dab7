"""Methods that are compared with the same budget of tuning, and judged on seeds that did not tune them.

Seed 0 tunes a method: each of its learning rates with a cosine that ends at the first floor (0.1 of the rate), then the
best of them with the other floors (0). Seeds from 1 on judge the best setting. Rows are kept in a file, so that runs
can be stopped.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from frontier import Row, rows
from frontier_grid import Cell
from paired import judged

Rows = dict[tuple[object, ...], Row]


@dataclasses.dataclass(frozen=True)
class Method:
    """One line of a table.

    sets: settings without a learning rate; rates, floors: the learning rates that are tried, and the shares of them at
    which the cosine ends.
    """

    study: str
    name: str
    recipe: str
    sets: str
    rates: tuple[float, ...]
    total: int
    replicas: int = 2
    seeds: int = 3
    floors: tuple[float, ...] = (0.1, 0.0)

    def cell(self, rate: float, floor: float, seed: int) -> Cell:
        sets = f"{self.sets} optimizer.lr={rate} schedule.floor={floor}"
        return Cell(self.study, self.name, self.recipe, tuple(sets.split()), self.replicas, self.total, seed)

    def tried(self, done: Rows) -> list[Cell]:
        """The settings that seed 0 tries: those with other floors are known once all rates are done."""
        rates = [self.cell(rate, self.floors[0], 0) for rate in self.rates]
        if any(cell.key not in done for cell in rates):
            return rates
        best = min(zip(rates, self.rates, strict=True), key=lambda pair: loss(done[pair[0].key]))[1]
        return [*rates, *(self.cell(best, floor, 0) for floor in self.floors[1:])]

    def best(self, done: Rows) -> Cell | None:
        """The setting that seed 0 chose; None until it has tried all."""
        tried = self.tried(done)
        if any(cell.key not in done for cell in tried):
            return None
        return min(tried, key=lambda cell: loss(done[cell.key]))

    def judging(self, done: Rows) -> dict[int, Cell]:
        """The best setting with each judging seed; empty until it is known."""
        best = self.best(done)
        return {seed: dataclasses.replace(best, seed=seed) for seed in range(1, self.seeds + 1)} if best else {}

    def judged(self, done: Rows) -> dict[int, Row]:
        """The judging runs that are done and did not diverge, by seed."""
        keys = {seed: cell.key for seed, cell in self.judging(done).items()}
        return {seed: done[key] for seed, key in keys.items() if key in done and done[key]["val_loss"]}

    def chosen(self, done: Rows) -> str:
        """The learning rate and the floor that seed 0 chose; a rate at the edge of its grid is marked."""
        best = self.best(done)
        if best is None:
            return ""
        rate, floor = (float(each.split("=")[1]) for each in best.sets[-2:])
        edge = " (edge)" if rate in (self.rates[0], self.rates[-1]) else ""
        return f"{rate:g}{edge}, {floor:g}"


def loss(row: Row) -> float:
    """The validation loss; infinite where the run diverged."""
    return float(row["val_loss"] or math.inf)


def run_missing(
    methods: Sequence[Method], path: Path, run: Callable[[Cell], Row], only: str = "", limit: int = 10**9
) -> None:
    """Runs what is missing in `path`, of methods whose study, name, recipe and R=number; hold all words of `only`."""
    wanted = [m for m in methods if all(w in f"{m.study} {m.name} {m.recipe} R={m.replicas};" for w in only.split())]
    for _ in range(limit):
        cell = next(missing(wanted, rows(path)), None)
        if cell is None:
            return
        row = run(cell)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(cell.study, cell.method, *cell.sets[-2:], f"R={cell.replicas} seed={cell.seed}", loss(row), flush=True)


def missing(methods: Iterable[Method], done: Rows) -> Iterator[Cell]:
    """Runs that are not done: a method's tuning, then its judging seeds, then the next method."""
    for method in methods:
        cells = [*method.tried(done), *method.judging(done).values()]
        yield from (cell for cell in cells if cell.key not in done)


def against(runs: dict[int, Row], reference: dict[int, Row]) -> str:
    """Mean and 95 % interval of the relative difference on equal seeds, in percent; empty below three seeds."""
    if runs == reference or len(set(runs) & set(reference)) < 3:
        return ""
    mean, ends, _ = judged(runs, {seed: row["val_loss"] for seed, row in reference.items()})
    assert ends is not None
    return f"{100 * mean:+.1f} [{100 * ends[0]:+.1f}, {100 * ends[1]:+.1f}]"
