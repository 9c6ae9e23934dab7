"""The second round of experiments: every method with the same budget of tuning, judged on seeds that did not tune it.

    python benchmarks/second_round.py run [--only WORDS] [--limit N]     runs what is missing, one by one
    python benchmarks/second_round.py table                              losses with paired 95 % intervals

The corpus is `sotu` (10.8 MB), and all held-out blocks are evaluated. Each method runs with five learning rates, each
with a floor of 0 and of 0.1 of its cosine, on seed 0 (`tune`); the best of the ten judges itself on the other seeds
(`judge`). Where the best learning rate is the first or the last of five, the table says so. A run is one simulated
training with 32 examples per step over all replicas. Rows are kept in `RESULTS`, so that the benchmark can be stopped.
Intervals are paired over seeds, against a dense method (full synchronisation) with equal seeds.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from frontier import Row, per_parameter, rows, run
from frontier_grid import QUICK, Cell
from paired import judged

RESULTS = Path("benchmarks/results/2026-11-22-second-round.jsonl")
COMMON = "data.source=sotu train.validation_batches=1000000"
FLOORS = (0.0, 0.1)
TOTAL = 32


@dataclasses.dataclass(frozen=True)
class Method:
    """One line of the table. `sets`: settings without a learning rate; `rates`: the five of its grid."""

    study: str
    name: str
    sets: str
    rates: tuple[float, float, float, float, float]
    replicas: int = 2
    seeds: int = 3

    def cell(self, rate: float, floor: float, seed: int) -> Cell:
        sets = f"{COMMON} {self.sets} optimizer.lr={rate} schedule.floor={floor}"
        return Cell(self.study, self.name, QUICK, tuple(sets.split()), self.replicas, TOTAL, seed)

    def tuning(self) -> list[Cell]:
        return [self.cell(rate, floor, 0) for rate in self.rates for floor in FLOORS]


ADAMW = "optimizer.name=AdamW optimizer.betas=[0.9,{}]"
MUON = "optimizer.name=Muon"
ADAMW_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MUON_RATES = (5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
SIGN_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
VOTE_RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)


def methods() -> Iterator[Method]:
    """Lists the methods, the most important first."""
    full = "scheme.name=full "
    yield Method("X1", "AdamW 0.999, full", full + ADAMW.format(0.999), ADAMW_RATES, seeds=8)
    yield Method("X1", "Muon, full", full + MUON, MUON_RATES, seeds=8)
    yield Method("X2", "loco 4bit, Muon", "scheme.name=loco " + MUON, MUON_RATES, seeds=8)
    yield Method("X2", "loco 4bit, AdamW", "scheme.name=loco " + ADAMW.format(0.999), ADAMW_RATES, seeds=8)
    yield Method("X1", "demo 1/64 sign", _demo(1), SIGN_RATES, seeds=8)
    yield Method("X1", "random_sign 1/8", _votes(8), VOTE_RATES, 8, seeds=8)
    for decay in (0.9, 0.95):
        signum = f"{full}optimizer.name=SignSGD optimizer.momentum={decay}"
        yield Method("X1", f"Signum {decay}, full", signum, SIGN_RATES)
    yield Method("X1", "AdamW 0.95, full", full + ADAMW.format(0.95), ADAMW_RATES)
    yield Method("X1", "AdamW 0.999, full bf16", "scheme.precision=bf16 " + full + ADAMW.format(0.999), ADAMW_RATES)
    for precision in ("2bit", "sign"):
        loco = f"scheme.name=loco scheme.precision={precision} "
        yield Method("X2", f"loco {precision}, Muon", loco + MUON, MUON_RATES)
        yield Method("X2", f"loco {precision}, AdamW", loco + ADAMW.format(0.999), ADAMW_RATES)
    plain = f"{_demo(4, 0.95).replace('SignSGD', 'Muon')} optimizer.momentum=0"
    yield Method("X2", "demo 4/64 sign, Muon", plain, MUON_RATES)
    for replicas in (2, 8):
        rounds = "scheme.name=muloco scheme.every=30 scheme.precision=2bit scheme.outer_lr=1 scheme.outer_momentum=0 "
        yield Method("X3", "muloco 30, 2bit", rounds + MUON, MUON_RATES, replicas)
    for share in (1, 2, 4, 16):
        yield Method("X1", f"random_sign 1/{share}", _votes(share), VOTE_RATES, 8)
    for replicas in (4, 8):
        yield Method("X5", "demo 1/64 sign", _demo(1), SIGN_RATES, replicas)
    yield Method("X2", "loco 4bit, Muon", "scheme.name=loco " + MUON, MUON_RATES, 8)
    yield Method("X2", "loco 4bit, AdamW", "scheme.name=loco " + ADAMW.format(0.999), ADAMW_RATES, 8)
    for decay in (0.0, 0.5, 0.97):
        yield Method("X4", f"random_sign 1/8, decay {decay}", _votes(8, decay), VOTE_RATES, 8)


def _demo(topk: int, decay: float = 0.95) -> str:
    codec = f"scheme.topk={topk} scheme.chunk=64 scheme.precision=sign scheme.error_feedback=false"
    return f"scheme.name=demo {codec} scheme.decay={decay} optimizer.name=SignSGD"


def _votes(share: int, decay: float = 0.9) -> str:
    return f"scheme.name=random_sign scheme.rate={1 / share} scheme.decay={decay} optimizer.name=SignSGD"


def best(method: Method, done: dict[tuple[object, ...], Row]) -> Cell | None:
    """The setting that seed 0 chose; None until its grid is whole. A run that diverged has no loss and loses."""
    grid = method.tuning()
    if any(cell.key not in done for cell in grid):
        return None
    return min(grid, key=lambda cell: done[cell.key]["val_loss"] or float("inf"))


def missing(done: dict[tuple[object, ...], Row]) -> Iterator[Cell]:
    """Runs that are not done: a method's grid, then its judging seeds, then the next method."""
    for method in methods():
        yield from (cell for cell in method.tuning() if cell.key not in done)
        chosen = best(method, done)
        if chosen is not None:
            judging = (dataclasses.replace(chosen, seed=seed) for seed in range(1, method.seeds + 1))
            yield from (cell for cell in judging if cell.key not in done)


