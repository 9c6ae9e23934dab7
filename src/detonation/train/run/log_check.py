"""Compares the update log of a run with its metrics and checkpoints, for `verify` and
`--resume`.
"""

from pathlib import Path

from detonation.log.continuity import LogFile, log_faults, log_files
from detonation.train.output import directory, metrics

_MOST_SHARDS = 1 << 12
"""Largest number of shards that is accepted from a configuration. A configuration from another user
may contain any number.
"""


def checked_log(run: Path, saved: int) -> tuple[list[LogFile], list[str]]:
    """Returns the files of the update log in the run directory `run`, and the faults of this log as
    text.

    Args:
        saved: Step of the newest complete checkpoint; 0 without one.
    """
    config = directory.config_in(run)
    train = config.get("train")
    mesh = config.get("mesh")
    logs = isinstance(train, dict) and train.get("log_updates") is True
    updates = run / directory.UPDATES
    measured = 0
    faults: list[str] = []
    expected = 0
    if logs:
        measured, faults = _measured(run / directory.METRICS)
        shards = mesh.get("shards") if isinstance(mesh, dict) else None
        if type(shards) is int and shards <= _MOST_SHARDS:
            expected = shards
    files = log_files(updates)  # list the log after reading metrics, because the run may go on
    return files, faults + log_faults(updates, files, expected, measured, saved)


def _measured(path: Path) -> tuple[int, list[str]]:
    """Returns the last step in a metrics file (0 if there is none). If the file cannot be read,
    also returns the reason.
    """
    try:
        records = metrics.read_metrics(path)
    except FileNotFoundError:
        return 0, []
    except OSError as error:
        return 0, [f"{path} cannot be read: {error.strerror}"]
    return max((record.step for record in records), default=0), []
