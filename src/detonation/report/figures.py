"""Curves of runs as inline SVG that takes its colours for text and axes from the page, light or dark."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from detonation.report.read import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette: told apart with every common colour blindness, on white and on black."""

_INK = "#010203"
_DASHES = ("-", "--", "-.", ":")
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(_INKED, _INK),
    "axes.grid": True,
    "grid.alpha": 0.2,
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "detonation",
}


def against_steps(runs: Sequence[Run]) -> str:
    """Loss against steps: a line for training, points for validation."""
    return _curves(runs, lambda run: run.series("step"), "step")


def against_bytes(runs: Sequence[Run]) -> str:
    """Loss against what a replica has sent so far, for the runs that sent something; empty when none did."""
    senders = [run for run in runs if run.bytes_so_far()[-1]]
    if not senders:
        return ""
    megabytes = "MB sent by one replica"  # several schemes differ by orders of magnitude
    return _curves(senders, lambda run: [count / 1e6 for count in run.bytes_so_far()], megabytes, log=len(senders) > 1)


def against_seconds(runs: Sequence[Run]) -> str:
    """Loss against the time spent in steps."""
    return _curves(runs, lambda run: list(accumulate(run.series("seconds"))), "seconds in steps")


def breakdown(runs: Sequence[Run]) -> str:
    """Where a step's time goes, the median of each part: a bar a run. Empty for runs that did not write it down."""
    timed = [run for run in runs if all("step_s" in record for record in run.records)]
    if not timed:
        return ""
    parts = {
        "forward and backward": [run.median(lambda r: r["seconds"] - r["step_s"]) for run in timed],
        "optimizer: encode, decode, update": [run.median(lambda r: r["step_s"] - r["waited_s"]) for run in timed],
        "waiting for the network": [run.median(lambda r: r["waited_s"]) for run in timed],
    }
    return _bars([run.name for run in timed], parts, "ms a step, median")


def _bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 1.4 + 0.5 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        left = [0.0] * len(names)
        for (part, seconds), colour in zip(parts.items(), COLOURS, strict=False):
            values = [1000 * second for second in seconds]
            axes.barh(list(names), values, left=left, color=colour, label=part, height=0.6)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", frameon=False, fontsize=9, ncols=2)
        return _svg(figure)


def _curves(runs: Sequence[Run], across: Callable[[Run], list[float]], label: str, log: bool = False) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for i, run in enumerate(runs):
            _draw(axes, run, across(run), COLOURS[i % len(COLOURS)], _DASHES[i // len(COLOURS) % len(_DASHES)])
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats)")
        if log:
            axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return _svg(figure)


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    return _inline(text.getvalue())


def _draw(axes: Any, run: Run, across: list[float], colour: str, dash: str) -> None:
    axes.plot(across, run.series("loss"), dash, color=colour, linewidth=1.2, alpha=0.8, label=f"{run.name}, training")
    points = run.validations()
    if points:
        x, y = [across[i] for i, _ in points], [loss for _, loss in points]
        axes.plot(x, y, "o", color=colour, markersize=6, label=f"{run.name}, validation")


def _inline(svg: str) -> str:
    """The <svg> element alone, as wide as the page lets it, with the ink of the page."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return element.replace(_INK, "currentColor")
