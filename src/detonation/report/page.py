"""Makes HTML pages about one or several runs. `try_write` writes a page to a single file without a
script. While a run trains, a server shows a page with a script that reloads the content.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from detonation.report.figures import PAPER, charts
from detonation.report.read import (
    FILES,
    Run,
    agreeing_s,
    is_unfinished,
    read_all,
    read_begun,
    records,
)
from detonation.report.terminal import RESULTS, results, run_rows
from detonation.report.words import duration, loss_text, size_text
from detonation.whole_files import write_whole

_EXTRA = "report.html was not written: it needs matplotlib, pip install '.[plots]' in a clone"
_MOST_REPLICAS = 16
_LATEST = 20
_TILES = (
    "validation loss",
    "validation accuracy",
    "BLEU",
    "sent per replica",
    "reduction",
    "throughput",
    "waiting",
    "replicas equal",
)
"""Labels of the numbers at the top of the page of a single run."""


@dataclass(frozen=True)
class Grid:
    """A table of the page. The first cell of each row is the header of the row. `rendered` escapes
    the texts.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Writes a page about the runs in `directories`; returns the path of the page.

    If there is only one run, this run may be unfinished. The page of an unfinished run shows its
    steps so far.

    Args:
        out: Path of the page. By default it is report.html in the directory of a single run, or in
            the current directory for several runs.

    Raises:
        ValueError: A directory holds no run, one of several is not finished, a file is damaged, or
            matplotlib is not installed.
    """
    if not directories:
        raise ValueError("report needs at least one run directory: detonation report DIR...")
    target = Path("report.html")
    if out is not None:
        target = out
    elif len(directories) == 1:
        target = directories[0] / target
    runs = []
    is_begun = len(directories) == 1 and is_unfinished(directories[0])
    if not is_begun:
        runs = read_all(directories)
    problem = ""
    if target.is_dir():
        problem = "is a directory"
    elif not target.parent.is_dir():
        problem = f"would be in {target.parent}, which is no directory"
    if problem:
        raise ValueError(f"the page {target} {problem}: choose another --out")
    try:
        if is_begun:
            text = html_of_begun(directories[0], "not finished")
        else:
            text = _page_html(runs)
    except ImportError as error:
        raise ValueError(_EXTRA) from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        names = ", ".join(map(str, directories))
        raise ValueError(
            f"a file of {names} is damaged ({error!r}): restore it, or leave the run out"
        ) from error
    write_whole(target, text.encode())
    return target


def try_write(directories: Sequence[Path], out: Path | None = None) -> str:
    """Calls `write_page`. Returns a line with the path of the page, or with the error."""
    try:
        return f"report: {write_page(directories, out)}"
    except (ValueError, OSError) as error:
        return str(error)


def _page_html(runs: Sequence[Run]) -> str:
    loss, costs = charts(runs)
    names = [run.name for run in runs]
    tables = [run.settings | {"environment": run.environment} for run in runs]
    if len(runs) == 1:
        parts = _parts_of_one(runs[0])
    else:
        rows = zip(names, results([run.summary for run in runs]), strict=True)
        parts = {
            "title": f"{len(runs)} runs",
            "tiles": [],
            "results": Grid(["", *RESULTS], [[name, *row] for name, row in rows]),
        }
    return rendered(
        **parts,
        subtitle=subtitle(runs),
        runs=runs,
        loss=loss,
        costs=costs,
        differing=what_differs(names, tables),
    )


def _parts_of_one(run: Run) -> dict[str, Any]:
    """Returns the parts of the page that only the page of a single run has."""
    numbers = run_rows(run.summary)
    return {
        "title": run.name,
        "tiles": [tile(*row) for row in numbers if row[0] in _TILES],
        "numbers": Grid([], numbers),
        "waits": waits_grid(run.summary.get("waits")),
    }


def html_of_begun(directory: Path, state: str, live: bool = False) -> str:
    """Returns the page about a run that has no summary yet.

    Args:
        state: State of the run in words, for the subtitle.
        live: True if the page must reload itself while the run trains.
    """
    run = read_begun(directory)
    levels = run.settings["scheme"]
    if not isinstance(levels, list):
        levels = [levels]
    scheme = "+".join(level["name"] for level in levels)
    page = {
        "title": run.name,
        "subtitle": f"{scheme} {subtitle([run])} · {state}",
        "runs": [run],
        "live": live,
    }
    if not (directory / FILES[0]).stat().st_size:
        return rendered(**page, tiles=[("0", "steps: the first step includes the set-up")])
    run = replace(run, records=records(directory / FILES[0]))
    loss, costs = charts([run])
    waits = next((record["waits"] for record in reversed(run.records) if "waits" in record), None)
    return rendered(**page, tiles=progress(run), loss=loss, costs=costs, waits=waits_grid(waits))


def progress(run: Run) -> list[tuple[str, str]]:
    """Returns the progress of a run in training, as numbers with labels."""
    steps = run.summary["steps"]
    done = run.records[-1]["step"]
    latest = run.records[-_LATEST:]
    step_s = fmean(record["seconds"] for record in latest)
    loss = fmean(record["loss"] for record in latest)
    sent = run.bytes_so_far()[-1]
    waited = sum(record.get("waited_s", 0.0) + agreeing_s(record) for record in run.records)
    return [
        (f"{done:,} of {steps:,}", "steps"),
        (loss_text(loss), "training loss, mean of the last steps"),
        *((loss_text(loss), "validation loss") for _, loss in run.validations()[-1:]),
        (size_text(sent / len(run.records)), "sent per step by a replica, on average"),
        (size_text(sent), "sent by a replica so far"),
        (duration(step_s), "per step"),
        (f"{waited / run.seconds_so_far()[-1]:.1%}", "of the time waiting for others"),
        (duration(step_s * (steps - done)), "left"),
    ]


def tile(label: str, text: str) -> tuple[str, str]:
    """Returns the number on a tile of the page, short enough for one line, and the caption below
    this number.

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
    if per_step:
        label += " and step"
    return number, label + comma + rest


