"""Draws a figure with matplotlib, as SVG for a page or as PNG for slides, in a style that all figures share."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from detonation.report.figures.colours import PAPER, Dash, with_variables

INK = "#010203"
"""Placeholder for the colour of text: near black in a PNG, the page's text colour in an SVG."""
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(_INKED, INK),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollar signs
    "svg.hashsalt": "detonation",
}
WIDTH = 4.0
"""Inches: near the width of a figure on a phone, so that its text is as large as the text around it."""


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a dashed line with a marker, or a patch where `dash` is empty."""

    text: str
    colour: str
    dash: Dash = ""
    marker: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure.

    Args:
        name: Of its file, without suffix.
        note: Explains how to read it.
        keys: Entries of the legend.
        draw: Draws into matplotlib axes.
        height: In inches.
    """

    name: str
    title: str
    note: str
    keys: Sequence[Key]
    draw: Callable[[Any], None]
    height: float = 2.9

    def svg(self) -> str:
        """The `<svg>` element without a legend, as wide as its container and in the colours of the page."""
        with _figure(self) as figure:
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
        label = f'<svg role="img" aria-label="{self.title}"'
        element = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", _element(text.getvalue()), count=1)
        return with_variables(element.replace("<svg", label, 1).replace(INK, "currentColor"))

    def png(self) -> bytes:
        """The figure with title and legend on white, 240 dots per inch."""
        with _figure(self) as figure:
            figure.axes[0].set_title(self.title, loc="left", fontsize=10.5, fontweight="bold", pad=10)
            if self.keys:
                handles = [_handle(key) for key in self.keys]
                figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.02, 0.0), ncols=_columns(self.keys))
            content = io.BytesIO()
            figure.savefig(
                content, format="png", dpi=240, facecolor=PAPER, bbox_inches="tight", metadata={"Software": None}
            )
        return content.getvalue()


@contextmanager
def _figure(chart: Chart) -> Iterator[Any]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, chart.height))
        # Fixed margins in inches: an automatic layout costs more than the drawing.
        bottom, top = 0.5 / chart.height, 1 - 0.12 / chart.height
        figure.subplots_adjust(left=0.14, right=0.955, bottom=bottom, top=top)
        chart.draw(figure.add_subplot())
        yield figure


def _element(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    # matplotlib writes a font into each text that few systems have; the page has its own.
    return re.sub(r"(font(?:-family)?: [^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1system-ui, sans-serif", svg)


def _handle(key: Key) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if not key.dash:
        return Patch(color=key.colour, label=key.text)
    return Line2D([], [], color=key.colour, linestyle=key.dash, marker=key.marker, markersize=5, label=key.text)


def _columns(keys: Sequence[Key]) -> int:
    return 1 if max(len(key.text) for key in keys) > 20 else min(2, len(keys))
