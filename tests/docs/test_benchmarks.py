"""Each command of a benchmark in a page can be started, and benchmarks/README.md has all of them."""

import os
import re
import subprocess
import sys

import pytest
from pages import ROOT

COMMAND = re.compile(r"-m\s+(benchmarks(?:\.\w+)+)")
PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *(page for page in sorted(ROOT.glob("research/*.md")) if page.name != "log.md"),
    *sorted(ROOT.glob(".github/workflows/*.yml")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "Makefile")),
]
"""The log tells what was run, and may name what has gone since."""
TABLE = ROOT / "benchmarks/README.md"
PARTS = {
    "benchmarks.accelerator.direct_launches",
    "benchmarks.gpu.compiling",
    "benchmarks.gpu.one_kernel",
    "benchmarks.gpu.ranks",
    "benchmarks.gpu.seals",
    "benchmarks.lab.packet_relay",
}
"""Processes that tests or other benchmarks start: no question of their own."""
HELPS = """
import os, runpy, sys, torch
import detonation.train.verbs.simulate
for name in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.argv[1:] = ["--help"]
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)  # at once: the end of torch takes a second
        os._exit(99)  # whoever has no --help has worked instead
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def commands(text):
    return set(COMMAND.findall(text))


def programs():
    """The modules that can be started, as `python -m` names them."""
    found = set()
    for path in ROOT.glob("benchmarks/**/*.py"):
        if '\nif __name__ == "__main__":\n' in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.add(".".join(parts).removesuffix(".__main__"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_benchmark_that_a_page_names_is_one(page):
    text = page.read_text()
    assert commands(text) <= programs()
    named = re.findall(r"\bbenchmarks/\w[\w/]*\.py", text)
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert not re.search(r"python3?\s+benchmarks/", text), "python -m benchmarks.NAME"


def test_the_table_of_benchmarks_has_each_of_them():
    assert commands(TABLE.read_text()) == programs() - PARTS


def test_each_benchmark_says_what_it_takes():
    """In a process each, forked from one that has imported torch."""
    asked = sorted(programs() - PARTS)
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *filter(None, found)])
    done = subprocess.run(
        [sys.executable, "-c", HELPS, *asked],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    ended = re.findall(r"^(benchmarks\.[\w.]+) (-?\d+)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in ended] == asked, done.stderr[-2000:]
    assert [name for name, code in ended if code != "0"] == [], done.stderr[-2000:]
