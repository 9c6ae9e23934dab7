"""Tests that run in forks of a process that has collected them, each time with another fault.

A fork gives the functions of the package the code of the changed file, so that nothing is imported
anew. Where that cannot be (a constant, a default, a field of a class), tests run in a fork of a
process that has imported torch, and nothing of the package.
"""

import contextlib
import gc
import os
import re
import select
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

Row = dict[str, Any]
"""A test of a map: its name, its seconds of processors and of the clock, and its branches."""

FIRST = 10
"""So many tests are collected first where they are imported anew: one finds most faults."""


class Judge:
    """Runs tests of `tree` with another text in one of its files.

    items: what pytest has collected in this process; None where tests are imported anew.
    """

    def __init__(self, tree: Path, items: dict[str, pytest.Item] | None = None) -> None:
        self._tree = tree
        self._items = items
        self._printed = tree.parent / f"printed-{os.getpid()}"
        self._sound: set[str] = set()
        self._functions = None if items is None else _functions(tree / "src")

    def can(self, file: Path, changed: str) -> bool:
        """True if this judge can run tests with the changed file."""
        return self._functions is None or bool(self._patches(file, changed))

    def found_by(self, tests: list[Row], file: Path, changed: str) -> str:
        """The first of these tests that fails with the changed file and passes without it."""
        while tests:
            by = self._with_fault(tests, file, changed)
            if not by or by in self._sound:
                return by
            judges = [row for row in tests if row["test"] == by] or tests  # or all, of a hang
            without = self._first_failure(judges, [])
            if not without:
                self._sound |= {by} if "::" in by else set()
                return by
            left = [row for row in tests if row["test"] not in (by, without)]
            if len(left) == len(tests):  # they hang without a fault, too
                return ""
            tests = left
        return ""

    def _with_fault(self, tests: list[Row], file: Path, changed: str) -> str:
        original = file.read_text()
        patches = self._patches(file, changed)
        file.write_text(changed)  # for interpreters that tests start
        try:
            return self._first_failure(tests, patches)
        finally:
            file.write_text(original)

    def _patches(self, file: Path, changed: str) -> list[tuple[types.FunctionType, types.CodeType]]:
        """The functions whose code differs in the changed file, each with its new code."""
        if self._functions is None:
            return []
        old = dict(_codes(file.read_text(), file))
        new = dict(_codes(changed, file))
        patches = []
        for key, code in new.items():
            if old.get(key) != code:
                for function in self._functions.get(key, []):
                    if len(function.__code__.co_freevars) == len(code.co_freevars):
                        patches.append((function, code))
        return patches

    def _first_failure(
        self, tests: list[Row], patches: Sequence[tuple[types.FunctionType, types.CodeType]]
    ) -> str:
        """The first of these tests that fails in the tree, or how they ended; "" if all pass."""
        if self._items is None:
            for batch in (tests[:FIRST], tests[FIRST:]):
                names = [row["test"] for row in batch]
                by = self._forked(batch, lambda names=names: _imported_anew(self._tree, names))
                if by:
                    return by
            return ""
        items = [self._items[row["test"]] for row in tests if row["test"] in self._items]
        return self._forked(tests, lambda: _patched(items, patches))

    def _forked(self, tests: list[Row], run: Callable[[], int]) -> str:
        if not tests:
            return ""
        limit = 60 + 4 * sum(row["clock"] for row in tests)
        pid = os.fork()
        if pid == 0:
            _end_with(run, self._printed)
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
        printed = self._printed.read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", printed, re.MULTILINE)
        return failed[0] if failed else f"the tests end with code {code}: {printed[-200:]}"


def _end_with(run: Callable[[], int], printed: Path) -> NoReturn:
    """Ends this process, a session of its own, with the code that `run` returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        code = run()
        sys.stdout.flush()
    except BaseException:
        os.write(1, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _patched(
    items: list[pytest.Item], patches: Sequence[tuple[types.FunctionType, types.CodeType]]
) -> int:
    """Runs collected tests until one fails, with new code of functions."""
    for function, code in patches:
        function.__code__ = code
    for item in items[:1]:
        item.config.pluginmanager.register(_Failures())
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    return 0


class _Failures:
    """Ends the process at the first test that fails, and prints its name."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(1, f"\nFAILED {report.nodeid}\n".encode())
            os._exit(1)


def _imported_anew(tree: Path, tests: list[str]) -> int:
    """Runs pytest in the tree until a test fails."""
    sys.dont_write_bytecode = True  # of a fault, which the next one might read
    return run_pytest(tree, ["-x", "--tb=no", *tests])


def run_pytest(tree: Path, arguments: list[str], *plugins: object) -> int:
    """pytest in the tree, with its package and not with the one that is installed."""
    os.chdir(tree)
    sys.path.insert(0, str(tree / "src"))
    os.environ["PYTHONPATH"] = str(tree / "src")
    options = ["-m", "", "--no-header", "-p", "no:cacheprovider", "-s"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported here
    return int(pytest.main([*options, *arguments], plugins=[*plugins]))


Key = tuple[str, str, int]


def _key(code: types.CodeType) -> Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(source: str, file: Path) -> Iterator[tuple[Key, types.CodeType]]:
    """The code of every function of a source."""
    waiting = [compile(source, str(file), "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        yield _key(code), code
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _functions(source: Path) -> dict[Key, list[types.FunctionType]]:
    """All functions that live in this process and have their code below `source`."""
    gc.unfreeze()
    found: dict[Key, list[types.FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(str(source)):
            found.setdefault(_key(each.__code__), []).append(each)
    gc.freeze()
    return found
