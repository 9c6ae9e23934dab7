"""`detonation compare`: one recipe under several schemes or settings, one run after another."""

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
from detonation.train.loop.fit import NonFiniteLoss
from detonation.train.output import directory
from detonation.train.output.screen import Screen
from detonation.train.recipe.resolve import Request, require_scheme
from detonation.train.recipe.schema import Table
from detonation.train.recipe.tables import to_table
from detonation.train.run.decide import AUTO
from detonation.train.run.start import compute_with_one_thread, make_task, run_task
from detonation.train.run.worker import RunTask
from detonation.whole_files import read_text

_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""A comma between values, not one inside a list or a table."""


def compare_runs(
    request: Request, schemes: Sequence[str], varied: Sequence[str] = ()
) -> list[Table]:
    """Trains under each of `schemes` (or the recipe's own), at the settings that the recipe has for
    it, with each choice of `varied`, such as "optimizer.lr=1e-3,2e-3".

    Each run has a directory of its own in `request.out`, named after its scheme and settings. Runs
    that are finished there are not run again, and runs that were stopped go on. Returns the
    summaries; of a run that failed its `directory`, `scheme` and `optimizer`, the `error`, and
    whether it has `diverged`.

    Raises:
        ValueError: Bad input for any of the runs, before the first one starts.
        StopRequested: A signal ended a run, whose state is saved.
    """
    if launch_position(os.environ) is not None:
        raise ValueError(
            "compare starts its own processes: under a launcher use train, once for each scheme"
        )
    if len(set(schemes)) < len(schemes):
        raise ValueError(
            f"--schemes is {','.join(schemes)!r}, must be different schemes: full,demo,random"
        )
    if AUTO in schemes:
        raise ValueError(
            "compare takes schemes by name: use train for scheme auto, or ask detonation plan"
        )
    for name in schemes:
        require_scheme("scheme", name)
    out = (
        request.out
        or Path("runs") / f"{request.recipe.stem}-compare-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    runs = runs_of(schemes, varied)
    if len(runs) < 2:
        said = (
            f"--vary is {' '.join(varied)}, one choice, as equal values count once"
            if varied
            else ""
        )
        said = said or f"--schemes is {','.join(schemes)!r}"
        remedy = "by --schemes full,demo or by --vary optimizer.lr=1e-3,2e-3"
        raise ValueError(f"{said}: compare needs two runs or more, {remedy}")
    compute_with_one_thread()
    tasks = [
        make_task(replace(request, overrides=(*request.overrides, *sets), out=out / name), None)
        for name, sets in runs.items()
    ]
    finished = [_finished(task) for task in tasks]
    left = [
        task if summary else _continued(task) for task, summary in zip(tasks, finished, strict=True)
    ]
    screen = Screen(False, request.to_stderr)
    if any(finished) or any(task.resume for task in left):
        kept, stopped = sum(map(bool, finished)), sum(task.resume for task in left)
        screen.line(
            f"in {out}: {kept} of {len(tasks)} runs are finished and kept, {stopped} were stopped"
            " and go on"
        )
    return _one_after_another(left, finished, screen)


def runs_of(schemes: Sequence[str], varied: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """The settings of each run by its name: every scheme with every choice of values.

    >>> runs_of(["demo"], ["optimizer.lr=1e-3,2e-3"])["demo,optimizer.lr=2e-3"]
    ('scheme.name=demo', 'optimizer.lr=2e-3')
    """
    choices = (
        {"scheme.name": [(name, f"scheme.name={name}") for name in schemes]} if schemes else {}
    )
    for each in varied:
        key, equals, values = each.partition("=")
        if (
            not equals
            or key.strip() in choices
            or not all(value.strip() for value in _COMMA.split(values))
        ):
            raise ValueError(f"--vary takes key=value,value, each key once, got {each!r}")
        sets = [f"{key.strip()}={value.strip()}" for value in _COMMA.split(values)]
        choices[key.strip()] = [(urllib.parse.quote(text, safe="=.[],+ "), text) for text in sets]
    runs = (
        [tuple(zip(*chosen, strict=True)) for chosen in itertools.product(*choices.values())]
        if choices
        else []
    )
    return {",".join(names): sets for names, sets in runs}


def _one_after_another(
    tasks: Sequence[RunTask], finished: Sequence[Table | None], screen: Screen
) -> list[Table]:
    """The summaries of all runs; a line before each that is left says which one it is."""
    summaries: list[Table] = []
    for number, (task, summary) in enumerate(zip(tasks, finished, strict=True), start=1):
        if summary is None:
            screen.line(f"run {number} of {len(tasks)}: {_directory(task).name}")
        summaries.append(summary or _run(task))
    return summaries


def _run(task: RunTask) -> Table:
    """The summary of a run, or its error.

    Raises `StopRequested` where a signal has ended it: no other is to start then.
    """
    try:
        summary = run_task(task)
    except WorldError as error:
        config, diverged = task.config, error.failure.kind == NonFiniteLoss.__name__
        about = {
            "scheme": config.schemes,
            "optimizer": config.optimizer.name,
            "directory": str(_directory(task)),
        }
        return {**about, "diverged": diverged, "error": describe(error)}
    if "stopped_after" in summary:
        by, step, where = summary["stopped_by"], summary["stopped_after"], summary["directory"]
        remedy = (
            f"the same command with --out {_directory(task).parent} continues it and keeps finished"
            " runs"
        )
        text = f"stopped by {by} after step {step} of {where}: {remedy}"
        raise StopRequested(signal.Signals[by], text)
    return summary


def _directory(task: RunTask) -> Path:
    assert task.request.out is not None
    return task.request.out


def _is_of(task: RunTask) -> bool:
    """True where the run's directory holds a run with the same configuration."""
    try:
        return read_text(_directory(task) / directory.CONFIG) == tomli_w.dumps(
            to_table(task.config)
        )
    except (OSError, ValueError):
        return False


def _finished(task: RunTask) -> Table | None:
    """The summary of the run, where it is finished in its directory with the same configuration."""
    path = _directory(task)
    try:
        return (
            {**directory.read_json(path / directory.SUMMARY), "directory": str(path)}
            if _is_of(task)
            else None
        )
    except (OSError, ValueError):
        return None


def _continued(task: RunTask) -> RunTask:
    """`task`, going on where a run with the same configuration was stopped; without checkpoints
    from the beginning.

    Raises `ValueError` where its directory holds anything else.
    """
    if _is_of(task):
        task = replace(
            task, request=replace(task.request, resume=True), resume=True, may_start=True
        )
    directory.check_free(_directory(task), task.resume, task.may_start)
    return task
