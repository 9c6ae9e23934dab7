"""Runs the tests of `make test` on a clone whose branches are marked: which do they take, and what does it cost?

python tests/branches.py [--out benchmarks/results/suite.json] [--map FILE] [--processes N] [arguments of pytest ...]

A branch is the body of a function, an `if`, an `else` (also one that is not written), a loop, its end, a handler or a
case. Forks and other interpreters write to the same marks. It prints the tests, the seconds of the processor and of the
clock, and the branches of the core and of the package; `benchmarks/door` prints them again from `--out`. `--map` is
for questions about single tests, one line of JSON for each: its name, the seconds of processors, ranks and commands
included, and those of the clock, and its branches; `tests/mutants.py` reads it. Where several tests look at one
training, the first has its seconds and branches.
`tests/layers` is left out: it reads the sources, which the marks change. Kernels in Triton have no marks.
"""

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = "DETONATION_TEST_BRANCHES"
MARKS = f"""import mmap, os
TAKEN = bytearray(10**6)  # of an interpreter with an environment of its own
if "{FILE}" in os.environ:
    with open(os.environ["{FILE}"], "r+b") as file:
        TAKEN = mmap.mmap(file.fileno(), 0)
"""
PLUGIN = f"""import json, os, time
os.environ["{FILE}"] += os.environ.get("PYTEST_XDIST_WORKER", "")
with open(os.environ["{FILE}"], "wb") as file:
    file.truncate(int(os.environ["{FILE}_COUNT"]))
import psutil, pytest
from branch_marks import TAKEN

def seconds():
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            found += sum(process.cpu_times()[:4])
        except psutil.Error:
            pass
    return found

def write(test, began, clock):
    taken = TAKEN[:]
    row = dict(test=test, seconds=round(seconds() - began, 3), clock=round(time.monotonic() - clock, 2))
    row["branches"] = [n for n, one in enumerate(taken) if one]
    with open(os.environ["{FILE}"] + ".lines", "a") as file:
        file.write(json.dumps(row) + chr(10))
    TAKEN[:] = bytes(len(taken))

def pytest_collection_finish():
    write("", 0.0, time.monotonic())

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    began, clock = seconds(), time.monotonic()
    yield
    write(item.nodeid, began, clock)
"""
HEAD = "from branch_marks import TAKEN as _TAKEN"


class Marked:
    """The branches of all files, as (path, line or line and "else"), in the order of their marks."""

    def __init__(self) -> None:
        self.branches: list[tuple[str, str]] = []

    def source(self, text: str, path: str) -> str:
        """The source with a mark in each branch."""
        tree = ast.parse(text)
        self._mark(tree, path)
        start = _after_docstring(tree.body)
        while any(
            isinstance(each, ast.ImportFrom) and each.module == "__future__"
            for each in tree.body[start : start + 1]
        ):
            start += 1
        tree.body[start:start] = ast.parse(HEAD).body
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"

    def _mark(self, node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            self._mark(child, path)
        if isinstance(node, ast.Match):
            last = node.cases[-1]
            if last.guard or not (
                isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
            ):
                node.cases.append(ast.match_case(ast.MatchAs(lineno=node.lineno), None, []))
        for body, name in _bodies(node):
            at = (
                _after_docstring(body)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                else 0
            )
            body.insert(at, ast.parse(f"_TAKEN[{len(self.branches)}] = 1").body[0])
            self.branches.append((path, name))


def branch_at(source: str, line: int) -> str:
    """The innermost branch in which a line of `source` is, as a map names it; empty where it is in none."""
    found = ""
    for node in ast.walk(ast.parse(source)):  # the inner ones last
        for body, name in _bodies(node):
            if not body:
                continue
            header = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)  # with its defaults
            first = node.lineno if header else body[0].lineno
            if first <= line <= (body[-1].end_lineno or 0):
                found = name
    return found


def _bodies(node: ast.AST) -> list[tuple[list[ast.stmt], str]]:
    """The branches that begin at a node: what runs there, and the line of the node, with "else" where it has two."""
    line = str(getattr(node, "lineno", 0))
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ExceptHandler():
            return [(node.body, line)]
        case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
            return []
        case ast.While(test=ast.Constant()):
            return [(node.body, line)]
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            return [(node.body, line), (node.orelse, f"{line} else")]
        case ast.Match():
            return [(each.body, str(each.pattern.lineno)) for each in node.cases]
    return []


def _after_docstring(body: Sequence[ast.stmt]) -> int:
    first = body[0] if body else None
    return int(
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and type(first.value.value) is str
    )


def marked(tree: Path) -> Marked:
    """Marks all sources below `tree`, a copy of this repository."""
    found = Marked()
    for file in sorted(tree.glob("src/detonation/**/*.py")):
        text = file.read_text(encoding="utf-8")
        if "@triton.jit" not in text:
            file.write_text(found.source(text, file.relative_to(tree).as_posix()), encoding="utf-8")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures to this file, too")
    parser.add_argument("--map", type=Path, help="which test takes which branches, to this file")
    parser.add_argument(
        "--missed", action="store_true", help="print the branches of the core that no test takes"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min((os.cpu_count() or 2) + 1, 8),
        help="as `make test` by default",
    )
    given, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="branches-") as folder:
        tree, marks, helper = Path(folder, "tree"), Path(folder, "marks"), Path(folder, "helper")
        subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(tree)], check=True)
        helper.mkdir()
        helper.joinpath("branch_marks.py").write_text(MARKS)
        helper.joinpath("branch_map.py").write_text(PLUGIN)
        branches = marked(tree).branches
        paths = os.pathsep.join([str(tree / "src"), str(helper)])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        env |= {FILE: str(marks), f"{FILE}_COUNT": str(len(branches))}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "branch_map",
            "--ignore",
            "tests/layers",
            "--tb=short",
        ]
        command += ["-p", "no:cacheprovider", "--numprocesses", str(given.processes)]
        command += ["--dist", "loadfile", "--no-loadscope-reorder"]
        began = time.perf_counter()
        ran = subprocess.Popen(
            [*command, *more], cwd=tree, env=env, stdout=subprocess.PIPE, text=True
        )
        assert ran.stdout is not None
        last = ""
        for line in ran.stdout:
            print(line, end="", flush=True)
            last = line if " passed" in line else last
        failed = ran.wait()
        lasted = time.perf_counter() - began
        rows = [
            json.loads(line) for file in Path(folder).glob("marks*.lines") for line in file.open()
        ]
    taken = {number for row in rows for number in row["branches"]}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    passed = re.search(r"(\d+) passed", last)
    core = {
        number
        for number, (path, _) in enumerate(branches)
        if path.startswith("src/detonation/core/")
    }
    figures = {
        "date": date.today().isoformat(),
        "tests": int(passed[1]) if passed else 0,
        "processor_s": round(used.ru_utime + used.ru_stime),
        "clock_s": round(lasted),
        "busy": round(os.getloadavg()[2], 1),
        "core": [len(taken & core), len(core)],
        "package": [len(taken), len(branches)],
    }
    if given.missed:
        print(*("{}:{}".format(*branches[number]) for number in sorted(core - taken)), sep="\n")
    if given.map:
        for row in rows:
            row["branches"] = ["{}:{}".format(*branches[number]) for number in row["branches"]]
        given.map.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps(figures))
    if given.out and not failed:
        given.out.write_text(json.dumps(figures) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
