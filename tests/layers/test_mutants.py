"""Faults for the core: which ones code can have, which are drawn, and what the score counts."""

import importlib.util
from pathlib import Path

import branches
import judges
import mutants
import mutations

SOURCE = """\
def f(tensor, dim: int = 3):
    if not tensor or dim < 2:
        raise ValueError(f"{dim - 1} is too few")
    store.put("a" + "b", tensor.nbytes)
    tensor.sum(dim=0).kept = -min(dim, 7)
    dim += 1
    return dim
"""


def found(kind):
    each = mutations.faults("src/detonation/core/x.py", SOURCE)
    return [
        fault.applied(SOURCE).split("\n")[fault.line - 1] for fault in each if kind == fault.kind
    ]


def test_every_kind_of_fault_changes_what_runs():
    assert found("comparison") == ["    if not tensor or dim <= 2:"]
    assert found("logic") == ["    if tensor or dim < 2:", "    if not tensor and dim < 2:"]
    assert found("bytes") == ['    store.put("a" + "b", tensor.nbytes * 2)']
    assert found("dropped call") == ["    pass"]
    assert found("dropped write") == ["    pass"]
    assert found("axis") == ["    tensor.sum(dim=1).kept = -min(dim, 7)"]
    assert found("extreme") == ["    tensor.sum(dim=0).kept = -max(dim, 7)"]
    assert found("sign") == ["    tensor.sum(dim=0).kept = min(dim, 7)", "    dim -= 1"]
    assert len(found("number")) == 4  # neither the axis nor the text of the error


QUIET = """\
def f(tensor, deadline):
    if tensor.nbytes:
        _log.info("%d bytes", tensor.nbytes - 1)
    if time.monotonic() < deadline:
        time.sleep(1)
"""


def test_no_fault_is_one_that_no_program_can_show():
    """Of the log, of a pause, of two moments that are never equal, of the truth of a size."""
    assert mutations.faults("src/detonation/core/x.py", QUIET) == []
    loud = QUIET.replace("if tensor.nbytes", "if f(tensor.nbytes)").replace("_log", "store")
    faults = mutations.faults("src/detonation/core/x.py", loud)
    assert {fault.kind for fault in faults} == {"bytes", "dropped call", "sign", "number"}


def test_a_draw_stays_where_the_code_above_it_changes():
    above = "x = 1\n" + SOURCE
    names = {fault.name for fault in mutations.faults("src/detonation/core/x.py", SOURCE)}
    assert names < {fault.name for fault in mutations.faults("src/detonation/core/x.py", above)}


def test_every_kind_and_every_part_is_drawn():
    drawn = mutations.drawn(mutants.ROOT, 320, 0)
    assert len({fault.name for fault in drawn}) == 320
    assert {fault.room for fault in drawn} == set(mutations.ROOMS)
    for fault in drawn:
        compile(fault.applied((mutants.ROOT / fault.path).read_text()), fault.path, "exec")


def row(test, seconds, *taken):
    return {"test": test, "seconds": seconds, "clock": seconds, "branches": list(taken)}


def test_tests_of_the_branch_run_first_one_of_each_function_then_their_neighbours():
    (fault,) = [each for each in mutations.faults("src/x.py", SOURCE) if each.kind == "bytes"]
    assert branches.branch_at(SOURCE, 1) == branches.branch_at(SOURCE, fault.line) == "1"
    rows = [
        row("a.py::test_looks_at_the_same", 0.1),
        row("a.py::test[1]", 3.0, "src/x.py:1"),
        row("a.py::test[2]", 2.0, "src/x.py:1"),
        row("a.py::test_other", 2.5, "src/x.py:1", "src/x.py:2"),
        row("b.py::test_far", 0.1, "src/x.py:2"),
    ]
    tests = [each["test"] for each in mutants.taking(fault, SOURCE, rows, 100)]
    assert tests == ["a.py::test[2]", "a.py::test_other", "a.py::test[1]", rows[0]["test"]]
    assert len(mutants.taking(fault, SOURCE, rows, 1)) == 1


def test_a_function_that_lives_gets_the_changed_code_and_a_constant_does_not(tmp_path):
    file = tmp_path / "tree/src/some.py"
    file.parent.mkdir(parents=True)
    source = "LEAST = 3\n\ndef more(x):\n    return x + LEAST\n"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("some", file)
    some = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(some)
    judge = judges.Judge(tmp_path / "tree", {})
    assert not judge.can(file, source.replace("3", "4"))
    ((function, code),) = judge._patches(file, source.replace("+", "-"))
    assert function is some.more
    function.__code__ = code
    assert some.more(1) == -2


def test_the_laws_are_those_of_the_index_and_of_their_folders():
    rows = [
        row("tests/laws/test_zero.py::test_x[1]", 1),
        row("tests/specs/test_specs.py::test_x", 1),
        row("tests/world/test_evaluation.py::test_law_13_evaluation_changes_nothing[demo]", 1),
        row("tests/world/test_setup.py::test_x", 1),
    ]
    groups = mutants.grouped(rows)
    assert groups == {"laws": rows[:1], "other laws": rows[1:3], "suite": rows[3:]}


def test_the_score_counts_laws_and_names_survivors_without_a_reason():
    def result(fault, group):
        return mutants.Result(fault, "core", "sign", group, "", 1, 2.0)

    results = [
        result("a", "laws"),
        result("b", "other laws"),
        result("c", "suite"),
        result("d", ""),
    ]
    told = mutants.score(results, {"c": "gap"})
    assert "tests/laws alone: 25.0 % (1 of 4)" in told
    assert "all laws: 50.0 % (2 of 4)" in told
    assert "the suite: 75.0 % (3 of 4)" in told
    assert "2 survive the laws: 1 gap" in told and told.endswith("\n  d")
    told = mutants.score(results, {"c": "speed", "d": "equivalent"})
    assert "diagnostic: 100.0 % (2 of 2)" in told and told.endswith(
        "0 of them without a reason in survivors.toml"
    )


def test_every_reason_is_of_a_class():
    written = mutants.read_reasons(Path(mutants.SURVIVORS))
    assert set(written.values()) <= {"equivalent", "speed", "diagnostic", "crash", "suite"}
