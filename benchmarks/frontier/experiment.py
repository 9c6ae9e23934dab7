"""Loss against bytes: the validation loss that each scheme reaches, and its bytes per parameter and step.

    python -m benchmarks.frontier run [--only WORDS] [--part 0/2] [--limit 3]     runs missing rows, one by one
    python -m benchmarks.frontier table > benchmarks/results/2026-11-22-frontier.md
    python -m benchmarks.frontier figure research/frontier                           writes .svg and .png

benchmarks/frontier/grid.py lists the runs in order of importance. Each is one simulated training (`detonation
simulate`), with the same examples per step for any number of replicas, and one row of --results. Existing rows are not
run again, so the benchmark can be stopped and continued. Seed 0 chose the learning rates; seeds 1, 2 and 3 judge them.
"""

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.drawing import drawn
from benchmarks.compare.rows import Row, per_parameter, rows, run
from benchmarks.frontier.grid import QUICK, grid

RESULTS = [Path(f"benchmarks/results/2026-11-{day}-frontier.jsonl") for day in (20, 22)]
NOISE = 0.05
"""Difference in loss between two runs that differ in their last bits only: research/log.md."""


def run_missing(path: Path, only: str, part: str, limit: int) -> None:
    number, parts = map(int, part.split("/"))
    wanted = {
        c.key: c
        for c in grid()
        if all(
            word in f"{c.study} {c.method} {c.recipe} {' '.join(c.sets)} R={c.replicas};"
            for word in only.split()
        )
    }
    missing = [
        c for i, c in enumerate(wanted.values()) if i % parts == number and c.key not in rows(path)
    ]
    for left, cell in zip(range(len(missing), 0, -1), missing[:limit], strict=False):
        row = run(cell)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            left,
            cell.study,
            " ".join(cell.sets),
            f"R={cell.replicas} seed={cell.seed}",
            row["val_loss"],
            flush=True,
        )


def groups(found: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Groups rows by `keys`, in the order of the grid; rows of a group differ in their seed alone."""
    grouped = defaultdict(list)
    for row in found:
        grouped[tuple(tuple(row[key]) if key == "sets" else row[key] for key in keys)].append(row)
    return dict(grouped)


def table(found: Sequence[Row]) -> str:
    """One line per setting: mean, smallest and largest validation loss over its seeds, and bytes."""
    lines = [
        "| study | method | recipe | settings | replicas | examples per step | seeds | val loss | min | max | accuracy "
        "| bytes per parameter and step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (study, method, recipe, sets, replicas, total), same in groups(
        found, "study", "method", "recipe", "sets", "replicas", "total"
    ).items():
        settings = " ".join(s.split(".", 1)[1] for s in sets)
        seeds = " ".join(str(row["seed"]) for row in same)
        cells = [
            study,
            method,
            Path(recipe).stem,
            settings,
            str(replicas),
            str(total),
            seeds,
            *measured(same),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measured(same: Sequence[Row]) -> list[str]:
    """Cells of one setting: mean, smallest and largest loss, accuracy and bytes."""
    losses = [row["val_loss"] for row in same]
    if None in losses:
        return ["diverged", "", "", "", ""]
    accuracies = [row["val_accuracy"] for row in same if "val_accuracy" in row]
    accuracy = f"{statistics.fmean(accuracies):.4f}" if accuracies else ""
    loss = [f"{f(losses):.4f}" for f in (statistics.fmean, min, max)]
    return [*loss, accuracy, f"{per_parameter(same[0]):.4f}"]


def figure(found: Sequence[Row], path: Path) -> None:
    """Loss against bytes on quick-lm at 2 replicas.

    Filled points are judged (mean, best and worst seed), hollow points are tuning runs. The grey band around AdamW with
    full synchronisation is the `NOISE` of single runs.
    """
    from detonation.report.figures import COLOURS

    asked = [row for row in found if row["study"] in ("bytes", "tuning") and row["recipe"] == QUICK]
    shown = [row for row in asked if row["val_loss"]]
    methods = list(dict.fromkeys(row["method"] for row in shown))
    full = statistics.fmean(row["val_loss"] for row in shown if row["method"] == "AdamW, full")
    with drawn(path, 8.6, 4.2) as drawing:
        axes = drawing.add_subplot()
        axes.axhspan(full - NOISE / 2, full + NOISE / 2, color="0.92", zorder=0)
        for (method, study, _), same in groups(shown, "method", "study", "sets").items():
            losses = [row["val_loss"] for row in same]
            mean, x, colour = (
                statistics.fmean(losses),
                per_parameter(same[0]),
                COLOURS[methods.index(method) % 6],
            )
            bar = [[mean - min(losses)], [max(losses) - mean]]
            face = colour if study == "bytes" else "white"
            axes.errorbar(
                [x],
                [mean],
                yerr=bar,
                fmt="os^"[methods.index(method) // 6],
                color=colour,
                markerfacecolor=face,
                capsize=3,
                markersize=7,
                label=method if study == "bytes" else None,
            )
        drawing.legend(frameon=False, loc="outside right upper")
        axes.set_xscale("log")
        axes.set_xlim(0.001, 12)
        axes.margins(y=0.12)
        axes.set_xlabel("bytes per parameter and step, sent by one of 2 replicas")
        axes.set_ylabel("validation loss (nats per byte)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "table", "figure"])
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("research/frontier"), help="of the figure"
    )
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        default=RESULTS,
        help="files of rows, later before earlier; runs go to the last",
    )
    parser.add_argument(
        "--only",
        default="",
        help="runs whose study, method, settings or R=number; hold all these words",
    )
    parser.add_argument(
        "--part",
        default="0/1",
        help="i/n: every n-th run from the i-th, to share them between processes",
    )
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    args = parser.parse_args()
    if args.action == "run":
        run_missing(args.results[-1], args.only, args.part, args.limit)
        return
    done, wanted = rows(*args.results), {cell.key: cell for cell in grid()}
    found = [
        {**done[key], **dataclasses.asdict(cell)} for key, cell in wanted.items() if key in done
    ]
    if args.action == "table":
        print(table(found))
    else:
        figure(found, args.path)
