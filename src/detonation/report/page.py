"""Writes one self-contained HTML page about one or several runs: no scripts, no fonts, nothing
fetched."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detonation.report.figures import PAPER, charts
from detonation.report.read import Run, read_all
from detonation.report.terminal import RESULTS, results, run_rows
from detonation.whole_files import write_whole

_EXTRA = "report.html was not written: it needs matplotlib, pip install '.[plots]' in a clone"
_MOST_REPLICAS = 16
_TILES = (
    *(
        "validation loss",
        "validation accuracy",
        "BLEU",
        "sent per replica",
        "reduction",
        "throughput",
    ),
    *("waiting", "replicas equal"),
)
"""The numbers of one run that stand at the top of its page."""


@dataclass(frozen=True)
class Grid:
    """A table of the page; the first cell of each row is its header.

    Texts are escaped where the page is made.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page about the runs in `directories` to `out`, or report.html (of one run: there);
    returns its path.

    Raises:
        ValueError: A directory holds no finished run, a file is damaged, or matplotlib is not
            installed.
    """
    if not directories:
        raise ValueError("report needs at least one run directory: detonation report DIR...")
    target = out or (
        directories[0] / "report.html" if len(directories) == 1 else Path("report.html")
    )
    runs = read_all(directories)
    if target.is_dir() or not target.parent.is_dir():
        problem = (
            "is a directory"
            if target.is_dir()
            else f"would be in {target.parent}, which is no directory"
        )
        raise ValueError(f"the page {target} {problem}: choose another --out")
    try:
        text = _page_html(runs)
    except ImportError as error:
        raise ValueError(_EXTRA) from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        names = ", ".join(str(run.directory) for run in runs)
        raise ValueError(
            f"a file of {names} is damaged ({error!r}): restore it, or leave the run out"
        ) from error
    write_whole(target, text.encode())
    return target


def try_write(directories: Sequence[Path], out: Path | None = None) -> str:
    """Calls `write_page` and returns a line with the path of the page, or with the error."""
    try:
        return f"report: {write_page(directories, out)}"
    except (ValueError, OSError) as error:
        return str(error)


def _page_html(runs: Sequence[Run]) -> str:
    first, single = runs[0], len(runs) == 1
    numbers = run_rows(first.summary)
    (loss, costs), rows = charts(runs), results([run.summary for run in runs])
    names = [run.name for run in runs]
    return rendered(
        title=first.name if single else f"{len(runs)} runs",
        subtitle=subtitle(runs),
        runs=runs,
        tiles=[tile(*row) for row in numbers if row[0] in _TILES] if single else [],
        numbers=Grid([], numbers) if single else None,
        results=None
        if single
        else Grid(["", *RESULTS], [[name, *row] for name, row in zip(names, rows, strict=True)]),
        loss=loss,
        costs=costs,
        waits=waits_grid(first.summary.get("waits")) if single else None,
        differing=what_differs(
            names, [run.settings | {"environment": run.environment} for run in runs]
        ),
    )


def tile(label: str, text: str) -> tuple[str, str]:
    """The number of a tile, short enough for one line, and the words under it.

    >>> tile("sent per replica", "32.5 kB per step")
    ('32.5 kB', 'sent per replica and step')
    >>> tile("waiting", "for replica 1, the slowest: 5.0 s (25% of the time of the others); more")
    ('25%', 'of the time waiting for replica 1')
    >>> tile("waiting", "for the network 0.5 s; in 20.0 s of steps since the last start")
    ('0.5 s', 'waiting for the network')
    >>> tile("replicas equal", "yes, bitwise"), tile("reduction", "x72.7")
    (('yes', 'replicas equal, bitwise'), ('x72.7', 'reduction'))
    >>> tile("throughput", "123,456 tokens/s, 320.0 examples/s")
    ('123,456', 'tokens/s, 320.0 examples/s')
    """
    if found := _SLOWEST.match(text):
        return found["share"], f"of the time waiting for {found['replica']}"
    if found := _NETWORK.match(text):
        return found["seconds"], "waiting for the network"
    if label == "throughput":
        number, _, unit = text.partition(" ")
        return number, unit
    text, per_step, _ = text.partition(" per step")
    number, comma, rest = text.partition(", ")
    return number, label + (" and step" if per_step else "") + comma + rest


_SLOWEST = re.compile(r"for (?P<replica>replica \d+), the slowest: .*\((?P<share>\d+%)")
_NETWORK = re.compile(r"for the network (?P<seconds>[\d.,]+ s)")


def rendered(**values: Any) -> str:
    """page.html, filled in with `values`; a part of the page without its value is left out."""
    from jinja2 import Environment

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text).render(paper=PAPER, **values)


def subtitle(runs: Sequence[Run]) -> str:
    """The settings that all runs share, in one line."""
    first, summaries = runs[0].summary, [run.summary for run in runs]
    meshes = [run.settings.get("mesh") for run in runs]
    links = {str(mesh.get("link", "")) if isinstance(mesh, dict) else "" for mesh in meshes}
    link = links.pop() if len(links) == 1 else ""
    same = {key for key in first if all(summary.get(key) == first[key] for summary in summaries)}
    parts = [
        f"{first['model']}, {first['num_parameters']:,} parameters"
        if {"model", "num_parameters"} <= same
        else "",
        f"on {first['data']}" if "data" in same else "",
        f"{first['replicas']} replicas x {first['shards']} shards"
        if {"replicas", "shards"} <= same
        else "",
        f"{first['steps']:,} steps" if "steps" in same else "",
        f"over an emulated link of {link}" if link else "",
        "virtual replicas in one process" if first.get("simulated") and "simulated" in same else "",
    ]
    return " · ".join(part for part in parts if part)


def waits_grid(found: Mapping[str, Any] | None) -> Grid | None:
    """The seconds that each replica waited for each other one, and for the network."""
    if not found or len(found["seconds"]) > _MOST_REPLICAS:
        return None
    # Spaces that do not break keep a row in one line on a phone, where the table scrolls.
    head = [
        "waited",
        *(f"for replica\xa0{replica}" for replica in range(len(found["seconds"]))),
        "for the network",
    ]
    rows = [
        (*row, network) for row, network in zip(found["seconds"], found["network_s"], strict=True)
    ]
    return Grid(
        head,
        [
            [f"replica\xa0{i}", *(f"{seconds:.1f} s" for seconds in row)]
            for i, row in enumerate(rows)
        ],
    )


def what_differs(names: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> Grid:
    """The entries that differ between `tables`, one column per table."""
    flats = [flattened(table) for table in tables]
    every = dict.fromkeys(key for flat in flats for key in flat)
    differing = [key for key in every if len({flat.get(key) for flat in flats}) > 1]
    return Grid(["", *names], [[key, *(flat.get(key, "-") for flat in flats)] for key in differing])


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Joins nested tables into one with dotted keys; values become text.

    >>> flattened({"seed": 0, "scheme": {"name": "demo"}, "gpus": []})
    {'seed': '0', 'scheme.name': 'demo', 'gpus': 'none'}
    """
    entries: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        entries |= (
            flattened(value, f"{before}{key}.")
            if isinstance(value, Mapping)
            else {before + key: _text(value)}
        )
    return entries


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        "none"
        if value in (None, [])
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
