"""What a run's last steps come to, in two lines of text for a terminal. Pure Python; imports no torch."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from detonation.report.words import size
from detonation.train.output.metrics import Record

BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-=+*%#"
_WINDOW = 20
_WIDEST = 40


@dataclass(frozen=True)
class Portion:
    """What one step of the whole world takes in: `count` of `unit`, such as 4096 tokens."""

    count: int
    unit: str


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
    """Loss and speed of the last steps; the curve of the loss, traffic and waiting since the start.

    Rounds may be longer than any number of last steps: all of them count for what is sent in rounds.
    """

    def __init__(self, done: int, steps: int, portion: Portion) -> None:
        self._done, self._steps, self._portion = done, steps, portion
        self._curve, self._last = Curve(), deque[Record](maxlen=_WINDOW)
        self._began: tuple[int, float] | None = None
        self._seconds = self._sent = self._waited = 0.0

    def add(self, record: Record, now: float) -> None:
        """Takes in a step that ended at `now`, in seconds of any clock."""
        self._done = record.step
        self._curve.add(record.loss)
        self._last.append(record)
        self._seconds += record.seconds
        self._sent += record.bytes_sent
        self._waited += record.waited_s
        if self._began is None:  # the first step sets up, and tells nothing about those to come
            self._began = (record.step, now)

    def lines(self, width: int, now: float, plain: bool = False) -> tuple[str, str]:
        """A bar with the time that is left, and the gauges, each at most `width` wide; `plain`: in ASCII."""
        return self._bar(width, now, plain), self._gauges(width, _PLAIN if plain else BLOCKS)

    def _bar(self, width: int, now: float, plain: bool) -> str:
        text = f" {self._done}/{self._steps} steps{self._left(now)}"
        room = max(0, min(width - len(text), 60))
        full = room * self._done // max(1, self._steps)
        return (("=" * full + "." * (room - full) if plain else "━" * full + "─" * (room - full)) + text)[:width]

    def _left(self, now: float) -> str:
        if self._began is None or self._done <= self._began[0]:
            return ""
        first, began = self._began
        return f", {clock((now - began) / (self._done - first) * (self._steps - self._done))} left"

    def _gauges(self, width: int, blocks: str) -> str:
        if not self._last:
            return "the first step sets up"[:width]
        speed = len(self._last) * self._portion.count / sum(record.seconds for record in self._last)
        sent, waiting = self._sent / self._seconds, self._waited / self._seconds
        loss = f"loss {self._last[-1].loss:.4f} "
        rates = [
            f"  {f'{speed:,.0f}' if speed >= 100 else f'{speed:.3g}'} {self._portion.unit}/s",
            f"  {size(sent)}/s between nodes" if sent else "  nothing sent",
            f"  {waiting:.0%} waiting",
        ]
        while rates and len(loss) + 8 + sum(map(len, rates)) > width:
            rates.pop()
        room = min(_WIDEST, width - len(loss) - sum(map(len, rates)))
        return (loss + sparkline(self._curve.values(), max(1, room), blocks) + "".join(rates))[:width]


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


def clock(seconds: float) -> str:
    """A time that is left.

    >>> clock(7), clock(754), clock(7384)
    ('0:07', '12:34', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
