"""Writes one self-contained HTML page about one or several runs: no scripts, no fonts, nothing fetched."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from detonation.report.figures import NIGHT, PAPER, Chart, charts, keys, variables
from detonation.report.read import FILES, Run, agreeing_s, read_all, read_plan
from detonation.report.terminal import MORE_HEADS, named, plan_rows, plan_words, run_rows
from detonation.report.words import duration, equality, factor, less_text, loss_text, size_text
from detonation.whole_files import write_whole

_FIGURES = "-figures"
_EXTRA = "report.html was not written: it needs matplotlib, pip install 'detonation-torch[plots]'"
_PLAN_ROWS = 10
_MOST_REPLICAS = 16


@dataclass(frozen=True)
class ReportPage:
    """The path of a written page, and of the PNG of each figure."""

    page: Path
    pictures: list[Path]


@dataclass(frozen=True)
class Grid:
    """A table of the page; the first cell of each row is its header. Texts are escaped where the page is made."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(directories: Sequence[Path], out: Path | None = None, plan: Path | None = None) -> ReportPage:
    """Writes the page about the runs in `directories`, and beside it a directory with a PNG of each figure.

    Args:
        directories: Run directories. Figure directories of an earlier page are skipped, so that `compared/*/` works.
        out: The page; by default report.html, in the run's directory where there is one run.
        plan: A file with the output of `detonation plan --json`, to be shown on the page.

    Raises:
        ValueError: A directory holds no finished run, a file is damaged, or matplotlib is not installed.
    """
    directories = [directory for directory in directories if not _beside_a_page(directory)]
    if not directories:
        raise ValueError("report needs at least one run directory: detonation report DIR...")
    target = out or (directories[0] / "report.html" if len(directories) == 1 else Path("report.html"))
    runs, planned = read_all(directories), read_plan(plan) if plan else None
    if target.is_dir() or not target.parent.is_dir():
        problem = "is a directory" if target.is_dir() else f"would be in {target.parent}, which is no directory"
        raise ValueError(f"the page {target} {problem}: choose another --out")
    folder = target.with_name(target.stem + _FIGURES)
    try:
        loss, costs = charts(runs)
        text = _page_html(runs, loss, costs, target, folder, planned)
        images = {f"{chart.name}.png": chart.png() for chart in (*loss, *costs)}
    except ImportError as error:
        raise ValueError(_EXTRA) from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        names = ", ".join(str(run.directory) for run in runs)
        raise ValueError(f"a file of {names} is damaged ({error!r}): restore it, or leave the run out") from error
    folder.mkdir(exist_ok=True)
    for name, content in images.items():
        write_whole(folder / name, content)
    write_whole(target, text.encode())
    return ReportPage(target, [folder / name for name in images])


def _beside_a_page(directory: Path) -> bool:
    """True for the figure directory of an earlier page."""
    return directory.name.endswith(_FIGURES) and Path(f"{str(directory).removesuffix(_FIGURES)}.html").is_file()


def try_write(directories: Sequence[Path], out: Path | None = None) -> str:
    """Calls `write_page` and returns a line with the path of the page, or with the error."""
    try:
        return f"report: {write_page(directories, out).page}"
    except (ValueError, OSError) as error:
        return str(error)


