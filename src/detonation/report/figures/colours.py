"""The colours of figures: told apart with every common colour blindness, and on white and on black. Pure Python."""

from typing import Literal

LIGHT = ("#1861cd", "#c94f00", "#006a50", "#a3508a", "#c8870b", "#3a9dd5")
"""Okabe and Ito's hues, darkened until each has three times the background's contrast; for paper, slides and day."""

DARK = ("#45a9fb", "#d76100", "#009a6d", "#cd81b6", "#ffbd46", "#7fd9ff")
"""The same hues for the night."""

PAPER, NIGHT = "#ffffff", "#16181c"
"""The backgrounds that they are for."""

PARTS = ("#a9b4c4", "#b87400", "#5e1f57")
"""What a step consists of, light to dark: compute, the optimizer's own work, waiting."""

PARTS_DARK = ("#4d5866", "#ffc552", "#d07fb8")

Dash = Literal["-", "--", "-.", ":", ""]
DASHES: tuple[Dash, ...] = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")


def named(svg: str) -> str:
    """`svg` with each colour as a variable of the page, which knows whether it is dark."""
    for name, colours in (("run", LIGHT), ("part", PARTS)):
        for i, colour in enumerate(colours):
            svg = svg.replace(colour, f"var(--{name}-{i})")
    return svg


def variables(dark: bool) -> str:
    """The variables as a style sheet declares them."""
    runs, parts = (DARK, PARTS_DARK) if dark else (LIGHT, PARTS)
    pairs = [(f"run-{i}", colour) for i, colour in enumerate(runs)] + [(f"part-{i}", c) for i, c in enumerate(parts)]
    return " ".join(f"--{name}: {colour};" for name, colour in pairs)