def run_missing(path: Path, only: str, limit: int) -> None:
    for _ in range(limit):
        todo = (
            c
            for c in missing(rows(path))
            if all(word in f"{c.study} {c.method} R={c.replicas};" for word in only.split())
        )
        cell = next(todo, None)
        if cell is None:
            return
        row = run(cell)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            cell.study,
            cell.method,
            f"R={cell.replicas}",
            *cell.sets[-2:],
            f"seed={cell.seed}",
            row["val_loss"],
            flush=True,
        )


def table(done: dict[tuple[object, ...], Row]) -> str:
    """One line per method: chosen setting, bytes, mean loss, and its difference to each dense reference."""
    shown: dict[tuple[str, int], tuple[Method, Cell, dict[int, Row]]] = {}
    for method in methods():
        chosen = best(method, done)
        if chosen is not None:
            keys = {s: dataclasses.replace(chosen, seed=s).key for s in range(1, method.seeds + 1)}
            runs = {seed: done[key] for seed, key in keys.items() if key in done and done[key]["val_loss"]}
            shown[method.name, method.replicas] = (method, chosen, runs)
    lines = [
        "| study | method | replicas | lr | floor | bytes per parameter and step | seeds | val loss "
        "| to AdamW in full, % | to Muon in full, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    references = [shown[name, 2][2] if (name, 2) in shown else {} for name in ("AdamW 0.999, full", "Muon, full")]
    for method, chosen, runs in shown.values():
        rate, floor = (float(s.split("=")[1]) for s in chosen.sets[-2:])
        edge = " (edge)" if rate in (method.rates[0], method.rates[-1]) else ""
        mean = f"{statistics.fmean(row['val_loss'] for row in runs.values()):.4f}" if runs else ""
        sent = f"{per_parameter(done[chosen.key]):.4f}"
        cells = [method.study, method.name, str(method.replicas), f"{rate:g}{edge}", f"{floor:g}", sent, str(len(runs))]
        lines.append("| " + " | ".join([*cells, mean, *(against(runs, each) for each in references)]) + " |")
    return "\n".join(lines)


def against(runs: dict[int, Row], reference: dict[int, Row]) -> str:
    """Mean and 95 % interval of the relative difference on equal seeds, in percent; empty below three seeds."""
    if runs is reference or len(set(runs) & set(reference)) < 3:
        return ""
    mean, ends, _ = judged(runs, {seed: row["val_loss"] for seed, row in reference.items()})
    assert ends is not None
    return f"{100 * mean:+.1f} [{100 * ends[0]:+.1f}, {100 * ends[1]:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="runs whose study, method or R=number; hold all these words")
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    args = parser.parse_args()
    if args.action == "run":
        run_missing(args.results, args.only, args.limit)
    else:
        print(table(rows(args.results)))


if __name__ == "__main__":
    main()
