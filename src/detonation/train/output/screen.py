"""The screen of a run: plain lines, and gauges under them on a terminal: a progress bar, loss, speed and waiting."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import ControlType, Segment, Segments
from rich.table import Column
from rich.text import Text

from detonation.report.terminal import PlainConsole, discard
from detonation.report.words import printable, size_text
from detonation.train.output.metrics import Portion, Record

BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-=+*%#"
_WINDOW = 20
_WIDEST, _WIDEST_BAR = 40, 90
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

    def start(self, done: int, total: int, portion: Portion) -> None:
        """Shows gauges from now on: `done` of `total` steps, in which each replica takes in a `portion`."""
        if self._live:
            self._gauges = Gauges(done, total, portion, lambda: time.monotonic())
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
    """Two lines for rich: a bar with the time left; loss and speed of the last steps, traffic and waiting of all.

    Rounds may be longer than any number of last steps, so traffic is the mean since the start.

    Args:
        done: Steps of earlier starts, of `steps` in all.
        portion: The data of one replica in one step.
        clock: Seconds of any clock.
    """

    def __init__(self, done: int, steps: int, portion: Portion, clock: Callable[[], float]) -> None:
        cropped = Column(no_wrap=True, overflow="crop")
        columns = (
            BarColumn(None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.completed}/{task.total} steps,", style="cyan", table_column=cropped),
            TimeRemainingColumn(compact=True, table_column=cropped),
            TextColumn("left", style="cyan", table_column=cropped),
        )
        # Never started: the screen draws it. The window is as long as rich keeps samples, for steps of any length.
        self._bar = Progress(*columns, auto_refresh=False, expand=True, get_time=clock, speed_estimate_period=1e9)
        self._task = self._bar.add_task("", completed=done, total=steps)
        self._portion, self._losses, self._last = portion, list[float](), deque[Record](maxlen=_WINDOW)
        self._seconds = self._sent = self._waited = 0.0

    def add(self, record: Record) -> None:
        """Takes in a step that ends now."""
        self._bar.update(self._task, completed=record.step)
        self._losses.append(record.loss)
        self._last.append(record)
        self._seconds += record.seconds
        self._sent += record.bytes_sent
        self._waited += record.waited_s + (record.agreeing_s or 0.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Constrain(self._bar.get_renderable(), min(options.max_width, _WIDEST_BAR))
        text = self._line(options.max_width, _PLAIN if options.ascii_only else BLOCKS)
        yield Text(text, "dim", no_wrap=True, overflow="crop", end="")

    def _line(self, width: int, blocks: str) -> str:
        """Loss, its curve, and as many rates as fit."""
        if not self._last:
            return "the first step sets up"
        sent, waiting = self._sent / self._seconds, self._waited / self._seconds
        loss = f"loss {self._last[-1].loss:.4f} "
        rates = [
            f"  {self._portion.per_second(self._last)}",
            f"  {size_text(sent)}/s between nodes" if sent else "  nothing sent",
            f"  {waiting:.0%} waiting",
        ]
        memory, mfu = self._latest("memory"), self._latest("mfu")
        rates += [] if mfu is None else [f"  MFU {mfu:.0%}"]
        rates += [] if memory is None else [f"  {size_text(memory)}"]
        while rates and len(loss) + 8 + sum(map(len, rates)) > width:
            rates.pop()
        room = min(_WIDEST, width - len(loss) - sum(map(len, rates)))
        return loss + sparkline(self._losses, max(1, room), blocks) + "".join(rates)

    def _latest(self, name: str) -> float | None:
        """The last measurement that there is of a record's field."""
        return next((found for record in reversed(self._last) if (found := getattr(record, name)) is not None), None)


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """`values` as at most `width` blocks, from the least, which is the lowest, to the largest.

    >>> sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8), sparkline([1, 1, 3, 3], 2), sparkline([2.0], 9)
    ('█▇▆▅▄▃▂▁', '▁█', '▁')
    """
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    per = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * per)] for value in means)
