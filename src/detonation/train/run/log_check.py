"""The log of a run compared with its metrics and checkpoints, for `verify` and `--resume`."""

from pathlib import Path

from detonation.log.continuity import LogFile, log_faults, log_files
from detonation.train.output import directory, metrics

_MOST_SHARDS = 1 << 12
"""A configuration of a stranger may name any number."""


def checked_log(run: Path, saved: int) -> tuple[list[LogFile], list[str]]:
    """The files of the log in the directory `run`, and in words what it lacks.

    saved: The step of the newest whole checkpoint; 0 for none.
    """
    config = directory.config_in(run)
    train, mesh = config.get("train"), config.get("mesh")
    logs = isinstance(train, dict) and train.get("log_updates") is True
    shards = mesh.get("shards") if isinstance(mesh, dict) else 0
    updates = run / directory.UPDATES
    files = log_files(updates)
    measured, faults = _measured(run / directory.METRICS) if logs else (0, [])
    expected = shards if logs and type(shards) is int and shards <= _MOST_SHARDS else 0
    return files, faults + log_faults(updates, files, expected, measured, saved)


def _measured(path: Path) -> tuple[int, list[str]]:
    """The last step in a metrics file, 0 where there is none, and why it cannot be read."""
    try:
        records = metrics.read_metrics(path)
    except FileNotFoundError:
        return 0, []
    except OSError as error:
        return 0, [f"{path} cannot be read: {error.strerror}"]
    return max((record.step for record in records), default=0), []
