"""Colours of the figures: distinct with every common colour blindness, on white and on black. Pure Python."""

from typing import Literal

LIGHT = ("#1861cd", "#c94f00", "#006a50", "#a3508a", "#c8870b", "#3a9dd5")
"""The hues of Okabe and Ito, darkened to a contrast of 3 with a white background."""

DARK = ("#45a9fb", "#d76100", "#009a6d", "#cd81b6", "#ffbd46", "#7fd9ff")
"""The same hues for a dark background."""

PAPER, NIGHT = "#ffffff", "#16181c"
"""The two backgrounds."""

PART_COLOURS = ("#a9b4c4", "#b87400", "#1f6fd0", "#5e1f57")
"""Parts of a step, light to dark: compute, the optimizer's own work, waiting for the slowest, for the network."""

PARTS_DARK = ("#4d5866", "#ffc552", "#b2e0ff", "#d07fb8")
"""The same parts for a dark background."""

Dash = Literal["-", "--", "-.", ":", ""]
DASHES: tuple[Dash, ...] = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")


def with_variables(svg: str) -> str:
    """Replaces each colour of `svg` by a CSS variable, which the page sets for light and dark."""
    for name, colours in (("run", LIGHT), ("part", PART_COLOURS)):
        for i, colour in enumerate(colours):
            svg = svg.replace(colour, f"var(--{name}-{i})")
    return svg


def variables(dark: bool) -> str:
    """Declares the CSS variables of one mode."""
    runs, parts = (DARK, PARTS_DARK) if dark else (LIGHT, PART_COLOURS)
    pairs = [(f"run-{i}", colour) for i, colour in enumerate(runs)] + [(f"part-{i}", c) for i, c in enumerate(parts)]
    return " ".join(f"--{name}: {colour};" for name, colour in pairs)
