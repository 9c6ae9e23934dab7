"""The sections of the page as HTML; "" for a section without content."""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from detonation.report.figures.charts import keys
from detonation.report.figures.colours import with_variables
from detonation.report.figures.drawing import Chart, Key
from detonation.report.html.grids import grid, in_common, side_by_side
from detonation.report.plan_table import HEADS, plan_rows, words
from detonation.report.read import FILES, Run, agreeing_s
from detonation.report.table import run_rows
from detonation.report.words import duration, factor, less_text, loss_text, size_text

_PLAN_ROWS = 10
_MOST_REPLICAS = 16
_STROKES = {"-": "", "--": "6 3", "-.": "7 3 2 3", ":": "2 3"}
_SHAPES = {
    "o": '<circle cx="16" cy="6" r="4"/>',
    "s": '<rect x="12.5" y="2.5" width="7" height="7"/>',
    "^": '<path d="M16 1.5 20.5 10h-9z"/>',
    "D": '<path d="M16 1l5 5-5 5-5-5z"/>',
    "v": '<path d="M16 10.5 20.5 2h-9z"/>',
    "P": '<path d="M14.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z"/>',
}


def tiles(run: Run) -> str:
    """The main results of one run as tiles, and all numbers in a table below."""
    summary = run.summary
    waited = sum(record["waited_s"] + agreeing_s(record) for record in run.records) if run.timed else None
    shown = [
        (loss_text(summary["val_loss"]), "validation loss"),
        *([(f"{summary['val_accuracy']:.1%}", "validation accuracy")] if "val_accuracy" in summary else []),
        *([(f"{summary['val_bleu']:.2f}", "BLEU")] if "val_bleu" in summary else []),
        (size_text(summary["bytes_sent_per_step"]), f"sent per step{_less(summary)}"),
        (duration(summary["seconds"] / summary["steps"]), "per step, on average"),
        *([(f"{waited / summary['seconds']:.1%}", "of the time waiting for others")] if waited is not None else []),
        (f"{summary.get('tokens_per_second', summary['examples_per_second']):,.4g}", f"{_unit(summary)} per second"),
        ("equal" if summary["replicas_equal"] else "not equal", "replicas at the end, bit for bit"),
    ]
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for value, label in shown)
    table = grid([], [(escape(label), escape(text)) for label, text in run_rows(summary)])
    return f'<ul class="tiles">{items}</ul>\n<details><summary>All numbers</summary>\n{table}</details>'


def waits(run: Run) -> str:
    """The seconds that each replica waited for each other one, and for the network."""
    found = run.summary.get("waits")
    if not found or len(found["seconds"]) > _MOST_REPLICAS:
        return ""
    head = ["waited", *(f"for replica {replica}" for replica in range(len(found["seconds"]))), "for the network"]
    rows = zip(found["seconds"], found["network_s"], strict=True)
    body = [
        (f"replica {replica}", *(f"{seconds:.1f} s" for seconds in (*row, network)))
        for replica, (row, network) in enumerate(rows)
    ]
    return grid(head, body, numbers=True)


def _unit(summary: dict[str, Any]) -> str:
    return "tokens" if "tokens_per_second" in summary else "examples"


def runs_table(runs: Sequence[Run]) -> str:
    """One row per run, results first."""
    accurate = any("val_accuracy" in run.summary for run in runs)
    head = ["", "validation loss", *(["accuracy"] if accurate else []), "sent per step", "less than full", "step time"]
    body = []
    for run, name in zip(runs, named_runs(runs), strict=True):
        summary = run.summary
        accuracy = [f"{summary['val_accuracy']:.1%}" if "val_accuracy" in summary else "-"] if accurate else []
        results = [loss_text(summary["val_loss"]), *accuracy, size_text(summary["bytes_sent_per_step"])]
        costs = [factor(summary["reduction"]), duration(summary["seconds"] / summary["steps"])]
        speed = f"{summary['examples_per_second']:,.4g}"
        equal = "yes" if summary["replicas_equal"] else "no"
        body.append((name, *results, *costs, speed, equal, escape(f"{summary['scheme']}, {summary['optimizer']}")))
    return grid([*head, "examples/s", "replicas equal", "scheme, optimizer"], body, numbers=True)


def figures(charts: Sequence[Chart], folder: Path, runs: Sequence[Run] = ()) -> str:
    """The charts with notes and links to the PNGs in `folder`; several `runs` share one legend."""
    shared = _legend(keys(runs)) if len(runs) > 1 else ""
    cards = "\n".join(_figure(chart, folder, bool(runs)) for chart in charts)
    return f'{shared}<div class="figures">\n{cards}\n</div>' if charts else ""


