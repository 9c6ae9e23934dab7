"""The screen of a run: plain lines, and gauges under them on a terminal: a progress bar, loss and waiting."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import ControlType, Segment, Segments
from rich.table import Column
from rich.text import Text

from detonation.report.terminal import PlainConsole, discard
from detonation.report.words import printable
from detonation.train.output.metrics import Record

_WIDEST = 90
_EVERY_S = 0.2
_ERASE = "\r\x1b[J"


class Screen(AbstractContextManager["Screen"]):
    """Prints lines to stdout, or to stderr with `to_stderr`; a `silent` one (any rank but 0) prints nothing.

    The cursor rests above the gauges, where they begin. So any other process that prints or clears leaves nothing of
    them, also after this one was killed. `rich.live` rests below, hides the cursor and needs its own end to clean up;
    hence rich draws here, and this class moves the cursor.
    """

    def __init__(self, silent: bool, to_stderr: bool) -> None:
        self._console = _console(to_stderr)
        self._silent = silent
        self._live = not silent and _can_live(self._console)
        self._gauges: Gauges | None = None
        self._drawn = float("-inf")

    def speak(self) -> None:
        """Prints from now on, in the place of a rank that was lost."""
        self._silent, self._live = False, _can_live(self._console)

    def start(self, done: int, total: int) -> None:
        """Shows gauges from now on: `done` of `total` steps."""
        if self._live:
            self._gauges = Gauges(done, total, lambda: time.monotonic())
            self._draw()

    def advance(self, record: Record) -> None:
        """Takes in one more step."""
        if self._gauges is not None:
            self._gauges.add(record)
            if time.monotonic() - self._drawn >= _EVERY_S:
                self._draw()

    def line(self, text: str) -> None:
        """Prints one line, above the gauges where there are some; names in it may come from elsewhere."""
        text = printable(text)
        if self._gauges is not None:
            self._draw(Text(text))
        elif not self._silent:
            self._print(text)

    def wipe(self) -> None:
        """Clears the gauges from any thread, for a process that ends at once."""
        if self._gauges is not None:
            os.write(self._console.file.fileno(), _ERASE.encode())

    def _draw(self, *lines: Text) -> None:
        """Replaces the gauges by `lines` and new gauges, in one write."""
        if self._gauges is not None:
            # One column less than there are: a terminal would begin another line.
            frame = Constrain(self._gauges, self._console.width - 1)
            self._print(_moves(_ERASE), *lines, frame, _moves("\r\x1b[1A"))
            self._drawn = time.monotonic()

    def _print(self, *parts: object) -> None:
        """Prints; once nobody reads the lines any more, as after `| head`, the run goes on without them."""
        try:
            self._console.print(*parts)
        except BrokenPipeError:
            discard(self._console.file)

    def __exit__(self, *raised: object) -> None:
        if self._gauges is not None:
            self._gauges = None
            _erase(self._console)


def clear(on_stderr: bool) -> None:
    """Clears the gauges of a screen whose process may have been killed."""
    console = _console(on_stderr)
    if _can_live(console):
        _erase(console)


def _erase(console: PlainConsole) -> None:
    """Clears everything from the cursor on."""
    console.file.write(_ERASE)
    console.file.flush()


def _moves(sequence: str) -> Segments:
    """A control sequence that rich passes on as it is."""
    return Segments([Segment(sequence, None, [(ControlType.CARRIAGE_RETURN,)])])


def _console(on_stderr: bool) -> PlainConsole:
    return PlainConsole(sys.stderr if on_stderr else sys.stdout)


def _can_live(console: PlainConsole) -> bool:
    # rich takes a pipe for a terminal where FORCE_COLOR is set, as many systems of continuous integration do.
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal


class Gauges:
    """A bar for rich, with the time left, the loss of the last step, and the share of all time spent waiting.

    Args:
        done: Steps of earlier starts, of `steps` in all.
        clock: Seconds of any clock.
    """

    def __init__(self, done: int, steps: int, clock: Callable[[], float]) -> None:
        cropped = Column(no_wrap=True, overflow="crop")
        columns = (
            BarColumn(None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.completed}/{task.total} steps,", style="cyan", table_column=cropped),
            TimeRemainingColumn(compact=True, table_column=cropped),
            TextColumn("left{task.fields[latest]}", style="cyan", table_column=cropped),
        )
        # Never started: the screen draws it. The window is as long as rich keeps samples, for steps of any length.
        self._bar = Progress(*columns, auto_refresh=False, expand=True, get_time=clock, speed_estimate_period=1e9)
        self._task = self._bar.add_task("", completed=done, total=steps, latest="")
        self._seconds = self._waited = 0.0

    def add(self, record: Record) -> None:
        """Takes in a step that ends now."""
        self._seconds += record.seconds
        self._waited += record.waited_s + (record.agreeing_s or 0.0)
        latest = f", loss {record.loss:.4f}, {self._waited / self._seconds:.0%} waiting"
        self._bar.update(self._task, completed=record.step, latest=latest)

    def __rich__(self) -> RenderableType:
        return Constrain(self._bar.get_renderable(), _WIDEST)
