"""The last steps of an update log, in the memory of a replica that does not write it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from detonation.log.records import STEP, LogRecord

KEPT_STEPS = 4
"""Number of recent steps that each further replica keeps in memory. If the first replica is lost,
the next replica writes these steps to the log.
"""


class KeptSteps:
    """The last steps of a log that another replica writes, each with the writes to weights and the
    `synchronize` calls after it.

    A file that begins with kept steps replaces the same steps in the files of the lost replica. So
    it must begin with a whole step: what came between this step and the one before is in an earlier
    file already. Only after a gap, as after a load, the new file may replace the file after the gap
    as a whole.
    """

    def __init__(self) -> None:
        self._steps: deque[list[list[LogRecord]]] = deque()
        self._settings: dict[str, Any] = {}
        self._origin: dict[str, Any] = {}
        # True if the kept steps are all since the lost replica began its file
        self._all = True

    def __bool__(self) -> bool:
        return bool(self._steps)

    def begin(self, settings: dict[str, Any], origin: dict[str, Any]) -> None:
        """Drops all steps, because the lost replica would begin a new file now.

        Args:
            settings: Of the run, for the first record of a file.
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
        self, is_used: Callable[[int], bool]
    ) -> tuple[int, dict[str, Any], list[list[LogRecord]]]:
        """Drops all steps, and returns them for a new file: the number of steps before this file,
        the settings for its first record, and the records of each event.

        Args:
            is_used: True if a file begins after this number of steps. The new file must not replace
                it, because it may begin with a write or a `synchronize` call.
        """
        steps = list(self._steps)
        settings = self._settings
        if self._all and self._origin:
            settings = settings | self._origin
        else:
            while len(steps) > 1 and is_used(_steps_before(steps[0])):
                del steps[0]
        self._steps.clear()
        self._all = False
        return _steps_before(steps[0]), settings, [event for step in steps for event in step]


def _steps_before(events: Sequence[Sequence[LogRecord]]) -> int:
    """Returns how many steps training had taken before the first of the `events`."""
    end = events[0][-1]
    return end.step - (end.kind == STEP)
