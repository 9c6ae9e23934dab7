"""A law of size: what each scheme costs, from 0.04 to 2.3 million parameters.

    nice -n 19 python -m benchmarks.size_law [--limit N] [--only WORDS]   trains what is missing
    python -m benchmarks.size_law --fetch                      fetches the text, from apt and npm
    python -m benchmarks.size_law --status                     what is there, and what is next
    python -m benchmarks.size_law --table                      losses so far, and the tries
    python -m benchmarks.size_law --fit [--figure PATH]        the laws so far, and a figure
    python -m benchmarks.size_law --power                      what the grid can tell

research/size-law.md has the questions, the rules and the expectations. Each run is one simulated
training in a process of its own with one thread, and one line of --results. It saves its state
under --scratch after every 500 steps and goes on from there. Several callers may share the two
directories: each takes a run that nobody else trains.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.size_law import laws, power
from benchmarks.size_law.grid import methods
from benchmarks.size_law.run import rows, run_cell
from benchmarks.size_law.table import table
from benchmarks.size_law.text import fetch_text
from frontier_grid import Cell
from long_rounds import in_a_process, run_missing, status

from detonation.data.packages import cache_dir

RESULTS = Path("benchmarks/results/size-law")
MODULE = "benchmarks.size_law"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    parser.add_argument(
        "--only", default="", help="runs whose study, method, settings or R=number; hold all words"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--scratch",
        type=Path,
        default=cache_dir() / "size-law" / "unfinished",
        help="states of unfinished runs, and locks",
    )
    for name in ("fetch", "fit", "power", "status", "table"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--figure", type=Path, help="with --fit: draws the law of diloco, .svg and .png"
    )
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)  # of `in_a_process`
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)

    def wanted(cell: Cell) -> bool:
        text = f"{cell.study} {cell.method} {' '.join(cell.sets)} R={cell.replicas};"
        return all(word in text for word in args.only.split())

    if args.cell:
        torch.set_num_threads(1)
        cell = Cell(**{**args.cell, "sets": tuple(args.cell["sets"])})
        run_cell(cell, args.results, args.scratch)
    elif args.fetch:
        print(fetch_text())
    elif args.fit:
        print(laws.table(rows(args.results)))
        if args.figure:
            laws.figure(rows(args.results), args.figure)
    elif args.power:
        print(power.table())
    elif args.status:
        print(status(methods, args.results, rows))
    elif args.table:
        print(table(rows(args.results)))
    else:
        run = partial(in_a_process, module=MODULE)
        run_missing(methods, args.results, args.scratch, args.limit, wanted, run, rows)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run goes on from its last state
        sys.exit(130)
