"""Small faults put into the core, one at a time and in a copy: how many do the laws find?

python tests/mutants.py [--count 320] [--seed 0] [--out FILE] [--map FILE] [--again] [--score]

`tests/mutations.py` draws the faults: in core, feed, checkpoint and cluster/survive. Only tests run
that take the branch with the fault, by a map of `tests/branches.py --map` (made where there is
none): one of each function before a second, short ones first, up to the first that fails. A test
that finds a fault has to pass without it. `--out` has each result as soon as it is known, and a
second call goes on from there; `--again` runs those once more that no law found and no reason
explains. The score is printed at the end, `--score` prints it alone.
"""

import argparse
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytest

import branches
from judges import Judge, Row, run_pytest
from mutations import Fault, drawn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.jsonl"
SURVIVORS = ROOT / "tests/survivors.toml"
INDEX = ROOT / "tests/laws/README.md"
LAWS = (
    "tests/laws/",
    "tests/specs/",
    "tests/checkpoint/",
    "tests/membership/",
    "tests/world/test_stateful.py",
)
"""What counts as laws, with the tests of other folders that `INDEX` names.

Laws without a network, what each scheme is, that a checkpoint comes back equal or is refused, the
model of the membership, and the state machine. The rest of the suite is examples, errors, commands and integrations.
"""

HARMLESS = ("equivalent", "speed", "diagnostic")
"""Classes of survivors that change nothing, time and memory alone, or a text alone."""


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

    @property
    def by_law(self) -> bool:
        return self.group in ("laws", "other laws")


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


def judged(
    judge: Judge, fault: Fault, tree: Path, groups: dict[str, list[Row]], budget: float
) -> Result:
    """Runs the tests of each group in turn until one finds the fault."""
    file = tree / fault.path
    source = file.read_text()
    before = _processor_seconds()
    taken = 0
    group = ""
    by = ""
    for name, rows in groups.items():
        tests = taking(fault, source, rows, budget)
        taken += len(tests)
        by = judge.found_by(tests, file, fault.applied(source))
        if by:
            group = name
            break
    took = round(_processor_seconds() - before, 1)
    return Result(fault.name, fault.room, fault.kind, group, by, taken, took)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Run:
    """Judges faults in a clone, and writes each result to a file at once."""

    def __init__(self, tree: Path, rows: list[Row], out: Path, budget: float) -> None:
        self._tree = tree
        self._groups = grouped(rows)
        self._files = sorted({row["test"].partition("::")[0] for row in rows if row["test"]})
        self._out = out
        self._budget = budget

    def all_of(self, faults: list[Fault]) -> None:
        """First in forks of a process that has collected the tests, then those that are left."""
        if (pid := os.fork()) == 0:
            loop = _Loop(lambda items: self._judge(Judge(self._tree, items), faults))
            os._exit(run_pytest(self._tree, [*self._files], loop))
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit("the tests were not collected, or one fails without a fault")
        known = read_results(self._out)
        left = [each for each in faults if each.name not in known or not known[each.name].found]
        self._judge(Judge(self._tree), left)

    def _judge(self, judge: Judge, faults: list[Fault]) -> None:
        for fault in faults:
            file = self._tree / fault.path
            if judge.can(file, fault.applied(file.read_text())):
                result = judged(judge, fault, self._tree, self._groups, self._budget)
                with self._out.open("a") as results:
                    results.write(json.dumps(asdict(result)) + "\n")
                print(f"{result.group or 'SURVIVED':10} {fault.name}\n    {result.by}", flush=True)


class _Loop:
    """A plugin that takes what pytest has collected, and runs none of it itself."""

    def __init__(self, use: Callable[[dict[str, pytest.Item]], None]) -> None:
        self._use = use

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._use({item.nodeid: item for item in session.items})
        return True


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
    laws = [result.by_law for result in results]
    lines = [
        f"{len(results)} faults, {sum(result.seconds for result in results):.0f} processor-seconds",
        f"found by tests/laws alone: {_share(alone)}",
        f"found by all laws: {_share(laws)}",
    ]
    if any(result.group == "suite" for result in results):
        lines.append(f"found by the suite: {_share([result.found for result in results])}")
    matter = [
        found
        for result, found in zip(results, laws, strict=True)
        if found or reasons.get(result.fault) not in HARMLESS
    ]
    lines.append(f"without the survivors that are {', '.join(HARMLESS)}: {_share(matter)}")
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
    parser.add_argument(
        "--again", action="store_true", help="run those once more that no law found"
    )
    parser.add_argument("--score", action="store_true", help="run nothing")
    given = parser.parse_args()
    results = read_results(given.out)
    reasons = read_reasons(SURVIVORS)
    chosen = drawn(ROOT, given.count, given.seed)

    def waits(fault: Fault) -> bool:
        known = results.get(fault.name)
        if known is None:
            return True
        return given.again and not known.by_law and fault.name not in reasons

    waiting = [] if given.score else [fault for fault in chosen if waits(fault)]
    if waiting:
        rows = read_map(given.map.absolute())
        for name in ("torch.distributed.fsdp", "torch._dynamo", "hypothesis.stateful"):
            importlib.import_module(name)  # once; of the package nothing
        engine = importlib.import_module("hypothesis.internal.conjecture.engine")
        engine.MAX_SHRINKING_SECONDS = 0  # a failure is enough, and need not be small
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            tree = Path(folder, "tree")
            clone = ["git", "clone", "--quiet", "--local", str(ROOT), str(tree)]
            subprocess.run(clone, check=True)
            Run(tree, rows, given.out.absolute(), given.budget).all_of(waiting)
        results = read_results(given.out)
    of_chosen = [results[fault.name] for fault in chosen if fault.name in results]
    print(score(of_chosen, reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
