"""One self-contained HTML page about one run or several: no scripts, no fonts, nothing fetched."""

import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from detonation.report.figures import against_bytes, against_seconds, against_steps, breakdown
from detonation.report.read import Run, read
from detonation.report.table import rows

_EXTRA = "report.html was not written: it needs matplotlib, pip install 'detonation-torch[plots]'"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
       background: #fff; color: #1a1a1a; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; }}
pre {{ overflow-x: auto; padding: .8rem; background: #8882; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #e6e6e6; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="wide">{table}</div>
<h2>Loss against steps</h2>
{steps}
<h2>Loss against bytes sent</h2>
{sent}
<h2>Loss against time</h2>
{seconds}
{parts}
<h2>Configuration</h2>
{configs}
</body>
</html>
"""


def write(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page about the runs in `directories`, and returns where.

    Raises `ValueError` when one of them holds no finished run, or when matplotlib is not installed.
    """
    if not directories:
        raise ValueError("report needs at least one run directory")
    target = out or (directories[0] / "report.html" if len(directories) == 1 else Path("report.html"))
    runs = [read(directory) for directory in directories]
    try:
        text = page(runs)
    except ImportError as error:
        raise ValueError(_EXTRA) from error
    part = target.with_name(target.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)
    return target


def try_write(directories: Sequence[Path], out: Path | None = None) -> str:
    """As `write`, but what stands in its way does not matter: returns a line that says where it is, or why not."""
    try:
        return f"report: {write(directories, out)}"
    except (ValueError, OSError) as error:
        return str(error)


def page(runs: Sequence[Run]) -> str:
    """The page as HTML."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = breakdown(runs)
    return _PAGE.format(
        title=escape(title),
        table=_table(runs),
        steps=against_steps(runs),
        sent=against_bytes(runs) or "<p>Nothing was sent.</p>",
        seconds=against_seconds(runs),
        parts=f"<h2>Where a step's time goes</h2>\n{parts}" if parts else "",
        configs=_differences(runs) + "\n".join(_config(run) for run in runs),
    )


def _table(runs: Sequence[Run]) -> str:
    columns = [dict(rows(run.summary)) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    head = "<tr><th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>" if len(runs) > 1 else ""
    cells = [(label, [escape(column.get(label, "-")) for column in columns]) for label in labels]
    body = "".join(f"<tr><th>{label}</th>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for label, row in cells)
    return f"<table>\n{head}{body}</table>"


def _differences(runs: Sequence[Run]) -> str:
    """What the configurations do not have in common, side by side."""
    if len(runs) == 1:
        return ""
    flat = [_flat(tomllib.loads(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(k for one in flat for k in one) if len({one.get(key) for one in flat}) > 1]
    head = "<tr><th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"
    rows = [(key, [escape(one.get(key, "-")) for one in flat]) for key in keys]
    body = "".join(f"<tr><th>{escape(k)}</th>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for k, row in rows)
    return f'<p>What differs:</p>\n<div class="wide"><table>\n{head}{body}</table></div>\n'


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: str(value)}
    return found


def _config(run: Run) -> str:
    summary = f"{escape(run.name)}, whole"
    return f"<details><summary>{summary}</summary>\n<pre>{escape(run.config)}</pre></details>"