def _page_html(
    runs: Sequence[Run],
    loss: Sequence[Chart],
    costs: Sequence[Chart],
    target: Path,
    folder: Path,
    plan: Mapping[str, Any] | None,
) -> str:
    """The page for `target`, with the PNGs in `folder`: page.html, filled in."""
    from markupsafe import Markup

    first, single = runs[0], len(runs) == 1
    names = [Markup('<span class="name">{}<span>{}</span></span>').format(Markup(key.svg()), run.name)
             for run, key in zip(runs, keys(runs), strict=True)]  # fmt: skip
    machines = [run.environment for run in runs]
    here = machines[0]
    short = [f"torch {here.get('packages', {}).get('torch')}", here.get("platform"), *here.get("gpus", [])[:1]]
    values = {
        "title": first.name if single else f"{len(runs)} runs",
        "subtitle": subtitle(runs),
        "runs": runs,
        "tiles": tiles(first) if single else [],
        "numbers": Grid([], run_rows(first.summary)) if single else None,
        "results": None if single else _results(runs, names),
        "loss": loss, "costs": costs, "folder": _address(Path(folder.name)),
        "waits": waits_grid(first.summary.get("waits")) if single else None,
        "plans": _plans(runs, plan),
        "settings": what_differs(names, [run.settings for run in runs]),
        "machine": ", ".join(str(word) for word in short if word) if any(machines) else "",
        "elsewhere": what_differs(names, machines), "everywhere": in_common(machines),
        "files": _files(runs, target),
    }  # fmt: skip
    return rendered(**values)


def rendered(**values: Any) -> str:
    """page.html, filled in with `values`; a part of the page without its value is left out."""
    from jinja2 import Environment

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    colours = {"paper": PAPER, "night": NIGHT, "light": variables(dark=False), "dark": variables(dark=True)}
    return environment.from_string(text).render(colours | values)


def subtitle(runs: Sequence[Run]) -> str:
    """The settings that all runs share, in one line."""
    first, summaries = runs[0].summary, [run.summary for run in runs]
    meshes = [run.settings.get("mesh") for run in runs]
    links = {str(mesh.get("link", "")) if isinstance(mesh, dict) else "" for mesh in meshes}
    link = links.pop() if len(links) == 1 else ""
    same = {key for key in first if all(summary.get(key) == first[key] for summary in summaries)}
    parts = [
        f"{first['model']}, {first['num_parameters']:,} parameters" if {"model", "num_parameters"} <= same else "",
        f"on {first['data']}" if "data" in same else "",
        f"{first['replicas']} replicas x {first['shards']} shards" if {"replicas", "shards"} <= same else "",
        f"{first['steps']:,} steps" if "steps" in same else "",
        f"over an emulated link of {link}" if link else "",
        "virtual replicas in one process" if first.get("simulated") and "simulated" in same else "",
    ]
    return " · ".join(part for part in parts if part)


def tiles(run: Run) -> list[tuple[str, str]]:
    """The main results of one run, each with its label."""
    summary = run.summary
    waited = sum(record["waited_s"] + agreeing_s(record) for record in run.records) if run.timed else None
    less = less_text(summary["reduction"])
    unit = "tokens" if "tokens_per_second" in summary else "examples"
    sent = f"sent per step{f', {less}' if less else ''}{' than full' if less.endswith('less') else ''}"
    return [
        (loss_text(summary["val_loss"]), "validation loss"),
        *([(f"{summary['val_accuracy']:.1%}", "validation accuracy")] if "val_accuracy" in summary else []),
        *([(f"{summary['val_bleu']:.2f}", "BLEU")] if "val_bleu" in summary else []),
        (size_text(summary["bytes_sent_per_step"]), sent),
        (duration(summary["seconds"] / summary["steps"]), "per step, on average"),
        *([(f"{waited / summary['seconds']:.1%}", "of the time waiting for others")] if waited is not None else []),
        (f"{summary[f'{unit}_per_second']:,.4g}", f"{unit} per second"),
        (equality(summary, "equal bit for bit", "not equal"), "replicas at the end"),
    ]


