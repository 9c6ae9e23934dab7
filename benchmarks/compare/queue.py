"""Runs of an experiment of days, one by one: what has a row does not run again, and callers share the work."""

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.compare.rows import Cell, Row, by_key
from benchmarks.compare.tuning import Method, Rows, missing


def parser(description: str | None, results: Path, scratch: Path) -> argparse.ArgumentParser:
    """The arguments that each such experiment has. `--cell` is that of `in_a_process`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    made.add_argument(
        "--only", default="", help="runs whose study, method, settings or R=number; hold all words"
    )
    made.add_argument("--results", type=Path, default=results)
    made.add_argument(
        "--scratch", type=Path, default=scratch, help="states of unfinished runs, and locks"
    )
    made.add_argument("--status", action="store_true")
    made.add_argument("--table", action="store_true")
    made.add_argument("--cell", type=_cell, help=argparse.SUPPRESS)
    return made


def _cell(text: str) -> Cell:
    given: dict[str, Any] = json.loads(text)
    return Cell(**{**given, "sets": tuple(given["sets"])})


def named(cell: Cell, only: str) -> bool:
    """Whether a run holds all words of `only`."""
    text = f"{cell.study} {cell.method} {' '.join(cell.sets)} R={cell.replicas};"
    return all(word in text for word in only.split())


def file_name(cell: Cell) -> str:
    """The name of a run's files: its method in words, and a hash of all of its settings."""
    words = re.sub(r"[^a-z0-9]+", "-", cell.method.lower()).strip("-")
    digest = hashlib.sha256(json.dumps(cell.key).encode()).hexdigest()[:8]
    return f"{words}-r{cell.replicas}-seed{cell.seed}-{digest}"


def rows(results: Path) -> Rows:
    """The rows that are there, by the key of their run."""
    return by_key(json.loads(path.read_text()) for path in sorted(results.glob("*.json")))


def in_a_process(module: str, cell: Cell, results: Path, scratch: Path) -> None:
    """Runs a cell by `python -m MODULE` in a process of its own with one thread.

    Raises `CalledProcessError` where that fails.
    """
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
    run: Callable[[Cell, Path, Path], None],
    limit: int = 10**9,
    wanted: Callable[[Cell], bool] = lambda cell: True,
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
