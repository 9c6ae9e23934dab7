"""The figures: loss against steps, bytes and time, the parts of a step, and bytes per step."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from detonation.report.figures.colours import DASHES, LIGHT, MARKERS, PART_COLOURS
from detonation.report.figures.drawing import INK, Chart, Key
from detonation.report.read import Run, agreeing_s
from detonation.report.words import duration, factor, shortened, size_text

_BUCKETS = 60
_FAR = 8.0
"""Values that differ by more than this factor get a log axis."""
_TRANSIENT = 0.05
"""The share of a run, from its beginning, that does not set the scale of the loss axis."""

_LOSS = "Lines are training loss, means over a sixtieth of the run; points are validation loss."
Unit = tuple[str, float]
"""A unit and its size in the base unit."""
KeyedRun = tuple[Run, Key]


def charts(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """Makes the figures of loss and those of cost per step; leaves out a figure that would be empty."""
    shown = list(zip(runs, keys(runs), strict=True))
    senders = [(run, key) for run, key in shown if run.bytes_so_far()[-1]]
    loss = [_against_steps(shown), *([_against_bytes(shown, senders)] if senders else []), _against_seconds(shown)]
    timed = [run for run in runs if run.timed]
    return loss, [*([breakdown(timed)] if timed else []), *([sent_chart(shown)] if senders else [])]


def keys(runs: Sequence[Run]) -> list[Key]:
    """Chooses colour, dash and marker of each run."""
    many = len(LIGHT)
    return [
        Key(shortened(run.name), LIGHT[i % many], DASHES[i // many % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, run in enumerate(runs)
    ]


def _against_steps(shown: Sequence[KeyedRun]) -> Chart:
    curves = [(run, key, run.series("step")) for run, key in shown]
    return _curves("loss-steps", "Loss against steps", _LOSS, curves, "steps", log=False)


def _against_bytes(shown: Sequence[KeyedRun], senders: Sequence[KeyedRun]) -> Chart:
    ends = [run.bytes_so_far()[-1] for run, _ in senders]
    unit, per = _scale(max(ends), (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))
    curves = [(run, key, [count / per for count in run.bytes_so_far()]) for run, key in senders]
    silent = [run.name for run, _ in shown if not run.bytes_so_far()[-1]]
    note = f"{_LOSS} Not shown, because nothing was sent: {', '.join(silent)}." if silent else _LOSS
    log = max(ends) > _FAR * min(ends)
    return _curves("loss-bytes", "Loss against bytes sent", note, curves, f"{unit} sent by one replica", log)


def _against_seconds(shown: Sequence[KeyedRun]) -> Chart:
    ends = [run.seconds_so_far()[-1] for run, _ in shown]
    unit, per = _scale(max(ends), (("seconds", 1), ("minutes", 60), ("hours", 3600)), 5)
    curves = [(run, key, [second / per for second in run.seconds_so_far()]) for run, key in shown]
    predicted = "predicted " if any(run.summary.get("seconds_predicted") for run, _ in shown) else ""
    log = max(ends) > _FAR * min(ends)
    note = f"{_LOSS} Time is that of steps alone."
    return _curves("loss-seconds", "Loss against time", note, curves, f"{predicted}{unit} in steps", log)


def breakdown(runs: Sequence[Run]) -> Chart:
    """Stacked bars of the mean time of each part of a step, one bar per run; all runs must be `timed`."""
    parts = [
        ("compute: forward, backward", lambda r: r["seconds"] - r["step_s"] - agreeing_s(r)),
        ("encode, decode, update", lambda r: r["step_s"] - r["waited_s"]),
        ("waiting for the slowest replica", agreeing_s),
        ("waiting for the network", lambda r: r["waited_s"]),
    ]
    means = [[sum(map(value, run.records)) / len(run.records) for _, value in parts] for run in runs]

    def draw(axes: Any) -> None:
        ends = [sum(row) for row in means]
        for y, (run, row) in enumerate(zip(runs, means, strict=True)):
            left = 0.0
            for seconds, colour in zip(row, PART_COLOURS, strict=True):
                axes.barh(y, seconds, left=left, color=colour, height=0.42)
                left += seconds
            waits = f", {sum(row[2:]) / left:.0%} waiting" if left else ""
            _label(axes, y, run.name, f"{duration(left)}{waits}")
        _rows(axes, len(runs))
        axes.set_xlim(0, 1.06 * max(ends))
        axes.xaxis.set_major_formatter(lambda x, _: duration(x) if x else "0")
        axes.xaxis.set_major_locator(_ticks(5))

    note = "Means over all steps. Only exposed communication counts: a transfer that backward hides costs no time."
    legend = [Key(text, colour) for (text, _), colour in zip(parts, PART_COLOURS, strict=True)]
    if any("agreeing_s" in record for run in runs for record in run.records):
        note += " A replica whose loss is late counts as the slowest; one that is late in an exchange, as the network."
    else:
        del legend[2]  # which was not measured
    return Chart("step-time", "Time of a step by part", note, legend, draw, _height(len(runs)))


def sent_chart(shown: Sequence[KeyedRun]) -> Chart:
    """Bytes per step against full synchronisation, one row for each level of each run."""
    rows = [(label, level, key) for run, key in shown for label, level in _levels(run)]

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        for y, (label, level, key) in enumerate(rows):
            sent, full = level["bytes_sent_per_step"], level["bytes_full_sync_per_step"]
            if sent:
                axes.plot([sent, full], [y, y], "-", color=key.colour, alpha=0.45, linewidth=2.5)
                axes.plot([sent], [y], "o", color=key.colour, markersize=8)
            axes.plot([full], [y], "|", color=INK, markersize=13, markeredgewidth=1.8)
            less = f", {factor(level['reduction'])} less" if (level["reduction"] or 0) > 1.005 else ""
            _label(axes, y, label, f"{size_text(sent)}{less}" if sent else "nothing")
        _rows(axes, len(rows))
        counts = [count for _, level, _ in rows for count in _ends(level) if count]
        axes.set_xlim(min(counts) / 2, 2 * max(counts))
        axes.xaxis.set_major_formatter(lambda x, _: size_text(x).replace(".0 ", " "))
        axes.minorticks_off()

    note = (
        "Points are the mean bytes that one replica sends per step; upright strokes are full synchronisation in fp32."
    )
    return Chart("bytes-per-step", "Bytes per step", note, [], draw, _height(len(rows)))


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
    """Thins a long curve to 60 to 120 points, means of equally many neighbours; with `log`, drops points at x = 0."""
    pairs = [(x, y) for x, y in zip(across, loss, strict=True) if x > 0 or not log]
    width = max(1, len(pairs) // _BUCKETS)
    groups = [pairs[i : i + width] for i in range(0, len(pairs), width)]
    return [g[-1][0] for g in groups], [sum(y for _, y in g) / len(g) for g in groups]


def _loss_limits(axes: Any, runs: Sequence[Run]) -> None:
    """Fits the loss axis to all values after the transient; logarithmic for a wide range."""
    settled = [loss for run in runs for loss in run.series("loss")[int(_TRANSIENT * len(run.records)) :]]
    values = [loss for loss in settled if isfinite(loss)] + [loss for run in runs for _, loss in run.validations()]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low > 0 and high > _FAR * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.1, high * 1.1)
    else:
        margin = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)


def _rows(axes: Any, count: int) -> None:
    """Makes room for `count` rows from the top down, each with its label above."""
    axes.set_ylim(count - 0.55, -0.75)
    axes.yaxis.set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.figure.subplots_adjust(left=0.03)


def _label(axes: Any, y: float, name: str, text: str) -> None:
    transform = axes.get_yaxis_transform()
    axes.text(0.0, y - 0.36, shortened(name, 26), transform=transform, fontsize=9.5, va="center")
    axes.text(1.0, y - 0.36, text, transform=transform, fontsize=9.5, va="center", ha="right")


def _height(rows: int) -> float:
    return 0.75 + 0.44 * rows


def _ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count)


def _scale(largest: float, units: Sequence[Unit], least: float = 1) -> Unit:
    """Picks the largest unit in which `largest` is at least `least`; the first where there is none."""
    return next((unit for unit in reversed(units) if largest >= least * unit[1]), units[0])
