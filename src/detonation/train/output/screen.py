"""The terminal output of a run: plain lines, and on a terminal also a progress bar with steps, time
left, loss and the share of waiting.
"""

import os
import sys
import time
from contextlib import AbstractContextManager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from detonation.interrupts import call_before_end, nothing
from detonation.report.terminal import PlainConsole, discard
from detonation.report.words import printable
from detonation.train.output.metrics import Record

_EVERY_S = 0.2
_ERASE = b"\r\x1b[J"


class Screen(AbstractContextManager["Screen"]):
    """Prints lines to stdout, or to stderr if `to_stderr` is True. A `silent` screen prints
    nothing; all ranks except rank 0 have a silent screen.
    """

    def __init__(self, silent: bool, to_stderr: bool) -> None:
        self._console = _console(to_stderr)
        self._silent = silent
        self._bar: Progress | None = None
        self._drawn = float("-inf")
        self._seconds = self._waited = 0.0

    def speak(self) -> None:
        """Lets this rank print, because the rank that printed so far was lost."""
        self._silent = False

    def start(self, done: int, total: int) -> None:
        """Shows a progress bar of `total` steps. Earlier starts of the run have finished the first
        `done` steps.
        """
        if self._silent or not _can_live(self._console):
            return
        cropped = Column(no_wrap=True, overflow="crop")
        columns = (
            BarColumn(None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.completed}/{task.total} steps,", style="cyan", table_column=cropped),
            TimeRemainingColumn(compact=True, table_column=cropped),
            TextColumn("left{task.fields[latest]}", style="cyan", table_column=cropped),
        )
        # no automatic refresh: a forked process would lack the thread that refreshes the bar
        self._bar = Progress(
            *columns,
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            expand=True,
            speed_estimate_period=1e9,
            get_time=lambda: time.monotonic(),
        )
        self._bar.add_task("", completed=done, total=total, latest="")
        self._bar.start()
        call_before_end(self.wipe)
        self._drawn = time.monotonic()

    def advance(self, record: Record) -> None:
        if self._bar is None:
            return
        self._seconds += record.seconds
        self._waited += record.waited_s + (record.agreeing_s or 0.0)
        latest = f", loss {record.loss:.4f}, {self._waited / self._seconds:.0%} waiting"
        self._bar.update(self._bar.task_ids[0], completed=record.step, latest=latest)
        if time.monotonic() - self._drawn >= _EVERY_S:
            self._bar.refresh()
            self._drawn = time.monotonic()

    def line(self, text: str) -> None:
        """Prints one line, above the progress bar if there is one. Escapes unprintable characters.

        If the output is closed (for example by `| head`) or its disk is full, the run continues
        without lines.
        """
        if self._silent:
            return
        try:
            self._console.print(printable(text))
        except OSError:
            discard(self._console.file)

    def wipe(self) -> None:
        """Clears the progress bar before the process ends. Any thread may call this method."""
        if self._bar is not None:
            os.write(self._console.file.fileno(), _ERASE)

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            call_before_end(nothing)


def clear(on_stderr: bool) -> None:
    """Clears the progress bar that a killed process may have left on the terminal."""
    console = _console(on_stderr)
    if _can_live(console):
        console.file.write(_ERASE.decode())
        console.file.flush()


def _console(to_stderr: bool) -> PlainConsole:
    if to_stderr:
        return PlainConsole(sys.stderr)
    return PlainConsole(sys.stdout)


def _can_live(console: PlainConsole) -> bool:
    # FORCE_COLOR makes rich treat a pipe as a terminal, so also ask `file`
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
