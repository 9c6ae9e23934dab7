"""The frame of the benchmarks' figures: one style, text that stays text, and files that depend on the rows alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def drawn(path: Path, width: float, height: float, dpi: int = 110) -> Iterator[Any]:
    """A figure of `width` x `height` inches; then it is written as .svg and .png, without top and right frames."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "detonation", "font.size": 9}
    ):
        drawing = Figure(figsize=(width, height), layout="constrained")
        yield drawing
        for axes in drawing.axes:
            axes.spines[["top", "right"]].set_visible(False)
        drawing.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        drawing.savefig(path.with_suffix(".png"), dpi=dpi)
