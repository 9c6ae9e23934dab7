"""One run of benchmarks/size_law, and the rows of all runs."""

import fcntl
import json
import os
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.compare.queue import file_name, made_by
from benchmarks.compare.rows import Cell, Row, by_key
from benchmarks.compare.tuning import Rows
from benchmarks.long_rounds.run import train
from benchmarks.size_law.sizes import CONTEXT, WINDOW
from benchmarks.size_law.text import SHA256


def run_cell(cell: Cell, results: Path, scratch: Path) -> None:
    """Trains one run from its last state in `scratch` on, and appends its row."""
    made = made_by()  # before the run: the commit that it began with
    folder = scratch / file_name(cell)
    append(results, {**judged(train(cell, folder, judged=ended)), **made})
    shutil.rmtree(folder)


def ended(session: Any) -> Row:
    """What is known at the end of a run besides its losses. Collective."""
    count = sum(parameter.numel() for parameter in session.model.parameters())
    _, equal = session.world.fingerprint(session.model)
    return {"num_parameters": count, "replicas_equal": equal}


def judged(row: Row) -> Row:
    """A row with its final loss: the mean over the last evaluations, None if the run diverged."""
    last = [loss for _, loss in row["curve"]][-WINDOW:]
    diverged = "val_loss" in row
    final = None if diverged else round(statistics.fmean(last), 5)
    tokens = row["steps"] * row["total"] * CONTEXT
    return {**row, "val_loss": final, "tokens": tokens, "text": SHA256[:12]}


def append(results: Path, row: Row) -> None:
    """Appends a whole line to the file of the row's method; removes what a killed run has torn."""
    results.mkdir(parents=True, exist_ok=True)
    words = re.sub(r"[^a-z0-9]+", "-", row["method"].lower()).strip("-")
    with (results / f"{words}.jsonl").open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole = file.read().rpartition(b"\n")[0]
        file.truncate(len(whole) + 1 if whole else 0)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def rows(results: Path) -> Rows:
    """The rows that are there, by the key of their run; a line without its end is not there."""
    lines = [
        line
        for path in sorted(results.glob("*.jsonl"))
        for line in path.read_text().rpartition("\n")[0].splitlines()
    ]
    found = [json.loads(line) for line in lines]
    return by_key(found)
