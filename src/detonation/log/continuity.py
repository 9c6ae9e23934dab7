"""Finds steps that a run has measured but that its update log lacks. Ignores the last steps (at
most `LATE_STEPS`), which a killed process may lose.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from detonation.log.records import MESSAGE, START, DamagedLog, LogRecord, whole_records
from detonation.log.writer import segments

_SHARD = "replica0-shard"
LATE_STEPS = 2
"""Largest number of measured steps that a killed process may not have written to its log.

One step may be missing because a thread writes a large step while the next step computes. Another
step may be missing because the messages of an accelerator reach the host one step later.
"""


@dataclass(frozen=True)
class LogFile:
    """One file of an update log.

    rank: the rank that wrote the file. begun: number of steps before the first step of the file.
    last: the last complete step in the file; equals `begun` if there is no complete step. torn:
    number of bytes after the last complete record, which belong to an unfinished step. fault: a
    description of the damage; "" if the file is whole. shards: number of shards of the world that
    wrote the file; 0 if unknown.
    """

    path: Path
    rank: str
    begun: int
    last: int
    torn: int = 0
    fault: str = ""
    shards: int = 0

    def line(self) -> str:
        """Describes the content of the file in one line of text."""
        if self.fault:
            return self.fault
        steps = "no whole step"
        if self.last > self.begun:
            steps = f"steps {self.begun + 1} to {self.last}, whole"
        torn = ""
        if self.torn:
            torn = f", and {self.torn:,} bytes of a step that was not finished"
        return f"{self.path}: {steps}{torn}"


def log_files(directory: Path) -> list[LogFile]:
    """Returns each file of the update log in `directory`, in order."""
    return [_read(rank, begun, path) for rank, begun, path in segments(directory, "")]


def _read(rank: str, begun: int, path: Path) -> LogFile:
    last = begun
    count = 0
    shards = 0
    try:
        size = path.stat().st_size
        for record in whole_records(path):
            if record.kind == START:
                shards = _shards_in(record)
            if record.kind != MESSAGE:
                last = max(last, record.step)
            count += record.size
    except DamagedLog as error:
        return LogFile(path, rank, begun, last, fault=str(error))
    except OSError as error:
        return LogFile(path, rank, begun, last, fault=f"{path} cannot be read: {error.strerror}")
    torn = max(size - count, 0)  # training may write to the file meanwhile
    return LogFile(path, rank, begun, last, torn, shards=shards)


def _shards_in(start: LogRecord) -> int:
    """Returns the number of shards in a START record; 0 if the record has no such number."""
    with suppress(ValueError, RecursionError):
        shards = start.table().get("shards")
        if type(shards) is int:
            return shards
    return 0


def log_faults(
    directory: Path, files: Sequence[LogFile], shards: int, measured: int, saved: int
) -> list[str]:
    """Returns the faults of the update log in `directory`, as text. An unfinished last step is not
    a fault.

    Args:
        files: Result of `log_files`.
        shards: Number of ranks that must have a log; 0 if unknown.
        measured: Last step that the run has measured; 0 if unknown.
        saved: Step of the run's newest complete checkpoint; 0 if there is none.
    """
    found = []
    expected = [f"{_SHARD}{shard}" for shard in range(shards)]
    for rank in sorted({file.rank for file in files}.union(expected)):
        own = _log_of(rank, files, measured)
        found += _lacks(f"the log of {rank} in {directory}", own, measured, saved)
    return found


def _log_of(rank: str, files: Sequence[LogFile], measured: int) -> list[LogFile]:
    """Returns the files of `rank`, in order. While the world has too few shards for this rank, the
    rank does not exist. For this time the result contains the files of shard 0, without gaps.

    Omits files that are older than the oldest file of shard 0. A run removes old files, but keeps
    the last file of a rank that no longer exists.
    """
    first = [file for file in files if file.rank == f"{_SHARD}0"]
    begun = min((file.begun for file in first), default=0)
    number = rank.removeprefix(_SHARD)
    ends = [*(file.begun for file in first[1:]), measured]
    without = [
        replace(file, last=max(file.last, end))
        for file, end in zip(first, ends, strict=False)
        if number.isdecimal() and 0 < file.shards <= int(number)
    ]
    own = [file for file in files if file.rank == rank and file.begun >= begun]
    return sorted(own + without, key=lambda file: file.begun)


def _lacks(name: str, files: Sequence[LogFile], measured: int, saved: int) -> list[str]:
    if not files:
        if measured > LATE_STEPS:
            return [f"{name} is missing: {measured} steps were measured"]
        return []
    found = [
        f"{name} lacks the steps {one.last + 1} to {other.begun}: {one.path.name} was shortened, "
        "or a file is missing"
        for one, other in pairwise(files)
        if one.last < other.begun and not one.fault
    ]
    first = files[0]
    last = files[-1]
    if first.begun > saved:
        found.append(
            f"{name} begins after step {first.begun}, and no checkpoint leads to that step: the "
            f"newest checkpoint is of step {saved}"
        )
    if last.fault:
        return found
    if last.last == last.begun and not measured:
        found.append(f"{name} ends with {last.path.name}, which holds no whole step")
    if measured > last.last + LATE_STEPS:
        found.append(
            f"{name} ends after step {last.last}, and {measured} steps were measured: "
            f"{last.path.name} was emptied or shortened, or a file after it is missing"
        )
    return found
