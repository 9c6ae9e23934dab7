"""Faults put into the core, one at a time and in a copy: which do the tests find? By hand, for it takes hours.

python tests/mutants.py [--count 60] [--seed 0] [--out FILE] [--map FILE] [--all] [--again FILE] [--folders laws ...]

A fault is an operator, a comparison, a number, an axis, a count of bytes or a call that is changed where the syntax
tree has one. The seed decides which; every kind of fault is drawn equally often. The tests that import the changed file
run first, then those of the folders; each file of tests has to pass without a fault before it judges one. With `--map`,
which `tests/branches.py --map` writes for the same commit, only those tests run that take the branch with the fault:
one of each function before a second, those that take least first, for at most `--budget` seconds by the map. `--out`
has the results after each fault, and a second call goes on from there.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytest

import branches

# What tests import, once; of the package nothing, which each run has from the copy.
for name in (
    "torch.distributed.fsdp",
    "transformers",
    "matplotlib.pyplot",
    "pandas",
    "datasets",
    "lightning",
    "peft",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

ROOT = Path(__file__).resolve().parents[1]
CORE = Path("src/detonation/core")
FOLDERS = ["laws", "numerics", "golden", "world", "checkpoint", "kernels", "train"]
"""In which the core is tested, those that find most in a second first."""
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "venv", "runs", "site", "dist", "__pycache__", ".*_cache", ".hypothesis"
)
LIMIT_S = 3600
"""A fault that makes the tests take longer has made something hang."""

SWAPPED = {
    "sign": {ast.Add: "-", ast.Sub: "+"},
    "factor": {ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"},
    "comparison": {
        ast.Lt: "<=",
        ast.LtE: "<",
        ast.Gt: ">=",
        ast.GtE: ">",
        ast.Eq: "!=",
        ast.NotEq: "==",
    },
    "logic": {ast.And: "or", ast.Or: "and"},
}
EXTREMES = {"min": "max", "max": "min"}
BYTES = {"nbytes", "itemsize", "element_size"}  # as attributes and as calls
AXES = {"dim", "dims", "axis"}


@dataclass(frozen=True)
class Fault:
    """The text between two places of a line, and what comes in its stead. line: from 1; columns: in bytes, from 0."""

    path: str
    line: int
    start: int
    end: int
    kind: str
    new: str

    def applied(self, source: str) -> str:
        """The source with the fault in it."""
        lines = source.encode().split(b"\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.new.encode() + line[self.end :]
        return b"\n".join(lines).decode()

    def told(self, source: str) -> str:
        """The place, the kind, and the line before and after."""
        before, after = (
            text.split("\n")[self.line - 1].strip() for text in (source, self.applied(source))
        )
        return f"{self.path}:{self.line} {self.kind}: {before}  ->  {after}"


def faults(path: Path, source: str) -> list[Fault]:
    """All faults that `source` can have; none in annotations, decorators, texts of errors and docstrings."""
    found = []
    for node in _code(ast.parse(source)):
        for start, end, kind, new in _changes(node, source):
            if start[0] == end[0]:
                found.append(Fault(path.as_posix(), *start, end[1], kind, new))
    return [fault for fault in dict.fromkeys(found) if _compiles(fault.applied(source))]


def chosen(root: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults of the core below `root`, every kind as often as there are faults of it."""
    kinds: dict[str, list[Fault]] = {}
    for path in sorted((root / CORE).rglob("*.py")):
        for fault in faults(path.relative_to(root), path.read_text()):
            kinds.setdefault(fault.kind, []).append(fault)
    for name in sorted(kinds):
        random.Random(f"{seed} {name}").shuffle(kinds[name])
    drawn = [kinds[name].pop() for _ in range(count) for name in sorted(kinds) if kinds[name]]
    return drawn[:count]


Place = tuple[int, int]


