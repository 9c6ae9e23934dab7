"""Small faults put into the core, one at a time and in a copy: how many do the laws find?

python tests/mutants.py [--count 320] [--seed 0] [--out FILE] [--map FILE] [--again] [--score]

`tests/faults.py` draws the faults: in core, feed, checkpoint and cluster/survive. Only tests run
that take the branch with the fault, by a map of `tests/branches.py --map` (made where there is
none): one of each function before a second, short ones first, up to the first that fails. A test
that finds a fault has to pass without it. `--out` has each result as soon as it is known, and a
second call goes on from there; `--again` runs those that survived once more. The score is printed
at the end, `--score` prints it alone.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytest

import branches
from faults import Fault, drawn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.jsonl"
SURVIVORS = ROOT / "tests/survivors.toml"
INDEX = ROOT / "tests/laws/README.md"
LAWS = ("tests/laws/", "tests/specs/", "tests/checkpoint/", "tests/world/test_stateful.py")
"""What counts as laws, with the tests of other folders that `INDEX` names.

Laws without a network, what each scheme is, that a checkpoint comes back equal or is refused, and
the state machine. The rest of the suite is examples, errors, commands and integrations.
"""
FIRST = 10
"""So many tests are collected first: most faults are found by one of them."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What became of a fault. group: "laws" (tests/laws), "other laws", "suite"; "" of a survivor.
    by: the test that found it. taken: how many tests ran. seconds: of processors."""

    fault: str
    room: str
    kind: str
    group: str
    by: str
    taken: int
    seconds: float

    @property
    def found(self) -> bool:
        return self.group != ""


def grouped(rows: list[Row]) -> dict[str, list[Row]]:
    """The tests of the map, those that state laws first."""
    index = {f"tests/{name}" for name in re.findall(r"`([\w/]+\.py::test_\w+)`", INDEX.read_text())}
    groups: dict[str, list[Row]] = {"laws": [], "other laws": [], "suite": []}
    for row in rows:
        test = row["test"]
        if test.startswith("tests/laws/"):
            groups["laws"].append(row)
        elif test.startswith(LAWS) or test.partition("[")[0] in index:
            groups["other laws"].append(row)
        elif test:
            groups["suite"].append(row)
    return groups


def taking(fault: Fault, source: str, rows: list[Row], budget: float) -> list[Row]:
    """The tests that take the branch with the fault, then the others of their files, as far as
    `budget` goes: where several tests look at one training, the map has it with the first alone."""
    inside = f"{fault.path}:{branches.branch_at(source, fault.line)}"
    everywhere = inside.endswith(":")  # in no function

    def takes(row: Row) -> bool:
        found = row["branches"]
        if everywhere:
            return any(each.startswith(inside) for each in found)
        return inside in found

    takers = [row for row in rows if takes(row)]
    files = {row["test"].partition("::")[0] for row in takers}
    siblings = [row for row in rows if row["test"].partition("::")[0] in files and not takes(row)]
    tests: list[Row] = []
    seconds = 0.0
    for row in _different_first(takers) + _different_first(siblings):
        seconds += row["seconds"]
        if tests and seconds > budget:
            break
        tests.append(row)
    return tests


def _different_first(rows: list[Row]) -> list[Row]:
    """One of each function, short ones first, then a second of each."""
    functions: Counter[str] = Counter()
    turns = []
    for row in sorted(rows, key=lambda row: row["seconds"]):
        function = row["test"].partition("[")[0]
        turns.append((functions[function], row["seconds"], len(turns), row))
        functions[function] += 1
    return [row for *_, row in sorted(turns)]


class Judges:
    """Tests that run in a copy of the repository, each time in a fork of this process."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._printed = folder / "printed"
        self._sound: set[str] = set()
        clone = ["git", "clone", "--quiet", "--local", str(ROOT), str(self.tree)]
        subprocess.run(clone, check=True)
        for name in ("torch.distributed.fsdp", "torch._dynamo", "hypothesis.stateful", "xdist"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)  # once; of the package nothing
        from hypothesis.internal.conjecture import engine

        engine.MAX_SHRINKING_SECONDS = 0  # a failure is enough, and need not be small
        if (pid := os.fork()) == 0:
            _run_tests(self.tree, ["tests"], self._printed, collect=True)  # writes byte code
        os.waitpid(pid, 0)

    def judge(self, fault: Fault, groups: dict[str, list[Row]], budget: float) -> Result:
        """Runs the tests of each group in turn until one finds the fault."""
        file = self.tree / fault.path
        source = file.read_text()
        before = _processor_seconds()
        taken = 0
        group = ""
        by = ""
        for name, rows in groups.items():
            tests = taking(fault, source, rows, budget)
            taken += len(tests)
            for batch in (tests[:FIRST], tests[FIRST:]):
                by = self._found_by(batch, file, fault.applied(source)) if batch and not by else by
            if by:
                group = name
                break
        took = round(_processor_seconds() - before, 1)
        return Result(fault.name, fault.room, fault.kind, group, by, taken, took)

    def _found_by(self, tests: list[Row], file: Path, changed: str) -> str:
        """The first of these tests that fails with the changed file and passes without it."""
        original = file.read_text()
        file.write_text(changed)
        try:
            by = self._first_failure(tests)
        finally:
            file.write_text(original)
        if by in self._sound or "::" not in by:
            return by
        if without := self._first_failure([row for row in tests if row["test"] == by]):
            raise SystemExit(f"without a fault: {without}")
        self._sound.add(by)
        return by

    def _first_failure(self, tests: list[Row]) -> str:
        """The first of these tests that fails in the tree, or how they ended; "" if all pass."""
        limit = 60 + 4 * sum(row["clock"] for row in tests)
        pid = os.fork()
        if pid == 0:
            _run_tests(self.tree, [row["test"] for row in tests], self._printed)
        handle = os.pidfd_open(pid)
        ended = bool(select.select([handle], [], [], limit)[0])
        os.close(handle)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also what a test has left behind
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not ended:
            return f"no end within {limit:.0f} s"
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        printed = self._printed.read_text()
        failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", printed, re.MULTILINE)
        return failed[0] if failed else f"the tests end with code {code}: {printed[-200:]}"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run_tests(tree: Path, tests: list[str], printed: Path, collect: bool = False) -> NoReturn:
    """Runs pytest in the tree until a test fails, as a process and a session of its own."""
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.chdir(tree)
        sys.dont_write_bytecode = not collect  # of a fault, which the next one might read
        sys.path.insert(0, str(tree / "src"))  # before the package that is installed
        os.environ["PYTHONPATH"] = str(tree / "src")
        options = ["-x", "-m", "", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        options += ["--collect-only"] * collect
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported here
        code = pytest.main([*options, *tests])
        sys.stdout.flush()
    except BaseException:
        printed.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def read_map(path: Path) -> list[Row]:
    """The tests of `make test` with their branches, from a map that is made where it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "tests/branches.py"), "--map", str(path), "tests"]
        subprocess.run(command, check=True)
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_results(path: Path) -> dict[str, Result]:
    """The results of a file, by the names of their faults: the last of each."""
    if not path.exists():
        return {}
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return {result.fault: result for result in results}


def read_reasons(path: Path) -> dict[str, str]:
    """The class of each survivor that somebody has looked at."""
    if not path.exists():
        return {}
    return {each["fault"]: each["class"] for each in tomllib.loads(path.read_text())["survivor"]}


def score(results: list[Result], reasons: dict[str, str]) -> str:
    """The share that the laws find, by room and by kind, and the survivors without a reason."""
    alone = [result.group == "laws" for result in results]
    laws = [result.group in ("laws", "other laws") for result in results]
    lines = [
        f"{len(results)} faults, {sum(result.seconds for result in results):.0f} processor-seconds",
        f"found by tests/laws alone: {_share(alone)}",
        f"found by all laws: {_share(laws)}",
        f"found by the suite: {_share([result.found for result in results])}",
    ]
    for field in ("room", "kind"):
        for name in sorted({getattr(result, field) for result in results}):
            of_name = [
                found
                for result, found in zip(results, laws, strict=True)
                if getattr(result, field) == name
            ]
            lines.append(f"  {field} {name}: {_share(of_name)}")
    survivors = [result.fault for result, found in zip(results, laws, strict=True) if not found]
    classes = Counter(reasons[name] for name in survivors if name in reasons)
    told = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
    lines.append(f"{len(survivors)} survive the laws: {told or 'none is explained'}")
    unexplained = [name for name in survivors if name not in reasons]
    lines.append(f"{len(unexplained)} of them without a reason in {SURVIVORS.name}")
    return "\n".join([*lines, *(f"  {name}" for name in unexplained)])


def _share(found: list[bool]) -> str:
    return f"{100 * sum(found) / max(len(found), 1):.1f} % ({sum(found)} of {len(found)})"


def main() -> int:
    """Runs the faults that `--out` lacks, and prints what became of each, then the score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--map", type=Path, default=ROOT / "runs/branches.jsonl")
    parser.add_argument(
        "--budget", type=float, default=40, help="seconds of tests of each group, by the map"
    )
    parser.add_argument("--again", action="store_true", help="run survivors once more")
    parser.add_argument("--score", action="store_true", help="run nothing")
    given = parser.parse_args()
    results = read_results(given.out)
    chosen = drawn(ROOT, given.count, given.seed)

    def waits(fault: Fault) -> bool:
        known = results.get(fault.name)
        return known is None or (given.again and not known.found)

    waiting = [] if given.score else [fault for fault in chosen if waits(fault)]
    if waiting:
        groups = grouped(read_map(given.map.absolute()))
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            judges = Judges(Path(folder))
            for fault in waiting:
                result = judges.judge(fault, groups, given.budget)
                results[fault.name] = result
                with given.out.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                print(f"{result.group or 'SURVIVED':10} {fault.name}\n    {result.by}", flush=True)
    of_chosen = [results[fault.name] for fault in chosen if fault.name in results]
    print(score(of_chosen, read_reasons(SURVIVORS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
