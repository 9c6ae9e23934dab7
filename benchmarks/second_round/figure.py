"""The figure of benchmarks/second_round: loss against bytes of the study of text, a panel per number of replicas."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.drawing import drawn
from benchmarks.compare.rows import per_parameter
from benchmarks.compare.tuning import Method, Rows
from benchmarks.second_round.grid import REFERENCES, methods

from detonation.plan.losses import spread

PANELS = (2, 8)
LEFT_OUT = (
    r"^Signum 0\.95|^AdamW 0\.95, full|Muon 0\.95|alpha|cycle|AdamW 0, 0\.999"
    r"|^local_sgd|^muloco 5, 2bit, Muon 0\.8"
)
"""Settings that end where another one does that is shown, and those that only answer a question."""
OPTIMIZERS = ("AdamW", "Muon", "SignSGD")
"""In the order of the colours; the first two are those of the dense references."""
FAMILIES = {"demo": "s", "loco": "o", "muloco": "^", "random_sign": "D", "full": "v"}
"""Markers by scheme."""
NAMES = {"muloco": "muloco: rounds", "random_sign": "random_sign: votes"}
HIGHEST, LOWEST = 1.8, 1.24
"""Losses of the axis; methods above it are not drawn."""
SHORTER = {
    r"^AdamW 0\.999, |^demo |^loco |^random_sign |, Muon( 0\.8)?$|, AdamW$|, full$": "",
    "AdamW 0,": "betas 0,",
}
"""Labels say what colours and markers do not."""
PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.3}
"""Behind labels, which lie over bars and under markers."""
APART, NEAR = 0.02, 3
"""Losses between two labels whose bytes differ by less than this factor."""


def figure(done: Rows, path: Path) -> None:
    """Draws mean losses with their 95 % intervals over seeds; bands are full synchronisation.

    A dense method computes the same with any number of replicas but for the last bits, so its band is in each panel.
    """
    from detonation.report.figures import COLOURS

    dense = [name for _, name, _ in REFERENCES["text"]]
    shown = [each for each in methods() if each.study == "text" and len(each.judged(done)) >= 3]
    with drawn(path, 12, 5.5) as drawing:
        panels = drawing.subplots(1, len(PANELS), sharex=True, sharey=True)
        for axes, replicas in zip(panels, PANELS, strict=True):
            for name, colour in zip(dense, COLOURS, strict=False):
                (reference,) = (each for each in shown if each.name == name)
                mean, half = _judged(reference, done)
                axes.axhspan(mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
                axes.axhline(mean, color=colour, linewidth=1)
            here = [each for each in shown if each.replicas == replicas and each.name not in dense]
            kept = [
                each
                for each in here
                if not re.search(LEFT_OUT, each.name) and _judged(each, done)[0] < HIGHEST
            ]
            _points(axes, kept, done)
            axes.set(xscale="log", xlim=(6e-3, 9), ylim=(LOWEST, HIGHEST))
            axes.set_title(f"{replicas} replicas", fontsize=9)
            axes.set_xlabel("bytes per parameter and step, sent by a replica")
            axes.grid(alpha=0.2)
        panels[0].set_ylabel("validation loss (nats per byte)")
        for name, colour in zip(OPTIMIZERS, COLOURS, strict=False):
            band = f"{name}; band: in full" if name in " ".join(dense) else name
            panels[0].plot([], [], linewidth=6, color=colour, alpha=0.6, label=band)
        for family, marker in FAMILIES.items():
            panels[0].plot([], [], marker, color="grey", label=NAMES.get(family, family))
        drawing.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _points(axes: Any, shown: Sequence[Method], done: Rows) -> None:
    """Draws the methods of a panel, with labels that keep apart from those below them."""
    from detonation.report.figures import COLOURS

    taken: list[tuple[float, float]] = []
    for each in sorted(shown, key=lambda each: _judged(each, done)[0]):
        mean, half = _judged(each, done)
        sent = per_parameter(next(iter(each.judged(done).values())))
        (optimizer,) = re.findall(r"optimizer\.name=(\w+)", each.sets)
        (scheme,) = re.findall(r"scheme\.name=(\w+)", each.sets)
        label = each.name.replace("muloco", "every").replace("64 sign", "64")
        for pattern, text in SHORTER.items():
            label = re.sub(pattern, text, label)
        colour = COLOURS[OPTIMIZERS.index(optimizer)]
        axes.errorbar([sent], [mean], [half], fmt="none", color=colour, capsize=2, linewidth=1)
        axes.plot([sent], [mean], FAMILIES[scheme], color=colour, markersize=5, zorder=4)
        height = mean
        while any(abs(height - y) < APART and 1 / NEAR < sent / x < NEAR for x, y in taken):
            height += 0.002
        taken.append((sent, height))
        text = axes.annotate(
            label, (sent, height), (6, 0), textcoords="offset points", fontsize=7, color=colour
        )
        text.set(va="center", bbox=PAPER)


def _judged(method: Method, done: Rows) -> tuple[float, float]:
    """The mean loss of a method over its judging seeds, and half of its 95 % interval."""
    return spread([row["val_loss"] for row in method.judged(done).values()])
