"""Rounds of 30, 100 and 300 steps over 3,000 steps: an experiment of days, at low priority, that can stop at any time.

    nice -n 19 python -m benchmarks.long_rounds [--limit N] [--seed 0 1] [--only WORDS]   trains the next missing runs
    python -m benchmarks.long_rounds --status                                          what is there, and what is next
    python -m benchmarks.long_rounds --table                                     losses, bytes, seconds and seeds so far

research/long-rounds.md has the questions, the expectations and the answers; benchmarks/long_rounds_grid.py lists the
runs. Each run is one simulated training in a process of its own with one thread, and one file of --results. A run saves
its state under --scratch after every 500 steps and goes on from there after Ctrl-C. Several callers may share the
two directories: each takes a run that nobody else trains.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))

import long_rounds_grid
from frontier import Row
from frontier_grid import Cell
from long_rounds_run import judge, train
from long_rounds_table import table
from paired import Measured
from tuning import Method, Rows, measured, missing

from detonation.data.packages import cache_dir
from detonation.whole_files import write_whole

RESULTS = Path("benchmarks/results/long-rounds")


def file_name(cell: Cell) -> str:
    """The name of a run's files: its method in words, and a hash of all of its settings."""
    words = re.sub(r"[^a-z0-9]+", "-", cell.method.lower()).strip("-")
    digest = hashlib.sha256(json.dumps(cell.key).encode()).hexdigest()[:8]
    return f"{words}-r{cell.replicas}-seed{cell.seed}-{digest}"


def rows(results: Path) -> Rows:
    """The rows that are there, by the key of their run."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    return {
        (r["recipe"], tuple(sorted(r["sets"])), r["replicas"], r["total"], r["seed"]): r
        for r in found
    }


def run_cell(
    cell: Cell, results: Path, scratch: Path, judged: Callable[[Any], Row] = judge
) -> None:
    """Trains one run in this process, judges it at its end, and writes its row."""
    row = train(cell, scratch / file_name(cell), judged=judged)
    results.mkdir(parents=True, exist_ok=True)
    whole = json.dumps({**row, **made_by()}) + "\n"
    write_whole(results / f"{file_name(cell)}.json", whole.encode())
    shutil.rmtree(scratch / file_name(cell))


def in_a_process(
    cell: Cell, results: Path, scratch: Path, module: str = "benchmarks.long_rounds"
) -> None:
    """`run_cell` by `module` in a process of its own with one thread. Raises `CalledProcessError` where that fails."""
    where = [
        f"--results={results}",
        f"--scratch={scratch}",
        f"--cell={json.dumps(dataclasses.asdict(cell))}",
    ]
    command = [sys.executable, "-m", module, *where]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_missing(
    grid: Callable[[Rows], Iterator[Method]],
    results: Path,
    scratch: Path,
    limit: int = 10**9,
    wanted: Callable[[Cell], bool] = lambda cell: True,
    run: Callable[[Cell, Path, Path], None] = in_a_process,
    read: Callable[[Path], Rows] = rows,
) -> list[Cell]:
    """Runs what has no row and is `wanted`, in the order of the grid, until `limit` runs are done; returns them.

    read: Reads the rows that are there.
    """
    ran: list[Cell] = []
    while len(ran) < limit:
        done = read(results)
        for cell in filter(wanted, missing(grid(done), done)):
            with _claimed(scratch, file_name(cell)) as mine:
                # another process may have ended the run since
                if mine and cell.key not in read(results):
                    print(time.strftime("%H:%M:%S"), file_name(cell), flush=True)
                    run(cell, results, scratch)
                    ran.append(cell)
                    break
        else:
            return ran
    return ran


@contextmanager
def _claimed(scratch: Path, name: str) -> Iterator[bool]:
    """Whether a run is this process's until the end; the system lets go of it when a process dies."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def status(
    grid: Callable[[Rows], Iterator[Method]],
    results: Path,
    read: Callable[[Path], Rows] = rows,
) -> str:
    """How much of the grid is there, as far as it is known, and the next run."""
    done = read(results)
    every = list(dict.fromkeys(grid(done)))
    left = list({cell.key: cell for cell in missing(every, done)}.values())
    hours = sum(row["cpu_s"] for row in done.values()) / 3600
    following = f"; next {file_name(left[0])}" if left else ""
    spent = f"{len(done)} runs, {hours:.2f} processor-hours"
    return f"{spent}; {len(every)} methods, {len(left)} known runs left{following}"


def planned() -> Iterator[Measured]:
    """What the planner learns: the references and the schemes, as one study."""
    done = rows(RESULTS)
    for each in long_rounds_grid.methods(done):
        if each.study in ("references", "rounds"):
            for scheme, recipe, replicas, runs, _, source in measured(each, done):
                yield scheme, recipe, replicas, runs, "long rounds", source


def made_by() -> Row:
    """What made a row: torch, the processor and the commit."""
    return {"torch": torch.__version__, "processor": _processor(), "commit": _commit()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else 'unknown'}, one thread"


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    parser.add_argument("--seed", type=int, nargs="+", help="only runs of these seeds")
    parser.add_argument(
        "--only", default="", help="runs whose study, method, settings or R=number; hold all words"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--scratch",
        type=Path,
        default=cache_dir() / "long-rounds",
        help="states of unfinished runs",
    )
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)  # of `in_a_process`
    args = parser.parse_args(arguments)

    def wanted(cell: Cell) -> bool:
        text = f"{cell.study} {cell.method} {' '.join(cell.sets)} R={cell.replicas};"
        return (args.seed is None or cell.seed in args.seed) and all(
            word in text for word in args.only.split()
        )

    if args.cell:
        torch.set_num_threads(1)
        run_cell(
            Cell(**{**args.cell, "sets": tuple(args.cell["sets"])}), args.results, args.scratch
        )
    elif args.table:
        print(table(long_rounds_grid.methods, rows(args.results)))
    elif args.status:
        print(status(long_rounds_grid.methods, args.results))
    else:
        run_missing(long_rounds_grid.methods, args.results, args.scratch, args.limit, wanted)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run goes on from its last state
        sys.exit(130)
