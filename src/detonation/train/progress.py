"""What rank 0 shows while it trains: plain lines, and a bar under them on a terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Screen:
    """Prints lines to stdout, or to stderr with `to_stderr`; a `silent` one (any rank but 0) prints nothing."""

    def __init__(self, silent: bool, to_stderr: bool) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        self._silent = silent
        # Lines must reach a pipe whole, whatever its width.
        self._console = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(), TimeRemainingColumn())
        shown = not silent and self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not shown)
        self._task = self._bar.add_task("train")

    def start(self, done: int, total: int) -> None:
        """The bar begins at `done` of `total` steps."""
        self._bar.reset(self._task, total=total, completed=done)

    def advance(self) -> None:
        """One step more."""
        self._bar.advance(self._task)

    def line(self, text: str) -> None:
        """Prints one line, above the bar where there is one."""
        if not self._silent:
            self._console.print(text)
            self._console.file.flush()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def show_cursor(on_stderr: bool) -> None:
    """Undoes what a bar does to a terminal, where the process that drew it was ended."""
    Console(file=sys.stderr if on_stderr else sys.stdout).show_cursor()
