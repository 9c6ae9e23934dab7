"""`detonation compare`: trains one recipe with several schemes or settings, one run after
another.
"""

import hashlib
import itertools
import os
import re
import signal
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from detonation.cluster.init import launch_position
from detonation.cluster.processes.failure import StopRequested, WorldError, describe
from detonation.train.choice.asked import AUTO
from detonation.train.loop.fit import NonFiniteLoss
from detonation.train.output import directory
from detonation.train.output.screen import Screen
from detonation.train.recipe.resolve import Request, require_scheme
from detonation.train.recipe.schema import Table
from detonation.train.recipe.tables import to_table
from detonation.train.run.joining import RunTask
from detonation.train.run.start import compute_with_one_thread, make_task, run_task
from detonation.whole_files import read_text

_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""Matches a comma between two values, but not a comma inside a list or a table."""
_LONGEST_NAME = 255
"""Largest number of bytes in the name of a directory."""
_READABLE = 100
"""Number of characters that a shortened name keeps."""


def compare_runs(request: Request, schemes: Sequence[str], varied: Sequence[str]) -> list[Table]:
    """Trains a recipe with each scheme and each combination of settings. Returns the summaries.

    Each run has its own directory in `request.out`, named after its scheme and settings. Finished
    runs are kept, and stopped runs continue. Instead of a summary, a failed run has a table with
    `directory`, `scheme`, `optimizer`, `error` and `diverged`.

    Args:
        request: The recipe and its overrides.
        schemes: Names of schemes; each run uses the recipe's settings for its scheme. Empty for the
            recipe's scheme.
        varied: Keys with several values, such as "optimizer.lr=1e-3,2e-3".

    Raises:
        ValueError: Bad input for any of the runs, before the first one starts.
        StopRequested: A signal ended a run, whose state is saved.
    """
    if launch_position(os.environ) is not None:
        raise ValueError(
            "`compare` starts its own processes: under a launcher, run `train` once for each scheme"
        )
    if len(set(schemes)) < len(schemes):
        raise ValueError(
            f"--schemes is {','.join(schemes)!r}, must be different schemes, such as"
            " full,demo,random"
        )
    if AUTO in schemes:
        raise ValueError(
            "compare takes schemes by name: use train for scheme auto, or ask detonation plan"
        )
    for name in schemes:
        require_scheme("scheme", name)
    runs = runs_of(schemes, varied)
    if len(runs) < 2:
        said = f"--schemes is {','.join(schemes)!r}"
        if varied:
            said = f"--vary is {' '.join(varied)}, only one run, because equal values count once"
        remedy = "by --schemes full,demo or by --vary optimizer.lr=1e-3,2e-3"
        raise ValueError(f"{said}: compare needs two runs or more, {remedy}")
    name = f"{request.recipe.stem}-compare-{time.strftime('%Y%m%d-%H%M%S')}"
    out = request.out or Path("runs") / name
    if (out / directory.CONFIG).exists():
        raise ValueError(f"run directory {out} holds a run: choose another --out")
    compute_with_one_thread()
    tasks = []
    for name, sets in runs.items():
        overrides = (*request.overrides, *sets)
        tasks.append(make_task(replace(request, overrides=overrides, out=out / name), None))
    finished = [_finished(task) for task in tasks]
    for number, summary in enumerate(finished):
        if summary is None:
            tasks[number] = _continued(tasks[number])
    screen = Screen(False, request.to_stderr)
    kept = sum(map(bool, finished))
    stopped = sum(task.resume for task in tasks)
    if kept or stopped:
        screen.line(
            f"in {out}: {kept} of {len(tasks)} runs are finished and kept, {stopped} were stopped"
            " and go on"
        )
    return _one_after_another(tasks, finished, screen)


def runs_of(schemes: Sequence[str], varied: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the overrides of each run, by the run's name. There is one run for each scheme and
    each combination of values.

    >>> runs_of(["demo"], ["optimizer.lr=1e-3,2e-3"])["demo,optimizer.lr=2e-3"]
    ('scheme.name=demo', 'optimizer.lr=2e-3')
    """
    choices = {}
    if schemes:
        choices["scheme.name"] = [(name, f"scheme.name={name}") for name in schemes]
    for each in varied:
        key, equals, text = each.partition("=")
        key = key.strip()
        values = [value.strip() for value in _COMMA.split(text)]
        if not equals or key in choices or not all(values):
            raise ValueError(f"--vary takes key=value,value, each key once, got {each!r}")
        sets = [f"{key}={value}" for value in values]
        choices[key] = [(urllib.parse.quote(text, safe="=.[],+ "), text) for text in sets]
    if not choices:
        return {}
    runs = {}
    for chosen in itertools.product(*choices.values()):
        names, sets_of_run = zip(*chosen, strict=True)
        runs[_file_name(",".join(names))] = sets_of_run
    return runs


def _file_name(name: str) -> str:
    """Returns `name`, or its beginning and its hash if no file system allows a name of this length.

    The same name gives the same result, so that a second `compare` finds the run.
    """
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[:_READABLE]}-{digest}"


def _one_after_another(
    tasks: Sequence[RunTask], finished: Sequence[Table | None], screen: Screen
) -> list[Table]:
    """Runs the unfinished tasks, and prints a line before each of them. Returns the summaries of
    all tasks.
    """
    summaries: list[Table] = []
    for number, (task, summary) in enumerate(zip(tasks, finished, strict=True), start=1):
        if summary is None:
            screen.line(f"run {number} of {len(tasks)}: {_directory(task).name}")
        summaries.append(summary or _run(task))
    return summaries


def _run(task: RunTask) -> Table:
    """Trains one run. Returns the summary of the run, or a table with the error of the run.

    Raises `StopRequested` if a signal ended the run, because the signal must stop all runs.
    """
    try:
        summary = run_task(task)
    except WorldError as error:
        return {
            "scheme": task.config.schemes,
            "optimizer": task.config.optimizer.name,
            "directory": str(_directory(task)),
            "diverged": error.failure.kind == NonFiniteLoss.__name__,
            "error": describe(error),
        }
    if "stopped_after" in summary:
        by = summary["stopped_by"]
        text = (
            f"stopped by {by} after step {summary['stopped_after']} of {summary['directory']}: the"
            f" same command with --out {_directory(task).parent} continues it and keeps finished"
            " runs"
        )
        raise StopRequested(signal.Signals[by], text)
    return summary


def _directory(task: RunTask) -> Path:
    assert task.request.out is not None
    return task.request.out


def _is_of(task: RunTask) -> bool:
    """True if the directory of `task` holds a run with the same configuration."""
    try:
        saved = read_text(_directory(task) / directory.CONFIG)
        return saved == tomli_w.dumps(to_table(task.config))
    except (OSError, ValueError):
        return False


def _finished(task: RunTask) -> Table | None:
    """Returns the summary of a finished run with the same configuration; None if there is no such
    run.
    """
    if not _is_of(task):
        return None
    path = _directory(task)
    try:
        return {**directory.read_json(path / directory.SUMMARY), "directory": str(path)}
    except (OSError, ValueError):
        return None


def _continued(task: RunTask) -> RunTask:
    """Returns `task`, set to resume if its directory holds a stopped run with the same
    configuration.

    Raises `ValueError` if the directory holds anything else.
    """
    if _is_of(task):
        request = replace(task.request, resume=True)
        task = replace(task, request=request, resume=True, may_start=True)
    directory.check_free(_directory(task), task.resume, task.may_start)
    return task
