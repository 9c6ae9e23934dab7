"""A law of size: what each scheme costs, from 0.04 to 2.3 million parameters.

    nice -n 19 python -m benchmarks.size_law [--limit N] [--only WORDS]   trains what is missing
    python -m benchmarks.size_law --fetch                      fetches the text, from apt and npm
    python -m benchmarks.size_law --status                     what is there, and what is next
    python -m benchmarks.size_law --table                      losses so far, and the tries
    python -m benchmarks.size_law --fit [--figure PATH]        the laws so far, and a figure
    python -m benchmarks.size_law --predict                    writes down what the laws predict
    python -m benchmarks.size_law --power                      what the grid can tell
    python -m benchmarks.size_law --published                  AdamW in rounds: earlier rows and the published law

research/size-law.md has the questions, the rules and the expectations. Each run is one simulated
training in a process of its own with one thread, and one line of --results. It saves its state
under --scratch after every 500 steps and goes on from there. Several callers may share the two
directories: each takes a run that nobody else trains.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.compare import queue
from benchmarks.size_law import laws, power, predict
from benchmarks.size_law.grid import methods
from benchmarks.size_law.run import rows, run_cell
from benchmarks.size_law.table import table
from benchmarks.size_law.text import fetch_text

from detonation.data.packages import cache_dir

RESULTS = Path("benchmarks/results/size-law")
MODULE = "benchmarks.size_law"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = queue.parser(__doc__, RESULTS, cache_dir() / "size-law" / "unfinished")
    for name in ("fetch", "fit", "predict", "power", "published"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--figure", type=Path, help="with --fit: draws the law of diloco, .svg and .png"
    )
    return parser.parse_args(arguments)


def predicted(results: Path) -> str:
    try:
        return predict.write(rows(results), predict.PATH)
    except ValueError as error:
        sys.exit(str(error))


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    if args.cell:
        torch.set_num_threads(1)
        run_cell(args.cell, args.results, args.scratch)
    elif args.fetch:
        print(fetch_text())
    elif args.fit:
        print(laws.table(rows(args.results)))
        if args.figure:
            laws.figure(rows(args.results), args.figure)
    elif args.predict:
        print(predicted(args.results))
    elif args.published:
        print(laws.published())
    elif args.power:
        print(power.table())
    elif args.status:
        print(queue.status(methods, args.results, rows))
    elif args.table:
        done = rows(args.results)
        print(table(done), laws.table(done), predict.table(predict.PATH), sep="\n\n")
    else:
        run = partial(queue.in_a_process, MODULE)
        wanted = partial(queue.named, only=args.only)
        queue.run_missing(methods, args.results, args.scratch, run, args.limit, wanted, rows)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run goes on from its last state
        sys.exit(130)
