"""Writes one self-contained HTML page about one or several runs: no scripts, no fonts, nothing fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from detonation.report.figures.charts import charts
from detonation.report.figures.colours import NIGHT, PAPER, variables
from detonation.report.figures.drawing import Chart
from detonation.report.html.sections import configurations, environments, figures, plans, raw, runs_table, tiles, waits
from detonation.report.read import Run, read_all, read_plan
from detonation.whole_files import write_whole

_FIGURES = "-figures"
_EXTRA = "report.html was not written: it needs matplotlib, pip install 'detonation-torch[plots]'"

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --page: $paper; --ink: #1a1c20; --quiet: #5b626c; --line: #dfe2e7; --card: #fafbfc;
        --link: #1858b0; --shade: #0002; $light }
@media (prefers-color-scheme: dark) { :root { --page: $night; --ink: #e7e9ec; --quiet: #a2a9b3; --line: #33373e;
        --card: #1d2025; --link: #7db7ff; --shade: #000a; $dark } }
$css</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="quiet">$subtitle</p>
</header>
<main>
$body
</main>
</body>
</html>
""")


@dataclass(frozen=True)
class ReportPage:
    """The path of a written page, and of the PNG of each figure."""

    page: Path
    pictures: list[Path]


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
        drawn = charts(runs)
        text = page_html(runs, drawn, target, folder, planned)
        images = {f"{chart.name}.png": chart.png() for chart in (*drawn[0], *drawn[1])}
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


def page_html(
    runs: Sequence[Run],
    drawn: tuple[Sequence[Chart], Sequence[Chart]],
    target: Path,
    folder: Path,
    plan: dict[str, object] | None = None,
) -> str:
    """Formats the page for `target`, with the PNGs in `folder`."""
    loss, costs = drawn
    single = len(runs) == 1
    sections = [
        tiles(runs[0]) if single else runs_table(runs),
        _section("Loss", figures(loss, folder, runs)),
        _section("Cost per step", figures(costs, folder)),
        _section("Who waits for whom", waits(runs[0]) if single else ""),
        _section("The plan", plans(runs, plan)),
        _section("Configuration" if single else "What differs", configurations(runs)),
        _section("Environment", environments(runs)),
        _section("Raw data", raw(runs, target)),
    ]
    return _PAGE.substitute(
        title=escape(runs[0].name if single else f"{len(runs)} runs"),
        subtitle=escape(_subtitle(runs)),
        body="\n".join(section for section in sections if section),
        css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
        paper=PAPER,
        night=NIGHT,
        light=variables(dark=False),
        dark=variables(dark=True),
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def _subtitle(runs: Sequence[Run]) -> str:
    """The settings that all runs share, in one line."""
    summaries = [run.summary for run in runs]
    first = summaries[0]
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
