"""What a newcomer meets first, in figures: words, seconds until a command answers, and screens of help.

    python -m benchmarks.door [--train] [--strict]

Prints each figure with its goal, and `over` where it misses it; `--strict` exits with 1 then. Seconds are medians of
five starts, those of the processor, to which goals are held, and those of the clock, which a busy machine stretches.
`--train` also clones the repository into a temporary directory and times `make train` there, from a torch that is
installed to the first step; pip may download what training needs. Each command runs in this Python and on the sources
beside this file.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTS = 5
LINES, COLUMNS = 40, 100
COMMAND = (sys.executable, "-m", "detonation")
PLAN = (
    "plan",
    "--parameters",
    "1.2b",
    "--replicas",
    "16",
    "--link",
    "100mbit,20ms",
    "--step-time",
    "0.35",
)
# Byte code is written and read, as it is for what pip has installed.
ENVIRONMENT = {
    **os.environ,
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPATH": str(ROOT / "src"),
    "COLUMNS": str(COLUMNS),
    "PYTHONIOENCODING": "utf-8",
}


@dataclass(frozen=True)
class Figure:
    """One line. most: The goal; None for a figure without one. note: Is printed, and not held to anything."""

    name: str
    value: float
    unit: str
    most: float | None = None
    note: str = ""

    @property
    def over(self) -> bool:
        return self.most is not None and self.value > self.most

    def __str__(self) -> str:
        goal = "" if self.most is None else f"at most {self.most:g}"
        places = {"s": 2, "min": 1}.get(self.unit, 0)
        shown = f"{self.value:,.{places}f}"
        return f"{self.name:34} {shown:>8} {self.unit:7} {goal:13} {'over ' if self.over else ''}{self.note}".rstrip()


def started(*command: str) -> tuple[str, float, float]:
    """What a command prints, and the medians of its seconds: of the processor, and of the clock."""
    used, lasted, text = [], [], ""
    for _ in range(STARTS):
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT
        )
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ends with {process.returncode}")
        lasted.append(time.perf_counter() - began)
        used.append(usage.ru_utime + usage.ru_stime)
    return text, statistics.median(used), statistics.median(lasted)


def timed(name: str, most: float, *command: str) -> Figure:
    _, used, lasted = started(*command)
    return Figure(name, used, "s", most, f"({lasted:.2f} s by the clock)")


def helped(verb: Sequence[str]) -> list[Figure]:
    """The help of the command or of one verb: its seconds and its screen."""
    text, used, lasted = started(*COMMAND, *verb, "--help")
    lines, name = text.splitlines(), " ".join(["detonation", *verb, "--help"])
    screen = f"{max(map(len, lines))} columns of {COLUMNS}"
    wide = max(map(len, lines)) > COLUMNS
    return [
        Figure(name, used, "s", 0.3, f"({lasted:.2f} s by the clock)"),
        Figure(
            "",
            len(lines),
            "lines",
            LINES - 1 if wide and len(lines) >= LINES else LINES,
            screen + " over" * wide,
        ),
    ]


def words() -> list[Figure]:
    pages = {*ROOT.glob("docs/**/*.md")} - {
        ROOT / "docs/recipe-reference.md"
    }  # a program writes that one
    every = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    readme = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    return [
        Figure("README", readme, "words"),
        Figure("docs, without the recipe reference", every, "words"),
    ]


def suite() -> list[Figure]:
    """The tests of `make test` as `tests/branches.py` measured them last; two cores take half of the seconds."""
    found = json.loads((ROOT / "benchmarks/results/suite.json").read_text(encoding="utf-8"))
    half, (taken, all_of_them), passed = (
        found["processor_s"] / 2 / 60,
        found["core"],
        f"{found['tests']:,} tests",
    )
    when = f"{passed} on {found['date']}; {found['clock_s'] / 60:.1f} by the clock under a load of {found['busy']}"
    return [
        Figure("make test on two idle cores", half, "min", note=f"wanted 6; {when}"),
        Figure("branches of the core that it takes", taken, "", note=f"of {all_of_them:,}"),
    ]


def first_step() -> Figure:
    """Seconds from `make train` to its first step in a fresh clone, where torch is there from the start."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(clone)], check=True)
        began, spent = time.perf_counter(), os.times()
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        made = ["make", "train", f"PYTHON={sys.executable}"]
        process = subprocess.Popen(
            made, cwd=clone, env=plain, stdout=subprocess.DEVNULL, start_new_session=True
        )
        while process.poll() is None and not any(
            file.stat().st_size for file in clone.glob("runs/*/metrics.jsonl")
        ):
            time.sleep(0.05)
        lasted = time.perf_counter() - began
        if process.poll() is not None:
            raise SystemExit("make train ended before its first step")
        os.killpg(process.pid, 2)  # as Ctrl-C does
        process.wait()
    used = sum(os.times()[2:4]) - sum(spent[2:4])
    return Figure(
        "make train to its first step",
        lasted,
        "s",
        60,
        f"by the clock, torch is there; {used:.0f} s of processors",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.door", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--train", action="store_true", help="time make train in a temporary clone, too"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a goal is missed")
    arguments = parser.parse_args()
    verbs = re.search(r"\{([a-z,]+)\}", started(*COMMAND, "--help")[0])
    assert verbs is not None
    figures = [*words(), timed("import detonation", 0.1, sys.executable, "-c", "import detonation")]
    for verb in ((), *((name,) for name in verbs.group(1).split(","))):
        figures += helped(verb)
    figures += [timed("detonation plan ...", 1.0, *COMMAND, *PLAN), *suite()]
    figures += [first_step()] if arguments.train else []
    for figure in figures:
        print(figure)
    return int(arguments.strict and any(figure.over for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