def _figure(chart: Chart, folder: Path, shared: bool) -> str:
    legend = "" if shared or not chart.keys else _legend(chart.keys)
    link = f'<a href="{_address(Path(folder.name))}/{chart.name}.png" download>PNG</a>'
    note = f"<figcaption>{escape(chart.note)} {link}</figcaption>"
    return f'<figure id="{chart.name}">\n<h3>{escape(chart.title)}</h3>\n{legend}{chart.svg()}\n{note}\n</figure>'


def plans(runs: Sequence[Run], given: Mapping[str, Any] | None) -> str:
    """The `given` plan and the plans that chose the schemes of `runs`, each once."""
    shown: list[tuple[str, Mapping[str, Any]]] = [("", given)] if given else []
    for run in runs:
        if run.plan is not None and run.plan not in [plan for _, plan in shown]:
            shown.append((run.name if len(runs) > 1 else "", run.plan))
    return "\n".join(f"{f'<h3>{escape(name)}</h3>' if name else ''}{_plan(plan)}" for name, plan in shown)


def _plan(plan: Mapping[str, Any]) -> str:
    """One plan as text and as a table. The table begins with the scheme that a run chose by the plan, if any."""
    chosen = plan.get("chosen", plan["first"])["spelled"]
    ranked = sorted(plan_rows(plan), key=lambda row: row[0] != chosen)
    cells = [tuple(map(escape, row)) for row in ranked]
    top, rest = cells[:_PLAN_ROWS], cells[_PLAN_ROWS:]
    why = [f"Chosen by this plan: {plan['why']}"] if "why" in plan else []
    first, *others = [escape(line) for line in (*why, *words(plan))]
    text = f"<p>{first}</p>\n<ul>{''.join(f'<li>{line}</li>' for line in others)}</ul>"
    tables = [grid(HEADS, part, numbers=True, marked=escape(chosen)) for part in (top, rest)]
    more = f"<details><summary>{len(rest)} more</summary>\n{tables[1]}</details>" if rest else ""
    return f"{text}\n{tables[0]}\n{more}"


def configurations(runs: Sequence[Run]) -> str:
    """The settings that differ between runs, side by side, and the whole config.toml of each."""
    files = "\n".join(f"<h3>{escape(run.name)}</h3>\n<pre>{escape(run.config)}</pre>" for run in runs)
    folded = f"<details><summary>config.toml{' of each' * (len(runs) > 1)}</summary>\n{files}</details>"
    if len(runs) == 1:
        return folded
    table = side_by_side(named_runs(runs), [run.settings for run in runs])
    return f"{table or '<p>The configurations are the same.</p>'}\n{folded}"


def environments(runs: Sequence[Run]) -> str:
    """The environments of the runs: differences side by side, then the rest."""
    tables = [run.environment for run in runs]
    if not any(tables):
        return ""
    different = side_by_side(named_runs(runs), tables) if len(runs) > 1 else ""
    first = tables[0]
    short = [f"torch {first.get('packages', {}).get('torch')}", first.get("platform"), *first.get("gpus", [])[:1]]
    title = "The same in all runs" if different else ", ".join(escape(str(word)) for word in short if word)
    return f"{different}\n<details><summary>{title}</summary>\n{in_common(tables)}</details>"


def raw(runs: Sequence[Run], target: Path) -> str:
    """Links to the files of each run, relative to the page."""
    rows = []
    for run in runs:
        folder = Path(os.path.relpath(run.directory, target.resolve().parent))
        present = [name for name in FILES if (run.directory / name).is_file()]
        links = " · ".join(f'<a href="{_address(folder / name)}">{name}</a>' for name in present)
        rows.append((escape(run.name), links))
    return grid([], rows)


def _address(path: Path) -> str:
    """A relative path as a link; the name of a directory may have bytes that are no text."""
    return quote(path.as_posix(), errors="surrogateescape")


def named_runs(runs: Sequence[Run]) -> list[str]:
    """The names of `runs` as HTML, each with its line and marker of the figures."""
    return [
        f'<span class="name">{_swatch(key)}<span>{escape(run.name)}</span></span>'
        for run, key in zip(runs, keys(runs), strict=True)
    ]


def _legend(shown: Sequence[Key]) -> str:
    items = "".join(f"<li>{_swatch(key)}<span>{escape(key.text)}</span></li>" for key in shown)
    return f'<ul class="legend">{items}</ul>\n'


def _swatch(key: Key) -> str:
    if not key.dash:
        return with_variables(f'<span class="patch" style="background: {key.colour}"></span>')
    line = f'<path d="M0 6h32" fill="none" stroke-width="2" stroke-dasharray="{_STROKES[key.dash]}"/>'
    paint = f'style="stroke: {key.colour}; fill: {key.colour}"'
    return with_variables(
        f'<svg class="key" viewBox="0 0 32 12" aria-hidden="true" {paint}>{line}{_SHAPES[key.marker]}</svg>'
    )


def _less(summary: Mapping[str, Any]) -> str:
    less = less_text(summary["reduction"])
    return f", {less}{' than full' if less.endswith('less') else ''}" if less else ""
