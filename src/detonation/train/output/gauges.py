"""The gauges of a run: a progress bar, and a line of loss, speed, traffic and waiting."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from detonation.report.words import size_text
from detonation.train.output.metrics import Portion, Record

BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-=+*%#"
_WINDOW = 20
_WIDEST, _WIDEST_BAR = 40, 90


class Curve:
    """A series of any length in a small space: neighbours are averaged once there are too many."""

    def __init__(self, most: int = 2 * _WIDEST) -> None:
        self._most, self._stride = most, 1
        self._means: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Appends `value`."""
        self._open.append(value)
        if len(self._open) == self._stride:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == self._most:
            self._means = [_mean(self._means[i : i + 2]) for i in range(0, self._most, 2)]
            self._stride *= 2

    def values(self) -> list[float]:
        """Means of equally many neighbours, the last perhaps of fewer."""
        return self._means + ([_mean(self._open)] if self._open else [])


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
        self._portion, self._curve, self._last = portion, Curve(), deque[Record](maxlen=_WINDOW)
        self._seconds = self._sent = self._waited = 0.0

    def add(self, record: Record) -> None:
        """Takes in a step that ends now."""
        self._bar.update(self._task, completed=record.step)
        self._curve.add(record.loss)
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
        return loss + sparkline(self._curve.values(), max(1, room), blocks) + "".join(rates)

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
    means = [_mean(values[a:b]) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    per = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * per)] for value in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
