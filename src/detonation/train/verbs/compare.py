"""What `detonation compare` does: one recipe under several schemes, one run after another on the same data and seed."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from detonation.choices import unknown
from detonation.cluster.init import launched
from detonation.cluster.processes.failure import RunError
from detonation.core.schemes.registry import SCHEMES
from detonation.train.auto.asked import NAME
from detonation.train.loop.session import check
from detonation.train.output import directory
from detonation.train.recipe import toml
from detonation.train.recipe.schema import Config, Table, to_table
from detonation.train.run.run import Request, check_lab, configure, run


def compare(request: Request, schemes: Sequence[str], explain: Callable[[Exception], int]) -> list[Table]:
    """Trains as `request` says under each of `schemes`, at the settings that the recipe has for it; their summaries.

    Each run has a directory of its own in `request.out`; those that are finished there are not run again. Raises
    `ValueError` for bad input of any before the first one starts.
    """
    if launched(os.environ) is not None:
        raise ValueError("compare starts its own processes: under a launcher use train, once for each scheme")
    if len(schemes) < 2 or len(set(schemes)) < len(schemes):
        raise ValueError(f"--schemes is {','.join(schemes)!r}, must be two different schemes or more: full,demo,random")
    out = request.out or Path("runs") / f"{request.recipe.stem}-compare-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = []
    if NAME in schemes:
        raise ValueError("compare takes schemes by name: use train for scheme auto, or ask detonation plan")
    for name in schemes:
        if name not in SCHEMES:
            raise unknown("scheme", name, SCHEMES)
        one = replace(request, overrides=(*request.overrides, f"scheme.name={name}"), out=out / name)
        config = configure(one, None)
        check_lab(config.mesh, None)
        runs.append((one, check(config)))
    return [_finished(out / config.scheme.name, config) or _run(one, explain) for one, config in runs]


def _run(request: Request, explain: Callable[[Exception], int]) -> Table:
    """The summary of a run. Raises `RunError` where a signal has ended it: the others would not be started in vain."""
    summary = run(request, explain)
    if "stopped_after" in summary:
        by, step, where = summary["stopped_by"], summary["stopped_after"], summary["directory"]
        remedy = f"remove {where} and compare again with the same --out, which keeps what is finished"
        raise RunError(f"stopped by {by} after step {step} of {where}: {remedy}")
    return summary


def _finished(path: Path, config: Config) -> Table | None:
    """The summary of the run at `path`, where it is finished and was of the same configuration."""
    try:
        same = (path / directory.CONFIG).read_text(encoding="utf-8") == toml.dumps(to_table(config))
        return {**directory.read_json(path / directory.SUMMARY), "directory": str(path)} if same else None
    except (OSError, ValueError):
        return None
