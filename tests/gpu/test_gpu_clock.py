"""`make gpu GPU="--minutes 9"`: the order of parts, their time, and what an earlier report spares."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.gpu import __main__ as check
from benchmarks.gpu import clock, each_result, occupancy, profile
from benchmarks.gpu.common import TIME_WAS_UP, Findings, Job, read_findings
from benchmarks.gpu.profile import EXCHANGE, Moved, Span


@pytest.fixture
def now(monkeypatch):
    """A clock of the test, in seconds."""
    time = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(clock.time, "monotonic", lambda: time.seconds)
    return time


def test_parts_come_in_the_order_of_what_they_tell():
    wanted = ["profile", *check.PARTS]
    order = clock.parts_by_worth(wanted)
    assert order[:5] == ["profile", "right", "waiting", "memory", "occupancy"]
    assert sorted(order) == sorted(wanted)
    assert clock.parts_by_worth(["law", "memory"]) == ["memory", "law"]


def test_time_that_a_part_spares_goes_to_the_next_and_the_last_gets_all(now):
    parts = [*clock.SHARES]
    begun = clock.Clock.of(9)
    ends = []
    for number, part in enumerate(parts):
        ends.append(begun.end_of(part, parts[number + 1 :]))
        now.seconds = ends[-1]
    total = sum(clock.SHARES.values())
    assert ends[0] == pytest.approx(100 + 540 * clock.SHARES["profile"] / total)
    assert ends == sorted(ends) and ends[-1] == 100 + 540
    now.seconds = 100
    early = begun.end_of("right", parts[2:])
    assert early - 100 > clock.SHARES["right"] * 540 / total
    assert begun.end_of("fast", ["training"]) == begun.ends_at


def played(folder, said, now, takes=10.0, left_out=()):
    """`ran` in the place of a process: a part that measures one thing."""

    def run(command, env, log, most_s, shown):
        part = command[3]
        now.seconds += takes
        path = folder / f"{part}.json"
        found = read_findings(path)
        said.append((part, list(found.passed), most_s))
        found.passed.append(f"{part} {len(found.passed)}")
        found.checks += 1
        found.left_out = ["the rest"] if part in left_out else []
        found.notes += [f"the rest {TIME_WAS_UP}"] if part in left_out else []
        found.done = True
        found.save()
        return 0

    return run


def test_what_a_report_of_the_same_build_has_is_not_measured_again(now, tmp_path, monkeypatch):
    said = []
    command = ["--minutes", "9", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(clock, "build_of", lambda *_: "one")
    monkeypatch.setattr(check, "build_of", lambda *_: "one")
    monkeypatch.setattr(check, "ran", played(tmp_path, said, now, left_out=("right", "fast")))
    assert check.main(command) == 0
    assert [part for part, _, _ in said] == clock.parts_by_worth(["profile", *check.PARTS])
    assert (tmp_path / "report.html").exists()
    said.clear()
    monkeypatch.setattr(check, "ran", played(tmp_path, said, now))
    assert check.main(command) == 0
    assert [(part, known) for part, known, _ in said] == [("right", ["right 0"]), ("fast", [])]
    found = read_findings(tmp_path / "right.json")
    assert found.complete and found.passed == ["right 0", "right 1"] and not found.notes
    said.clear()
    monkeypatch.setattr(check, "build_of", lambda *_: "two")
    check.main(["profile", *command])
    assert said[0][:2] == ("profile", [])


def test_no_part_outlasts_the_clock_and_each_finding_is_on_disk_by_then(now, tmp_path, monkeypatch):
    said = []
    command = ["--minutes", "9", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(check, "ran", played(tmp_path, said, now, takes=200))
    check.main(command)
    assert [part for part, _, _ in said] == ["profile", "right", "waiting"]
    assert all(most_s <= 540 - 200 * number for number, (_, _, most_s) in enumerate(said))
    assert "(`waiting`)" in (tmp_path / "report.md").read_text()


def test_a_time_that_is_none_is_refused(capsys):
    for minutes in ("0", "-1", "nan"):
        with pytest.raises(SystemExit):
            check.main(["--minutes", minutes, "--device", "cpu"])
    assert "it has to be above 0" in capsys.readouterr().err


def test_tests_that_passed_earlier_are_left_out_before_the_others_are_dealt(tmp_path, monkeypatch):
    known = tmp_path / "known.json"
    known.write_text(json.dumps(["test_a.py::test_1", "test_a.py::test_2"]))
    monkeypatch.setenv("GPU_KNOWN", str(known))
    monkeypatch.setenv("GPU_SHARE", "0/2")
    items = [SimpleNamespace(location=("tests/test_a.py", 1, f"test_{i}")) for i in range(6)]
    each_result.pytest_collection_modifyitems(items)
    assert [item.location[2] for item in items] == ["test_0", "test_4"]


def test_gaps_are_between_kernels_and_never_next_to_the_exchange():
    launches = [Moved("seal", 1), Moved("inspect", 1), Moved("decode (signs)", 1)]
    seen = [
        Span("seal_kernel", 0, 1),
        Span("Memcpy DtoD", 5, 6),
        Span("inspect_kernel", 8, 9),
        Span("decode_kernel", 12, 14),
    ]
    spans = profile.named(seen, launches)
    assert [span.name for span in spans] == ["seal", EXCHANGE, "inspect", "decode (signs)"]
    assert profile.gaps_of(spans) == [0, 0, 0, 3]
    by_clock = profile.with_exchange([Span("seal", 0, 1), Span("inspect", 8, 9)])
    assert [span.name for span in by_clock] == ["seal", EXCHANGE, "inspect"]
    assert profile.gaps_of([Span("scan", 0, 4), Span("encode", 2, 3)]) == [0, 0]


def test_occupancy_tries_the_kernels_that_the_profile_of_this_build_names(tmp_path):
    named = Findings(tmp_path / "profile.json", build="one", kernels=["encode"])
    named.save()
    job = Job(None, True, Findings(tmp_path / "occupancy.json", build="one"), 0)
    assert occupancy.kernels_of_profile(job) == ("encode",)
    job.findings.build = "two"
    assert occupancy.kernels_of_profile(job) == ()
