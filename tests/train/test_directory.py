"""The run directory: one writer, nothing overwritten, no half lines."""

import errno
import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from detonation.train.output import metrics
from detonation.train.output.directory import (
    LOCK,
    InUse,
    RunDirectory,
    Unwritable,
    check_free,
    fresh_directory,
    write_text,
)
from detonation.train.run.run_directory import require_earlier


def test_a_second_run_is_told_who_has_the_directory(tmp_path):
    held = RunDirectory(tmp_path)
    with pytest.raises(
        InUse, match=rf"in use by process {os.getpid()} since 20\d\d-.*: wait for it, or choose"
    ):
        check_free(tmp_path, resume=False)
    with pytest.raises(InUse):
        RunDirectory(tmp_path)
    held.close()
    check_free(tmp_path, resume=False)
    RunDirectory(tmp_path).close()


def test_runs_that_begin_in_one_second_have_a_directory_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert len({fresh_directory("quick-lm-demo") for _ in range(3)}) == 3


def test_a_run_that_begins_while_another_looks_has_the_directory(tmp_path, monkeypatch):
    """The other saw no lock, and then the files of the run: it said that they were in the way."""
    exists, begun = Path.exists, []

    def begins(path):
        found = exists(path)
        if path.name == LOCK and not begun:
            begun.append(RunDirectory(tmp_path))
            write_text(tmp_path / "config.toml", "")
        return found

    monkeypatch.setattr(Path, "exists", begins)
    with pytest.raises(InUse):
        check_free(tmp_path, resume=False)
        RunDirectory(tmp_path)
    begun[0].close()


LOG = ["updates/", "updates/replica0-shard0-0.updates"]


@pytest.mark.parametrize(
    ("files", "resume", "message"),
    [
        (
            ["summary.json", "config.toml"],
            False,
            "holds a finished run: choose another --out, or remove it",
        ),
        (
            ["summary.json", "config.toml"],
            True,
            "its summary.json is damaged, and --resume writes it anew",
        ),
        (["config.toml"], False, "is not empty: remove it, or choose another --out"),
        (["config.toml"], True, "which has no checkpoints; remove it, or choose another --out"),
        (
            ["config.toml", *LOG],
            True,
            "which has no checkpoints; add --log to continue from its log of updates",
        ),
        (
            ["config.toml", *LOG],
            False,
            "is not empty: continue it with --resume, or choose another --out",
        ),
        (
            ["config.toml", "checkpoints/"],
            False,
            "is not empty: continue it with --resume, or choose another --out",
        ),
        (["thesis.tex"], False, "is not empty: choose another --out"),
        ([], True, "which has no checkpoints; leave --resume out to start"),
    ],
)
def test_what_is_there_is_not_overwritten(tmp_path, files, resume, message):
    for name in files:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    there = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        check_free(tmp_path, resume)
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        check_free(tmp_path / "file", resume=False)


def record(step):
    return metrics.Record(step, loss=1.5, lr=0.1, seconds=0.2, bytes_sent=10)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record(1))
    written = os.write

    def full(descriptor, data):
        if len(data) > 20:
            return written(descriptor, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file.write(record(2))
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [record(1)]
    with pytest.raises(
        Unwritable, match=r"metrics\.jsonl: No space left on device \(free some space"
    ):
        file.close()
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [record(1)]


def test_a_line_that_found_no_space_is_written_with_the_next_one(tmp_path, monkeypatch):
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl", [record(1)])
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: fail())
        file.write(record(2))
    file.write(record(3))
    file.close()
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [record(1), record(2), record(3)]


def fail():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(record(1).line() + record(2).line()[:20])
    assert metrics.read_metrics(path) == [record(1)]
    metrics.MetricsFile(path, metrics.read_metrics(path)).close()
    assert path.read_text() == record(1).line()


@pytest.mark.parametrize(
    "line", ["{", "3", '{"step": 2}', record(2).line().replace("10", "null"), "\0" * 40, "\xff"]
)
def test_damaged_lines_are_left_out_and_counted(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes((record(1).line() + line.strip() + "\n" + record(3).line()).encode("latin-1"))
    assert metrics.read_metrics(path) == [record(1), record(3)]
    assert metrics.parse_metrics(path.read_text(errors="replace")) == ([record(1), record(3)], 1)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    write_text(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unwritable, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replica_that_joins_is_refused_where_later_checkpoints_are(tmp_path):
    kept = tmp_path / "checkpoints"
    require_earlier(tmp_path, 0)
    for step in (20, 40):
        (kept / f"step-{step:06d}").mkdir(parents=True)
    require_earlier(tmp_path, 40)
    with pytest.raises(ValueError, match=r"step-000040, and the run is at step 39.*another --out"):
        require_earlier(tmp_path, 39)


def test_a_lock_of_garbage_and_a_name_that_cannot_be_are_refused_in_a_line(tmp_path):
    with closing(RunDirectory(tmp_path / "run")):
        (tmp_path / "run" / ".lock").write_bytes(b"[\xff")
        with pytest.raises(InUse, match="is in use by another process: wait for it"):
            RunDirectory(tmp_path / "run")
    with pytest.raises(ValueError, match=r"cannot be opened: File name too long; choose another"):
        check_free(tmp_path / ("x" * 300), resume=False)