def _changes(node: ast.AST, source: str) -> Iterator[tuple[Place, Place, str, str]]:
    """What may be changed at a node: from where, to where, the kind of fault, and the new text."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            yield from _between(left, right, op, source)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _between(left, right, op, source)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _between(left, right, op, source)
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            yield _start(node), _start(operand), "sign" if isinstance(op, ast.USub) else "logic", ""
        case ast.keyword(arg=str() as name, value=ast.Constant(value=int() as axis) as value) if (
            name in AXES
        ):
            yield _start(value), _end(value), "axis", str(1 - axis if axis in (0, 1) else axis + 1)
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            yield _start(node), _end(node), "number", str(number + 1)
        case ast.Constant(value=bool() as flag):
            yield _start(node), _end(node), "flag", str(not flag)
        case ast.Attribute(attr=name) if name in BYTES and not _called(node, source):
            yield _end(node), _end(node), "bytes", " * 2"
        case ast.Call(func=ast.Attribute(attr=name)) if name in BYTES:
            yield _end(node), _end(node), "bytes", " * 2"
        case ast.Call(func=ast.Name(id=name)) if name in EXTREMES:
            yield _start(node.func), _end(node.func), "extreme", EXTREMES[name]
        case ast.Expr(value=ast.Call()):
            yield _start(node), _end(node), "dropped call", "pass"
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op, target=target, value=value):
            line = source.encode().split(b"\n")[target.end_lineno - 1]
            sign = b"+=" if isinstance(op, ast.Add) else b"-="
            at = line.find(sign, target.end_col_offset)
            if at >= 0 and value.lineno == target.end_lineno:
                yield (
                    (value.lineno, at),
                    (value.lineno, at + 2),
                    "sign",
                    "-=" if sign == b"+=" else "+=",
                )


def _between(
    left: ast.expr, right: ast.expr, op: ast.AST, source: str
) -> Iterator[tuple[Place, Place, str, str]]:
    """The operator between two operands, where all are on one line."""
    for kind, swapped in SWAPPED.items():
        if type(op) in swapped and left.end_lineno == right.lineno:
            gap = (
                source.encode()
                .split(b"\n")[right.lineno - 1][left.end_col_offset : right.col_offset]
                .decode()
            )
            old = gap.strip("() ")
            at = left.end_col_offset + gap.index(old)
            yield (right.lineno, at), (right.lineno, at + len(old)), kind, swapped[type(op)]


def _called(node: ast.Attribute, source: str) -> bool:
    line, column = _end(node)
    return source.encode().split(b"\n")[line - 1][column : column + 1] == b"("


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one that decide what runs."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and "TYPE_CHECKING" not in ast.dump(
                getattr(child, "test", ast.Pass())
            ):
                yield child
                if not (
                    isinstance(child, ast.keyword) and child.arg in AXES
                ):  # its number is an axis
                    yield from _code(child)


def _start(node: ast.AST) -> Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _compiles(source: str) -> bool:
    try:
        compile(source, "fault", "exec")
    except SyntaxError:
        return False
    return True


def batches(root: Path, path: str, folders: list[str]) -> list[list[str]]:
    """The files of tests below the folders: those that import the module at `path`, then the rest of each folder."""
    module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    near: list[str] = []
    rest: list[list[str]] = []
    for folder in folders:
        rest.append([])
        for file in sorted((root / "tests" / folder).glob("test_*.py")):
            text = file.read_text()
            imports = module in text or re.search(
                rf"from {re.escape(package)} import .*\b{name}\b", text
            )
            (near if imports else rest[-1]).append(file.relative_to(root).as_posix())
    return [batch for batch in (near, *rest) if batch]


def taking(fault: Fault, source: str, rows: list[dict[str, Any]], budget: float) -> list[str]:
    """The tests that take the branch with the fault, or where it is in none of its file, as far as `budget` goes."""
    inside = f"{fault.path}:{branches.branch_at(source, fault.line)}"
    functions: dict[str, int] = {}
    turns = []
    for row in sorted(rows, key=lambda row: row["seconds"]):
        if row["test"] and any(
            each == inside or (inside[-1] == ":" and each.startswith(inside))
            for each in row["branches"]
        ):
            function = row["test"].partition("[")[0]
            functions[function] = functions.get(function, -1) + 1
            turns.append((functions[function], row["seconds"], row["test"]))
    seconds = 0.0
    tests: list[str] = []
    for _, took, test in sorted(turns):
        seconds += took
        if tests and seconds > budget:
            break
        tests.append(test)
    return tests


def outcome(root: Path, batch: list[str], everything: bool, printed: Path) -> str:
    """What these tests say of the tree at `root`: "survived", or "found by" and the first that fails."""
    pid = os.fork()  # torch is imported here, once
    if pid == 0:
        _test(root, ["-m", ""] * everything + batch, printed)
    handle = os.pidfd_open(pid)
    ended = bool(select.select([handle], [], [], LIMIT_S)[0])
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what a test has left behind
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not ended:
        return f"found: it hangs for {LIMIT_S} s"
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survived"
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", printed.read_text(), re.MULTILINE)
    if code > 0 and not failed:
        raise RuntimeError(f"pytest did not run, code {code}: {printed.read_text()[-2000:]}")
    return f"found by {failed[0]}" if failed else f"found: the tests end with code {code}"


def _test(root: Path, arguments: list[str], printed: Path) -> NoReturn:
    """Runs pytest in the tree at `root` until a test fails, as a process and a session of its own."""
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.chdir(root)
        sys.path.insert(0, str(root / "src"))  # before the package that is installed
        os.environ["PYTHONPATH"] = str(root / "src")
        options = ["-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        options += [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]  # of what transformers has imported
        code = pytest.main([*options, *arguments])
        sys.stdout.flush()
    except BaseException:
        printed.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def main() -> int:
    """Runs the faults that `--out` has not yet, and prints each with what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--folders", nargs="+", default=FOLDERS)
    parser.add_argument(
        "--map", type=Path, help="only tests that take the branch of the fault, by this map"
    )
    parser.add_argument(
        "--budget", type=float, default=60, help="seconds of them for a fault (default: 60)"
    )
    parser.add_argument(
        "--all", action="store_true", help="with the tests that only `make test-all` runs"
    )
    parser.add_argument(
        "--again", type=Path, help="only those that survived in this file of results"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    given = parser.parse_args()
    given.out = given.out.absolute()
    drawn = chosen(ROOT, given.count, given.seed)
    if given.list:
        print(*(fault.told((ROOT / fault.path).read_text()) for fault in drawn), sep="\n")
        return 0
    results = json.loads(given.out.read_text()) if given.out.exists() else []
    known = {result["told"] for result in results}
    if given.again:
        survivors = {
            each["told"]
            for each in json.loads(given.again.read_text())
            if each["outcome"] == "survived"
        }
        drawn = [
            fault for fault in drawn if fault.told((ROOT / fault.path).read_text()) in survivors
        ]
    rows = [json.loads(line) for line in given.map.read_text().splitlines()] if given.map else []
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "tree")
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        for fault in drawn:
            source = (ROOT / fault.path).read_text()
            if (told := fault.told(source)) in known:
                continue
            came = "survived"
            if rows:
                judges = [tests] if (tests := taking(fault, source, rows, given.budget)) else []
                sound.update(*judges)  # they were, when the map was made
            else:
                judges = batches(copy, fault.path, given.folders)
            for batch in judges:
                if fresh := [file for file in batch if file not in sound]:
                    if (
                        without := outcome(copy, fresh, given.all, Path(folder, "printed"))
                    ) != "survived":
                        raise SystemExit(
                            f"without a fault in the core, {without.removeprefix('found ')}"
                        )
                    sound.update(fresh)
                (copy / fault.path).write_text(fault.applied(source))
                came = outcome(copy, batch, given.all, Path(folder, "printed"))
                shutil.copy2(ROOT / fault.path, copy / fault.path)
                if came != "survived":
                    break
            results.append({"told": told, "outcome": came, **asdict(fault)})
            given.out.write_text(json.dumps(results, indent=1))
            print(f"{came}\n    {told}", flush=True)
    survived = sum(result["outcome"] == "survived" for result in results)
    print(f"{len(results)} faults, {len(results) - survived} found, {survived} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
