"""Figures that matplotlib draws: the loss against steps, bytes and time, and the parts of a
step.
"""

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, nan
from typing import Any

from detonation.report.read import Run, agreeing_s
from detonation.report.words import duration, shortened, size_text

COLOURS = ("#1861cd", "#c94f00", "#006a50", "#a3508a", "#c8870b", "#3a9dd5")
"""Colours of runs. Their hues are those of Okabe and Ito, darkened to a contrast of 3 with the
background `PAPER`.
"""
PART_COLOURS = ("#a9b4c4", "#b87400", "#1f6fd0", "#5e1f57")
"""Colours of the parts of a step, from light to dark, in the order of the bars in `breakdown`."""
PAPER = "#ffffff"
_INK = "#1a1c20"

_DASHES = ("-", "--", "-.", ":")
_MARKERS = "os^DvP"
_STYLE: dict[Any, Any] = {
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # names may contain dollar signs, which would start a formula
}
_WIDTH = 4.0
_HEIGHT = 2.9
"""Height of a figure in inches. It is close to the size of the figure on a phone, so that text in
the figure is as large as other text.
"""
_LEFT = 0.075
"""Left margin for the label of the y axis. `_CHARACTER` is added to it for each character of the
tick labels.
"""
_CHARACTER = 0.025
_BUCKETS = 60
_FAR = 8.0
"""If values on an axis differ by more than this factor, the axis is logarithmic."""
_TRANSIENT = 0.05
"""Share of a run, from its start, whose losses do not affect the scale of the loss axis."""
_LOSS = "Lines are training loss, means over a sixtieth of the run; points are validation loss."
_TIMES = (("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True)
class Key:
    """Entry of a legend: a dashed line with a marker, or a coloured patch if `dash` is empty."""

    text: str
    colour: str
    dash: str = ""
    marker: str = ""

    def artist(self) -> Any:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        if not self.dash:
            return Patch(color=self.colour, label=self.text)
        look: dict[str, Any] = {"linestyle": self.dash, "marker": self.marker, "markersize": 5}
        return Line2D([], [], color=self.colour, label=self.text, **look)


_Curve = tuple[Run, Key, list[float]]


@dataclass(frozen=True)
class Chart:
    """A figure of the page.

    Args:
        note: Explains how to read the figure.
        keys: Entries of the legend.
        draw: Function that draws into the given matplotlib axes.
        height: Height in inches, without title and legend.
    """

    name: str
    title: str
    note: str
    keys: Sequence[Key]
    draw: Callable[[Any], None]
    height: float = _HEIGHT

    def image(self) -> str:
        """Returns the figure as a PNG with 240 dots per inch, in a `data:` URL."""
        import matplotlib
        from matplotlib.figure import Figure

        longest = max((len(key.text) for key in self.keys), default=0)
        columns = 2
        if longest > 20:
            columns = 1
        elif longest < 8:
            columns = 4
        legend = 0.0
        if self.keys:
            legend = 0.12 + 0.19 * ceil(len(self.keys) / columns)
        height = self.height + legend + 0.28
        file = io.BytesIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # the page has the names in full, so a box in the figure needs no warning
            warnings.filterwarnings("ignore", r"Glyph \d+ ")
            figure = Figure(figsize=(_WIDTH, height))
            axes = figure.add_subplot()
            self.draw(axes)
            if axes.get_ylabel():
                figure.subplots_adjust(left=_left(axes))
            # fixed margins in inches, because an automatic layout takes longer than the drawing
            bottom = legend + 0.32
            if axes.get_xlabel():
                bottom = legend + 0.5
            figure.subplots_adjust(right=0.91, bottom=bottom / height, top=1 - 0.4 / height)
            figure.suptitle(
                self.title, x=0.03, y=1 - 0.09 / height, ha="left", fontsize=11.5, fontweight="bold"
            )
            if self.keys:
                handles = [key.artist() for key in self.keys]
                figure.legend(handles=handles, loc="lower left", ncols=columns, borderaxespad=0.2)
            figure.savefig(
                file, format="png", dpi=240, facecolor=PAPER, metadata={"Software": None}
            )
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def keys(runs: Sequence[Run]) -> list[Key]:
    found = []
    for number, run in enumerate(runs):
        round_of_colours, colour = divmod(number, len(COLOURS))
        dash = _DASHES[round_of_colours % len(_DASHES)]
        marker = _MARKERS[number % len(_MARKERS)]
        found.append(Key(shortened(run.name), COLOURS[colour], dash, marker))
    return found


def charts(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """Returns the figures of the loss, and the figures of the cost per step. Leaves out figures
    without data.
    """
    shown = list(zip(runs, keys(runs), strict=True))
    senders = [(run, key) for run, key in shown if run.bytes_so_far()[-1]]
    silent = ", ".join(run.name for run in runs if not run.bytes_so_far()[-1])
    unsent = ""
    if silent:
        unsent = f" Not shown, because nothing was sent: {silent}."
    longest = max(run.seconds_so_far()[-1] for run in runs)
    unit, per = next((pair for pair in _TIMES if longest >= 5 * pair[1]), _TIMES[-1])
    steps = [(run, key, run.series("step")) for run, key in shown]
    sent = [(run, key, run.bytes_so_far()) for run, key in senders]
    seconds = []
    for run, key in shown:
        seconds.append((run, key, [second / per for second in run.seconds_so_far()]))
    time = f"{unit} in steps"
    loss = [_curves("loss-steps", "Loss against steps", _LOSS, steps, "steps")]
    if senders:
        title = "Loss against bytes sent"
        label = "sent by one replica"
        loss.append(_curves("loss-bytes", title, _LOSS + unsent, sent, label, _bytes_text))
    note = f"{_LOSS} Time counts steps, not validation."
    loss.append(_curves("loss-seconds", "Loss against time", note, seconds, time))
    ended = [(run, key) for run, key in senders if isfinite(run.summary.get("val_loss") or nan)]
    if len(ended) > 2:
        loss.append(frontier(ended))
    timed = [run for run in runs if run.timed]
    costs = []
    if timed:
        costs.append(breakdown(timed))
    return loss, costs


def frontier(runs: Sequence[tuple[Run, Key]]) -> Chart:
    """Returns a figure of the validation loss of finished runs over their bytes per step. Each
    point is a run, and is labelled with the duration of all its steps.
    """
    points = [(run.summary["bytes_sent_per_step"], run.summary["val_loss"]) for run, _ in runs]

    def beaten(sent: float, loss: float) -> bool:
        return any(s <= sent and x < loss for s, x in points)

    best = [point for point in points if not beaten(*point)]

    def draw(axes: Any) -> None:
        axes.plot(*zip(*sorted(best), strict=True), color=_INK, alpha=0.4, linewidth=1.0)
        for (run, key), point in zip(runs, points, strict=True):
            axes.plot(*point, key.marker, color=key.colour, markersize=7, markeredgewidth=0)
            text = duration(run.seconds_so_far()[-1])
            axes.annotate(text, point, textcoords="offset points", xytext=(6, 5), fontsize=8)
        axes.set(xlabel="sent by one replica in a step", ylabel="validation loss (nats)")
        axes.margins(0.14)
        sent = [sent for sent, _ in points]
        if max(sent) > _FAR * min(sent):
            axes.set_xscale("log")
        _ticks(axes.xaxis, _bytes_text)
        _ticks(axes.yaxis, "{x:,g}")

    note = (
        "Values after the last step; the label of a point is the time of all steps. The line joins"
        " the runs for which no other run has a lower loss with as few bytes."
    )
    return Chart("frontier", "Loss, bytes and time", note, [key for _, key in runs], draw)


def breakdown(runs: Sequence[Run]) -> Chart:
    """Returns a figure of the mean time of each part of a step, as one stacked bar per run. All
    runs must be `timed`.
    """
    parts = [
        ("compute: forward, backward", lambda r: r["seconds"] - r["step_s"] - agreeing_s(r)),
        ("encode, decode, update", lambda r: r["step_s"] - r["waited_s"]),
        ("waiting for the slowest replica", agreeing_s),
        ("waiting for the network", lambda r: r["waited_s"]),
    ]
    means = [
        [sum(map(seconds, run.records)) / len(run.records) for _, seconds in parts] for run in runs
    ]

    def draw(axes: Any) -> None:
        for y, (run, row) in enumerate(zip(runs, means, strict=True)):
            for i, (seconds, colour) in enumerate(zip(row, PART_COLOURS, strict=True)):
                axes.barh(y, seconds, left=sum(row[:i]), color=colour, height=0.42)
            total = sum(row)
            text = duration(total)
            if total:
                text += f", {sum(row[2:]) / total:.0%} waiting"
            _label(axes, y, run.name, text)
        _rows(axes, len(runs))
        axes.set_xlim(0, 1.06 * max(map(sum, means)))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(_duration_text)

    note = (
        "Means over all steps. Only exposed communication counts: a transfer that backward hides"
        " costs no time."
    )
    legend = [Key(text, colour) for (text, _), colour in zip(parts, PART_COLOURS, strict=True)]
    if any("agreeing_s" in record for run in runs for record in run.records):
        note += (
            " Waiting for a late loss counts as waiting for the slowest replica; waiting in an"
            " exchange counts as waiting for the network."
        )
    else:
        # remove this entry of the legend: the wait for the slowest replica was not measured
        del legend[2]
    return Chart("step-time", "Time of a step by part", note, legend, draw, 0.57 + 0.44 * len(runs))


def _curves(
    name: str, title: str, note: str, curves: Sequence[_Curve], label: str, form: Any = "{x:,g}"
) -> Chart:
    """Returns a figure of the training and validation losses of runs. Each of `curves` holds a run,
    its entry in the legend, and the x value of each step. The y values are the losses of the run.
    """
    ends = [across[-1] for _, _, across in curves]

    def draw(axes: Any) -> None:
        log = max(ends) > _FAR * min(ends)
        for run, key, across in curves:
            x, y = buckets(across, run.series("loss"), log)
            axes.plot(x, y, key.dash, color=key.colour, linewidth=1.3)
            found = run.validations()
            x = [across[i] for i, _ in found]
            y = [loss for _, loss in found]
            axes.plot(x, y, key.marker, color=key.colour, markersize=5, markeredgewidth=0)
        axes.set(xlabel=label, ylabel="loss (nats)")
        _loss_limits(axes, [run for run, _, _ in curves])
        if log:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        _ticks(axes.xaxis, form)

    return Chart(name, title, note, [key for _, key, _ in curves], draw)


def buckets(
    across: Sequence[float], loss: Sequence[float], log: bool
) -> tuple[list[float], list[float]]:
    """Reduces a long curve to between 60 and 120 points. Each point is a mean of neighbouring
    values.

    With `log` it leaves out points at x = 0.
    """
    pairs = [(x, y) for x, y in zip(across, loss, strict=True) if x > 0 or not log]
    width = max(1, len(pairs) // _BUCKETS)
    groups = [pairs[i : i + width] for i in range(0, len(pairs), width)]
    ends = [group[-1][0] for group in groups]
    means = [sum(y for _, y in group) / len(group) for group in groups]
    return ends, means


def _loss_limits(axes: Any, runs: Sequence[Run]) -> None:
    """Fits the loss axis to all validation losses, and to the training losses after the first part
    of the run. If these losses differ much, makes the axis logarithmic.
    """
    values = []
    for run in runs:
        settled = run.series("loss")[int(_TRANSIENT * len(run.records)) :]
        values += [loss for loss in settled if isfinite(loss)]
        values += [loss for _, loss in run.validations()]
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    if low > 0 and high > _FAR * low:
        axes.set(yscale="log", ylim=(low / 1.1, high * 1.1))
    else:
        margin = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)
    _ticks(axes.yaxis, "{x:,g}")


def _ticks(axis: Any, form: Any) -> None:
    """Labels the ticks of a linear or logarithmic axis by `form`, because matplotlib would label a
    logarithmic axis with powers of ten.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        steps = [1.0]
        if high < 100 * low:
            steps = [1.0, 3.0]
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.axes.locator_params(axis=axis.axis_name, nbins=6)
    axis.set_major_formatter(form)


def _left(axes: Any) -> float:
    low, high = axes.get_ylim()
    inside = [tick for tick in axes.get_yticks() if low <= tick <= high]
    texts = axes.yaxis.get_major_formatter().format_ticks(inside)
    return _LEFT + _CHARACTER * max(map(len, texts), default=0)


def _rows(axes: Any, count: int) -> None:
    """Prepares the y axis for `count` rows, the first row at the top. Each row has space for a
    label above the row.
    """
    axes.set_ylim(count - 0.55, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.figure.subplots_adjust(left=0.03)


def _label(axes: Any, y: float, name: str, text: str) -> None:
    style: dict[str, Any] = {
        "transform": axes.get_yaxis_transform(),
        "fontsize": 9.5,
        "va": "center",
    }
    axes.text(0.0, y - 0.36, shortened(name, 26), **style)
    axes.text(1.0, y - 0.36, text, ha="right", **style)


def _duration_text(seconds: float, _: object) -> str:
    if seconds:
        return duration(seconds)
    return "0"


def _bytes_text(count: float, _: object) -> str:
    return size_text(count).replace(".0 ", " ")
