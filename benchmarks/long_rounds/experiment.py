"""Rounds of 30, 100 and 300 steps over 3,000 steps: an experiment of days, at low priority, that can stop at any time.

    nice -n 19 python -m benchmarks.long_rounds [--limit N] [--seed 0 1] [--only WORDS]   trains the next missing runs
    python -m benchmarks.long_rounds --status                                          what is there, and what is next
    python -m benchmarks.long_rounds --table                                     losses, bytes, seconds and seeds so far

research/long-rounds.md has the questions, the expectations and the answers; benchmarks/long_rounds/grid.py lists the
runs. Each run is one simulated training in a process of its own with one thread, and one file of --results. A run saves
its state under --scratch after every 500 steps and goes on from there after Ctrl-C. Several callers may share the
two directories: each takes a run that nobody else trains.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.compare import queue
from benchmarks.compare.paired import Measured
from benchmarks.compare.rows import Cell
from benchmarks.compare.tuning import measured
from benchmarks.long_rounds import grid
from benchmarks.long_rounds.run import run_cell
from benchmarks.long_rounds.table import table

from detonation.data.packages import cache_dir

RESULTS = Path("benchmarks/results/long-rounds")


def planned() -> Iterator[Measured]:
    """What the planner learns: the references and the schemes, as one study."""
    done = queue.rows(RESULTS)
    for each in grid.methods(done):
        if each.study in ("references", "rounds"):
            for scheme, recipe, replicas, runs, _, source in measured(each, done):
                yield scheme, recipe, replicas, runs, "long rounds", source


def main(arguments: Sequence[str] | None = None) -> None:
    parser = queue.parser(__doc__, RESULTS, cache_dir() / "long-rounds")
    parser.add_argument("--seed", type=int, nargs="+", help="only runs of these seeds")
    args = parser.parse_args(arguments)

    def wanted(cell: Cell) -> bool:
        return (args.seed is None or cell.seed in args.seed) and queue.named(cell, args.only)

    if args.cell:
        torch.set_num_threads(1)
        run_cell(args.cell, args.results, args.scratch)
    elif args.table:
        print(table(grid.methods, queue.rows(args.results)))
    elif args.status:
        print(queue.status(grid.methods, args.results))
    else:
        run = partial(queue.in_a_process, "benchmarks.long_rounds")
        queue.run_missing(grid.methods, args.results, args.scratch, run, args.limit, wanted)