_SLOWEST = re.compile(r"for (?P<replica>replica \d+), the slowest: .*\((?P<share>\d+%)")
_NETWORK = re.compile(r"for the network (?P<seconds>[\d.,]+ s)")


def rendered(**values: Any) -> str:
    """Fills page.html with `values`. Leaves out each part of the page for which there are no
    values.
    """
    from jinja2 import Environment

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text).render(paper=PAPER, **values)


def subtitle(runs: Sequence[Run]) -> str:
    """Returns the settings that all runs share, in one line of text."""
    first = runs[0].summary
    same = {key for key in first if all(run.summary.get(key) == first[key] for run in runs)}
    links = {_link(run) for run in runs}
    parts = []
    if {"model", "num_parameters"} <= same:
        parts.append(f"{first['model']}, {first['num_parameters']:,} parameters")
    if "data" in same:
        parts.append(f"on {first['data']}")
    if {"replicas", "shards"} <= same:
        parts.append(f"{first['replicas']} replicas x {first['shards']} shards")
    if "steps" in same:
        parts.append(f"{first['steps']:,} steps")
    if len(links) == 1 and links != {""}:
        parts.append(f"over an emulated link of {links.pop()}")
    if first.get("simulated") and "simulated" in same:
        parts.append("virtual replicas in one process")
    return " · ".join(parts)


def _link(run: Run) -> str:
    mesh = run.settings.get("mesh")
    if isinstance(mesh, dict):
        return str(mesh.get("link", ""))
    return ""


def waits_grid(found: Mapping[str, Any] | None) -> Grid | None:
    """Returns a table of the seconds that each replica waited for each other replica and for the
    network; None if nothing was measured.
    """
    if not found or len(found["seconds"]) > _MOST_REPLICAS:
        return None
    # On a phone, the table scrolls. Non-breaking spaces keep the text of a cell on one line.
    replicas = [f"replica\xa0{number}" for number in range(len(found["seconds"]))]
    head = ["waited", *(f"for {name}" for name in replicas), "for the network"]
    rows = []
    for name, row, network in zip(replicas, found["seconds"], found["network_s"], strict=True):
        rows.append([name, *(f"{seconds:.1f} s" for seconds in (*row, network))])
    return Grid(head, rows)


def what_differs(names: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> Grid:
    """Returns a table of the entries that differ between `tables`, with one column per table."""
    flats = [flattened(table) for table in tables]
    every = dict.fromkeys(key for flat in flats for key in flat)
    differing = [key for key in every if len({flat.get(key) for flat in flats}) > 1]
    rows = [[key, *(flat.get(key, "-") for flat in flats)] for key in differing]
    return Grid(["", *names], rows)


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Joins nested tables into one table with dotted keys. Values become text.

    >>> flattened({"seed": 0, "scheme": {"name": "demo"}, "gpus": []})
    {'seed': '0', 'scheme.name': 'demo', 'gpus': 'none'}
    """
    entries: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            entries |= flattened(value, f"{before}{key}.")
        else:
            entries[before + key] = _text(value)
    return entries


def _text(value: Any) -> str:
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if value in (None, []):
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