def _results(runs: Sequence[Run], names: Sequence[str]) -> Grid:
    """One row per run, results first."""
    accurate = any("val_accuracy" in run.summary for run in runs)
    rows = []
    for run, name in zip(runs, names, strict=True):
        summary = run.summary
        cells = {
            "": name,
            "validation loss": loss_text(summary["val_loss"]),
            "accuracy": f"{summary['val_accuracy']:.1%}" if "val_accuracy" in summary else "-",
            "sent per step": size_text(summary["bytes_sent_per_step"]),
            "less than full": factor(summary["reduction"]),
            "step time": duration(summary["seconds"] / summary["steps"]),
            "examples/s": f"{summary['examples_per_second']:,.4g}",
            "replicas equal": equality(summary),
            "scheme, optimizer": f"{summary['scheme']}, {summary['optimizer']}",
        }
        rows.append({head: cell for head, cell in cells.items() if accurate or head != "accuracy"})
    return Grid([*rows[0]], [[*row.values()] for row in rows])


def waits_grid(found: Mapping[str, Any] | None) -> Grid | None:
    """The seconds that each replica waited for each other one, and for the network."""
    if not found or len(found["seconds"]) > _MOST_REPLICAS:
        return None
    # Spaces that do not break keep a row in one line on a phone, where the table scrolls.
    head = ["waited", *(f"for replica\xa0{replica}" for replica in range(len(found["seconds"]))), "for the network"]
    rows = [(*row, network) for row, network in zip(found["seconds"], found["network_s"], strict=True)]
    return Grid(head, [[f"replica\xa0{i}", *(f"{seconds:.1f} s" for seconds in row)] for i, row in enumerate(rows)])


def _plans(runs: Sequence[Run], given: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The `given` plan and the plans that chose the schemes of `runs`, each once; first the scheme that was chosen."""
    shown: list[tuple[str, Mapping[str, Any]]] = [("", given)] if given else []
    for run in runs:
        if run.plan is not None and run.plan not in [plan for _, plan in shown]:
            shown.append((run.name if len(runs) > 1 else "", run.plan))
    pages = []
    for name, plan in shown:
        chosen = named(plan.get("chosen", plan["first"]))
        ranked = sorted(plan_rows(plan), key=lambda row, chosen=chosen: row[0] != chosen)  # type: ignore[misc]
        why = [f"Chosen by this plan: {plan['why']}"] if "why" in plan else []
        parts = {"top": Grid(MORE_HEADS, ranked[:_PLAN_ROWS]), "rest": Grid(MORE_HEADS, ranked[_PLAN_ROWS:])}
        pages.append({"name": name, "chosen": chosen, "words": [*why, *plan_words(plan)], **parts})
    return pages


def what_differs(names: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> Grid:
    """The entries that differ between `tables`, one column per table."""
    flats = [flattened(table) for table in tables]
    every = dict.fromkeys(key for flat in flats for key in flat)
    differing = [key for key in every if len({flat.get(key) for flat in flats}) > 1]
    return Grid(["", *names], [[key, *(flat.get(key, "-") for flat in flats)] for key in differing])


def in_common(tables: Sequence[Mapping[str, Any]]) -> Grid:
    """The entries that are equal in all `tables`."""
    first, *others = [flattened(table) for table in tables]
    return Grid([], [(key, text) for key, text in first.items() if all(other.get(key) == text for other in others)])


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Joins nested tables into one with dotted keys; values become text.

    >>> flattened({"seed": 0, "scheme": {"name": "demo"}, "gpus": []})
    {'seed': '0', 'scheme.name': 'demo', 'gpus': 'none'}
    """
    entries: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        entries |= flattened(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: _text(value)}
    return entries


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, []) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _files(runs: Sequence[Run], target: Path) -> list[tuple[str, dict[str, str]]]:
    """The files of each run with their addresses, relative to the page."""

    def addresses(directory: Path) -> dict[str, str]:
        folder = Path(os.path.relpath(directory, target.resolve().parent))
        return {name: _address(folder / name) for name in FILES if (directory / name).is_file()}

    return [(run.name, addresses(run.directory)) for run in runs]


def _address(path: Path) -> str:
    """A relative path as a link; the name of a directory may have bytes that are no text."""
    return quote(path.as_posix(), errors="surrogateescape")
