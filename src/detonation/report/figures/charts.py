"""The figures about runs: loss against what it costs, and what a step consists of."""

from collections.abc import Sequence
from typing import Any

from detonation.report.figures.colours import DASHES, LIGHT, MARKERS, PARTS
from detonation.report.figures.drawing import INK, Chart, Key
from detonation.report.read import Run
from detonation.report.words import duration, factor, shortened, size

_BUCKETS = 60
_FAR = 8.0
"""Runs that differ by more than this factor are shown on a log axis."""
_TRANSIENT = 0.05
"""This part of a run, its beginning, does not set the scale of the loss."""

_LOSS = "Lines are training loss, means over a sixtieth of the run; points are validation loss."
Scaled = tuple[str, float]
Shown = tuple[Run, Key]


def charts(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """The figures of loss, and those of what a step costs; without those that have nothing to show."""
    shown = list(zip(runs, keys(runs), strict=True))
    senders = [(run, key) for run, key in shown if run.bytes_so_far()[-1]]
    loss = [_against_steps(shown), *([_against_bytes(shown, senders)] if senders else []), _against_seconds(shown)]
    timed = [run for run in runs if run.timed]
    return loss, [*([breakdown(timed)] if timed else []), *([sent(shown)] if senders else [])]


def keys(runs: Sequence[Run]) -> list[Key]:
    """Colour, dash and marker of each run."""
    many = len(LIGHT)
    return [
        Key(shortened(run.name), LIGHT[i % many], DASHES[i // many % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, run in enumerate(runs)
    ]


def _against_steps(shown: Sequence[Shown]) -> Chart:
    curves = [(run, key, run.series("step")) for run, key in shown]
    return _curves("loss-steps", "Loss against steps", _LOSS, curves, "steps", log=False)


def _against_bytes(shown: Sequence[Shown], senders: Sequence[Shown]) -> Chart:
    ends = [run.bytes_so_far()[-1] for run, _ in senders]
    unit, per = _scale(max(ends), (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))
    curves = [(run, key, [count / per for count in run.bytes_so_far()]) for run, key in senders]
    silent = [run.name for run, _ in shown if not run.bytes_so_far()[-1]]
    note = f"{_LOSS} Not shown, because nothing was sent: {', '.join(silent)}." if silent else _LOSS
    log = max(ends) > _FAR * min(ends)
    return _curves("loss-bytes", "Loss against bytes sent", note, curves, f"{unit} sent by one replica", log)


def _against_seconds(shown: Sequence[Shown]) -> Chart:
    ends = [run.seconds_so_far()[-1] for run, _ in shown]
    unit, per = _scale(max(ends), (("seconds", 1), ("minutes", 60), ("hours", 3600)), 5)
    curves = [(run, key, [second / per for second in run.seconds_so_far()]) for run, key in shown]
    predicted = "predicted " if any(run.summary.get("seconds_predicted") for run, _ in shown) else ""
    log = max(ends) > _FAR * min(ends)
    note = f"{_LOSS} Time is that of steps alone."
    return _curves("loss-seconds", "Loss against time", note, curves, f"{predicted}{unit} in steps", log)


def breakdown(runs: Sequence[Run]) -> Chart:
    """Where a step's time goes, the mean of each part: a bar a run. All of them have written it down."""
    parts = [
        ("compute: forward, backward", lambda r: r["seconds"] - r["step_s"]),
        ("encode, decode, update", lambda r: r["step_s"] - r["waited_s"]),
        ("waiting for the network", lambda r: r["waited_s"]),
    ]
    means = [[sum(map(value, run.records)) / len(run.records) for _, value in parts] for run in runs]

    def draw(axes: Any) -> None:
        ends = [sum(row) for row in means]
        for y, (run, row) in enumerate(zip(runs, means, strict=True)):
            left = 0.0
            for seconds, colour in zip(row, PARTS, strict=True):
                axes.barh(y, seconds, left=left, color=colour, height=0.42)
                left += seconds
            waits = f", {row[2] / left:.0%} waiting" if left else ""
            _label(axes, y, run.name, f"{duration(left)}{waits}")
        _rows(axes, len(runs))
        axes.set_xlim(0, 1.06 * max(ends))
        axes.xaxis.set_major_formatter(lambda x, _: duration(x) if x else "0")
        axes.xaxis.set_major_locator(_ticks(5))

    note = "Means over all steps. What is hidden behind backward is not in the way: only exposed communication counts."
    legend = [Key(text, colour) for (text, _), colour in zip(parts, PARTS, strict=True)]
    return Chart("step-time", "Where a step's time goes", note, legend, draw, _height(len(runs)))


def sent(shown: Sequence[Shown]) -> Chart:
    """Bytes a step against full synchronisation: a row for each level of each run."""
    rows = [(label, level, key) for run, key in shown for label, level in _levels(run)]

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        for y, (label, level, key) in enumerate(rows):
            mine, full = level["bytes_sent_per_step"], level["bytes_full_sync_per_step"]
            if mine:
                axes.plot([mine, full], [y, y], "-", color=key.colour, alpha=0.45, linewidth=2.5)
                axes.plot([mine], [y], "o", color=key.colour, markersize=8)
            axes.plot([full], [y], "|", color=INK, markersize=13, markeredgewidth=1.8)
            less = f", {factor(level['reduction'])} less" if (level["reduction"] or 0) > 1.005 else ""
            _label(axes, y, label, f"{size(mine)}{less}" if mine else "nothing")
        _rows(axes, len(rows))
        counts = [count for _, level, _ in rows for count in _ends(level) if count]
        axes.set_xlim(min(counts) / 2, 2 * max(counts))
        axes.xaxis.set_major_formatter(lambda x, _: size(x).replace(".0 ", " "))
        axes.minorticks_off()

    note = "Points are what one replica sends a step, on average; the upright strokes are full synchronisation in fp32."
    return Chart("bytes-per-step", "Bytes a step", note, [], draw, _height(len(rows)))


def _levels(run: Run) -> list[tuple[str, dict[str, Any]]]:
    levels = run.summary.get("levels", [])
    return [(f"{run.name}, {level['axis']}", level) for level in levels] or [(run.name, run.summary)]


def _ends(level: dict[str, Any]) -> tuple[float, float]:
    return level["bytes_sent_per_step"], level["bytes_full_sync_per_step"]


def _curves(
    name: str, title: str, note: str, curves: Sequence[tuple[Run, Key, list[float]]], label: str, log: bool
) -> Chart:
    def draw(axes: Any) -> None:
        for run, key, across in curves:
            x, y = buckets(across, run.series("loss"), log)
            axes.plot(x, y, key.dash, color=key.colour, linewidth=1.3)
            points = run.validations()
            if points:
                x, y = [across[i] for i, _ in points], [loss for _, loss in points]
                axes.plot(x, y, key.marker, color=key.colour, markersize=5, markeredgewidth=0)
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats)")
        _loss_limits(axes, [run for run, _, _ in curves])
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        else:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(_ticks(6))
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")

    return Chart(name, title, note, [key for _, key, _ in curves], draw)


def buckets(across: Sequence[float], loss: Sequence[float], log: bool) -> tuple[list[float], list[float]]:
    """60 to 120 points of a curve that has more, means of equally many neighbours; `log` leaves out what is at 0."""
    pairs = [(x, y) for x, y in zip(across, loss, strict=True) if x > 0 or not log]
    width = max(1, len(pairs) // _BUCKETS)
    cut = [pairs[i : i + width] for i in range(0, len(pairs), width)]
    return [c[-1][0] for c in cut], [sum(y for _, y in c) / len(c) for c in cut]


def _loss_limits(axes: Any, runs: Sequence[Run]) -> None:
    """From the least loss to the largest after the beginning: a log axis where that is far."""
    late = [loss for run in runs for loss in run.series("loss")[int(_TRANSIENT * len(run.records)) :]]
    values = late + [loss for run in runs for _, loss in run.validations()]
    low, high = min(values), max(values)
    if low > 0 and high > _FAR * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.1, high * 1.1)
    else:
        margin = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)


def _rows(axes: Any, count: int) -> None:
    """Room for `count` rows from the top down, each with its words above it."""
    axes.set_ylim(count - 0.55, -0.75)
    axes.yaxis.set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.figure.subplots_adjust(left=0.03)


def _label(axes: Any, y: float, name: str, text: str) -> None:
    place = axes.get_yaxis_transform()
    axes.text(0.0, y - 0.36, shortened(name, 26), transform=place, fontsize=9.5, va="center")
    axes.text(1.0, y - 0.36, text, transform=place, fontsize=9.5, va="center", ha="right")


def _height(rows: int) -> float:
    return 0.75 + 0.44 * rows


def _ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count)


def _scale(largest: float, units: Sequence[Scaled], least: float = 1) -> Scaled:
    """The largest of `units` of which `largest` has at least `least`; the first where there is none."""
    return next((unit for unit in reversed(units) if largest >= least * unit[1]), units[0])
