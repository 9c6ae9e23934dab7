"""What rank 0 shows while it trains: plain lines, and gauges under them on a terminal."""

import os
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console

from detonation.train.output.gauges import Gauges, Portion
from detonation.train.output.metrics import Record

_EVERY_S = 0.2
_ERASE, _UP = "\r\x1b[J", "\r\x1b[1A"
_BAR, _GAUGES, _END = "\x1b[36m", "\x1b[2m", "\x1b[0m"


class Screen:
    """Prints lines to stdout, or to stderr with `to_stderr`; a `silent` one (any rank but 0) prints nothing.

    The gauges stand below the cursor, which waits where they begin. So whoever prints next, or clears what is below,
    leaves nothing of them, also when this process was ended in the middle.
    """

    def __init__(self, silent: bool, to_stderr: bool) -> None:
        # Lines must reach a pipe whole, whatever its width.
        self._console = _console(to_stderr)
        self._silent = silent
        self._live = not silent and _can_live(self._console)
        self._gauges: Gauges | None = None
        self._drawn = float("-inf")

    def start(self, done: int, total: int, portion: Portion) -> None:
        """From now on there are gauges: `done` of `total` steps, each of which takes in a `portion`."""
        self._gauges = Gauges(done, total, portion)
        self._write("", time.monotonic())

    def advance(self, record: Record) -> None:
        """One step more."""
        if self._live and self._gauges is not None:
            now = time.monotonic()
            self._gauges.add(record, now)
            if now - self._drawn >= _EVERY_S:
                self._write("", now)

    def line(self, text: str) -> None:
        """Prints one line, above the gauges where there are some."""
        if self._live:
            self._write(f"{text}\n", time.monotonic())
        elif not self._silent:
            self._console.print(text)
            self._console.file.flush()

    def wipe(self) -> None:
        """Clears the gauges from any thread, for a process that ends at once."""
        if self._live and self._gauges is not None:
            os.write(self._console.file.fileno(), _ERASE.encode())

    def _write(self, text: str, now: float) -> None:
        """In one piece: what stands below the cursor goes, `text` comes, and the gauges after it."""
        if self._live:
            self._console.file.write(f"{_ERASE}{text}{self._frame(now)}")
            self._console.file.flush()
            self._drawn = now

    def _frame(self, now: float) -> str:
        if self._gauges is None:
            return ""
        plain = not self._console.encoding.lower().startswith("utf")
        # One column less than there are: a terminal would begin another line.
        bar, gauges = self._gauges.lines(self._console.width - 1, now, plain)
        if self._console.color_system is None:
            return f"{bar}\n{gauges}{_UP}"
        return f"{_BAR}{bar}{_END}\n{_GAUGES}{gauges}{_END}{_UP}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._gauges is not None:
            self._gauges = None
            self._write("", time.monotonic())


def clear(on_stderr: bool) -> None:
    """Undoes what a screen does to a terminal, where the process that drew it may have been ended."""
    console = _console(on_stderr)
    if _can_live(console):
        console.file.write(_ERASE)
        console.file.flush()


def _console(on_stderr: bool) -> Console:
    return Console(file=sys.stderr if on_stderr else sys.stdout, soft_wrap=True, highlight=False, markup=False)


def _can_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal
