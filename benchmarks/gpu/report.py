"""The report of `make gpu`: one page as Markdown and as HTML, and the short table that is printed last."""

import html
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from benchmarks.gpu.common import Findings

from detonation.version import __version__

_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


def clocks() -> str:
    """Clocks, power and temperature of the first GPU as nvidia-smi sees them now; "" without it."""
    found = _smi(_QUERY)
    return (
        ", ".join(f"{name} {value}" for name, value in zip(_QUERY.split(","), found, strict=False))
        if found
        else ""
    )


def _smi(query: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return [cell.strip() for cell in done.stdout.strip().split(",")] if done.returncode == 0 else []


def machine(device: str, seen: Sequence[str]) -> dict[str, str]:
    """The machine and its software, by name."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "detonation": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": "CPU",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = f"sm_{properties.major}{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["device"] = f"{torch.cuda.device_count()} x {properties.name}, {capability}, {memory}"
        facts["driver"] = ", ".join(_smi("driver_version")) or "unknown: there is no nvidia-smi"
        facts["CUDA"] = str(torch.version.cuda or torch.version.hip)
        version = getattr(torch.cuda, "nccl", None)
        facts["NCCL"] = ".".join(map(str, version.version())) if version else "none"
        facts["TF32"] = str(torch.backends.cuda.matmul.fp32_precision)
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "none"
    if any(seen):
        facts["clocks after each part"] = "; ".join(dict.fromkeys(each for each in seen if each))
    return facts


def status(found: Findings) -> str:
    if found.failures:
        return f"{len(found.failures)} FAILED"
    return "ok" if found.done else "broke off"


def summary(findings: Mapping[str, Findings], seconds: float, out: Path) -> str:
    """The table that is printed last."""
    rows = [["part", "checks", "", "found"]]
    rows += [[part, str(f.checks), status(f), f.headline] for part, f in findings.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    failures = [f"{part}: {line}" for part, found in findings.items() for line in found.failures]
    return "\n".join([*lines, *failures, f"{seconds:.0f} s; {out / 'report.html'}"])


def write_report(
    out: Path,
    findings: Mapping[str, Findings],
    device: str,
    seen: Sequence[str],
    seconds: float,
    compiled: str = "",
) -> None:
    """Writes report.md and report.html."""
    facts = machine(device, seen) | {"time": f"{seconds:.0f} s"}
    if compiled:
        facts["compiled before the clock"] = compiled
    (out / "report.md").write_text(_markdown(findings, facts))
    (out / "report.html").write_text(_page(findings, facts))


def _markdown(findings: Mapping[str, Findings], facts: Mapping[str, str]) -> str:
    lines = ["# On a GPU" if facts["device"] != "CPU" else "# The GPU check, tried on a CPU", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for part, found in findings.items():
        lines += ["", f"## {found.title} (`{part}`): {status(found)}", "", f"{found.headline}", ""]
        if found.table:
            lines += ["| " + " | ".join(found.columns) + " |", "|" + "---|" * len(found.columns)]
            lines += [
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
                for row in found.table
            ]
        lines += [
            "",
            *(f"- FAILED {line}" for line in found.failures),
            *(f"- {line}" for line in found.notes),
        ]
        lines += (
            [f"- files: {', '.join(f'[{name}]({name})' for name in found.files)}"]
            if found.files
            else []
        )
    return "\n".join(lines) + "\n"


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;
background:#fff}table{border-collapse:collapse;margin:.5rem 0;display:block;overflow-x:auto}td,th{padding:.15rem .7rem;
border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}.bad{color:#b00020}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}td,th{border-color:#444}.bad{color:#ff8a80}}"""


def _page(findings: Mapping[str, Findings], facts: Mapping[str, str]) -> str:
    title = "On a GPU" if facts["device"] != "CPU" else "The GPU check, tried on a CPU"
    body = [f"<h1>{title}</h1>", _table(["", ""], [[name, value] for name, value in facts.items()])]
    for part, found in findings.items():
        body.append(f"<h2>{html.escape(found.title)} (<code>{part}</code>): {status(found)}</h2>")
        body.append(f"<p>{html.escape(found.headline)}</p>")
        if found.table:
            body.append(_table(found.columns, found.table))
        lines = [f'<li class="bad">FAILED {html.escape(line)}</li>' for line in found.failures]
        lines += [f"<li>{html.escape(line)}</li>" for line in found.notes]
        links = (f'<a href="{html.escape(name)}">{html.escape(name)}</a>' for name in found.files)
        lines += [f"<li>files: {', '.join(links)}</li>"] if found.files else []
        body.append(f"<ul>{''.join(lines)}</ul>" if lines else "")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in columns)
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
