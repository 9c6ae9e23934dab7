"""The last steps of an update log, in the RAM of a replica that does not write this log."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detonation.log.records import START, STEP, LogRecord, opening

KEPT_STEPS = 4
"""Number of recent steps that each replica except the first keeps in memory. If the first replica
is lost, the next replica writes these steps to the log.
"""

_OTHER_LEVELS = ("replicas", "scheme", "arguments", "parameters", "clip")
"""Settings that differ if the optimizer has built other levels."""


class KeptSteps:
    """The last steps of an update log that another replica writes. Each step includes the writes to
    weights and the `synchronize` calls after it.

    If the writing replica is lost, the kept steps begin a new file. They replace the same steps in
    the files of the lost replica. If the lost replica began a file at the same step, the new file
    first repeats the writes and `synchronize` calls at the beginning of that file, unless they are
    kept. After a gap, such as a load, the new file repeats nothing.
    """

    def __init__(self) -> None:
        self._steps: deque[list[list[LogRecord]]] = deque()
        self._settings: dict[str, Any] = {}
        self._origin: dict[str, Any] = {}
        # True if the kept steps are all steps since the writing replica began its file
        self._all = True

    def __bool__(self) -> bool:
        return bool(self._steps)

    def begin(self, settings: dict[str, Any], origin: dict[str, Any]) -> None:
        """Drops all steps, because the replica that writes the log begins a new file now.

        Args:
            settings: Settings of the run, for the first record of a file.
            origin: Describes the state from which training continues, if there is a gap.
        """
        self._steps.clear()
        self._settings = settings
        self._origin = origin
        self._all = True

    def add(self, records: Sequence[LogRecord]) -> None:
        """Keeps the records of a step, a write or a `synchronize` call."""
        if records[-1].kind == STEP or not self._steps:
            self._steps.append([])
        self._steps[-1].append([*records])
        if len(self._steps) > KEPT_STEPS:
            self._steps.popleft()
            self._all = False

    def take(
        self, path_of: Callable[[int], Path]
    ) -> tuple[int, dict[str, Any], list[LogRecord], list[list[LogRecord]]]:
        """Drops all steps, and returns the content of a new file: the number of steps before the
        file, the settings, the records of the lost replica with which the file begins, and the
        records of each kept event (a step, a write or a `synchronize` call).

        Args:
            path_of: Returns the path of the file that begins after a given number of steps.
        """
        events = [event for step in self._steps for event in step]
        first = _steps_before(events)
        settings = self._settings
        earlier: list[LogRecord] = []
        if self._all and self._origin:
            settings = settings | self._origin
        else:
            earlier = opening(path_of(first), settings)
        if self._all:
            earlier = _before(settings, earlier)
        self._steps.clear()
        self._all = False
        return first, settings, earlier, events


def _before(settings: dict[str, Any], records: list[LogRecord]) -> list[LogRecord]:
    """Returns the `records` before the last START record with these `settings`, or all records if
    there is no such START record. Later records are kept, so the new file does not repeat them.
    """
    for number, record in reversed([*enumerate(records)]):
        if record.kind == START:
            table = record.table()
            if all(table.get(key) == settings.get(key) for key in _OTHER_LEVELS):
                return records[:number]
    return records


def _steps_before(events: Sequence[Sequence[LogRecord]]) -> int:
    """Returns the number of steps that training took before the first of the `events`."""
    end = events[0][-1]
    return end.step - (end.kind == STEP)
