"""The screen of a run: plain lines, and under them on a terminal a bar of rich: steps, time left,
loss and waiting."""

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
    """Prints lines to stdout, or to stderr with `to_stderr`; a `silent` one (any rank but 0) prints
    nothing."""

    def __init__(self, silent: bool, to_stderr: bool) -> None:
        self._console, self._silent = PlainConsole(sys.stderr if to_stderr else sys.stdout), silent
        self._bar: Progress | None = None
        self._drawn = float("-inf")
        self._seconds = self._waited = 0.0

    def speak(self) -> None:
        """Prints from now on, in the place of a rank that was lost."""
        self._silent = False

    def start(self, done: int, total: int) -> None:
        """Shows a bar from now on: `done` of `total` steps, those of earlier starts."""
        if self._silent or not _can_live(self._console):
            return
        cropped = Column(no_wrap=True, overflow="crop")
        columns = (
            BarColumn(None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.completed}/{task.total} steps,", style="cyan", table_column=cropped),
            TimeRemainingColumn(compact=True, table_column=cropped),
            TextColumn("left{task.fields[latest]}", style="cyan", table_column=cropped),
        )
        # No thread of rich: it would not be there in a fork. The speed is that of all steps,
        # however long they take.
        quiet = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._bar = Progress(
            *columns, console=self._console, transient=True, expand=True, speed_estimate_period=1e9,
            get_time=lambda: time.monotonic(), **quiet,
        )  # fmt: skip
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
        """Prints one line, above the bar where there is one; names in it may come from elsewhere.

        Once nobody reads the lines any more, as after `| head`, or their disk is full, the run goes
        on without them.
        """
        if self._silent:
            return
        try:
            self._console.print(printable(text))
        except OSError:
            discard(self._console.file)

    def wipe(self) -> None:
        """Clears the bar from any thread, for a process that ends at once."""
        if self._bar is not None:
            os.write(self._console.file.fileno(), _ERASE)

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            call_before_end(nothing)


def clear(on_stderr: bool) -> None:
    """Clears the bar of a screen whose process may have been killed."""
    console = PlainConsole(sys.stderr if on_stderr else sys.stdout)
    if _can_live(console):
        console.file.write(_ERASE.decode())
        console.file.flush()


def _can_live(console: PlainConsole) -> bool:
    # rich takes a pipe for a terminal where FORCE_COLOR is set, as many systems of continuous
    # integration do.
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
