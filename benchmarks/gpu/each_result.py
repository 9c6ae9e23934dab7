"""A plugin of pytest (`-p benchmarks.gpu.each_result`): a line of JSON as each test begins, and one as it ends.

A crash or the end of the time then costs no result. GPU_RESULTS is the file. GPU_SHARE, "1/4" for the second of four,
leaves the tests of the other shares out. GPU_KNOWN is a file with a list of tests that passed
earlier; they are left out, too.
"""

import json
import os
from pathlib import Path

import pytest
from benchmarks.gpu.children import stacks_at_the_end

stacks_at_the_end(ends=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if known := os.environ.get("GPU_KNOWN"):
        passed = set(json.loads(Path(known).read_text()))
        items[:] = [item for item in items if _name(item.location) not in passed]
    share, shares = map(int, os.environ.get("GPU_SHARE", "0/1").split("/"))
    items[:] = items[share::shares]


def pytest_runtest_logstart(location: tuple[str, int | None, str]) -> None:
    _write(began=_name(location))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext if report.failed else ""
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = (crash.message if crash else text).splitlines() if report.failed else []
        _write(
            ended=_name(report.location),
            outcome=report.outcome,
            headline=lines[0] if lines else "",
            traceback=text,
        )


def _name(location: tuple[str, int | None, str]) -> str:
    return f"{Path(location[0]).name}::{location[2]}"


def _write(**line: str) -> None:
    with Path(os.environ["GPU_RESULTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
