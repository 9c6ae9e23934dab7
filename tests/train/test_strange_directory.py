"""A run directory may be a stranger's: no link in it is followed, and nothing hangs."""

import errno
import json
import os
import resource
from types import SimpleNamespace

import pytest

from detonation.checkpoint.shard_saver import NotSaved
from detonation.cluster.processes import descriptors, rendezvous
from detonation.report.read import read_begun, read_run, records
from detonation.train.output import directory, metrics
from detonation.train.output.directory import RunDirectory, Unwritable, remedy_of
from detonation.train.run.recorder import Recorder
from detonation.train.verbs import replay_run

WRITTEN = [directory.CONFIG, directory.ENVIRONMENT, directory.SUMMARY, directory.METRICS]


def write_all(run):
    directory.begin_run(run, {"a": 1}, {"plan": 1})
    directory.write_json(run / directory.SUMMARY, {"steps": 1})
    metrics.MetricsFile(run / directory.METRICS).close()


@pytest.mark.parametrize("ending", ["", ".part"])
@pytest.mark.parametrize("name", [*WRITTEN, directory.PLAN])
def test_no_file_of_a_run_is_written_through_a_link(tmp_path, name, ending):
    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / f"{name}{ending}").symlink_to(tmp_path / "victim")
    write_all(run)
    assert (tmp_path / "victim").read_text() == "precious"
    assert (run / name).is_file() and not (run / name).is_symlink()


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "fifo"])
def test_a_lock_is_an_ordinary_file(tmp_path, kind):
    (tmp_path / "victim").write_text("precious")
    lock, run = tmp_path / "run" / directory.LOCK, tmp_path / "run"
    run.mkdir()
    if kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.symlink_to(tmp_path / ("victim" if kind == "link" else "none"))
    with pytest.raises(Unwritable, match=r"remove that entry, or choose another --out"):
        RunDirectory(run)
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", [directory.CHECKPOINTS, directory.UPDATES])
def test_a_run_writes_into_no_folder_elsewhere(tmp_path, name):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"is a link to .*: make .*run itself the link, or choose"):
        RunDirectory(tmp_path / "run")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_read_of_a_run_never_hangs(tmp_path, make):
    for name in WRITTEN:
        make(tmp_path / name)
    for read in (read_begun, read_run):
        with pytest.raises((OSError, ValueError)):
            read(tmp_path)
    with pytest.raises(OSError):
        records(tmp_path / directory.METRICS)
    assert directory.config_in(tmp_path) == {} and directory.steps_finished(tmp_path) == 0


@pytest.mark.parametrize("table", ["a = " + "[" * 50_000, "[a" + ".a" * 20_000 + "]\n"])
def test_texts_that_nest_deeply_are_damaged(tmp_path, table):
    nested = "[" * 100_000
    (tmp_path / directory.CONFIG).write_text(table)
    for name in (directory.SUMMARY, directory.METRICS):
        (tmp_path / name).write_text(nested)
    assert directory.config_in(tmp_path) == {} and directory.steps_finished(tmp_path) == 0
    assert metrics.parse_metrics(nested) == ([], 1)
    with pytest.raises(ValueError, match="it nests too deeply"):
        read_begun(tmp_path)
    with pytest.raises(ValueError, match=r"config\.toml: it nests too deeply; give the --out"):
        replay_run._config_of(tmp_path)


STEP = {"step": 1, "loss": 1.0, "lr": 0.1, "seconds": 0.1, "bytes_sent": 3}
ODD = [
    {"levels": 5},
    {"levels": {"node": "x"}},
    {"val_loss": "x"},
    {"taking": "x"},
    {"waits": [1]},
    {"bytes_sent": 10**400},
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: next(iter(odd)))
def test_a_record_with_a_value_of_another_type_is_damaged(odd):
    (kept,), damaged = metrics.parse_metrics(json.dumps(STEP))
    assert not damaged and metrics.parse_metrics(kept.line()) == ([kept], 0)
    assert metrics.parse_metrics(json.dumps(STEP | odd)) == ([], 1)


REMEDIES = {
    errno.ENOSPC: "free some space or choose another --out",
    errno.EROFS: "mount the disk with write access, or choose another --out",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "give this user write permission, or choose another --out",
    errno.ENOTDIR: "choose another --out",
    errno.ELOOP: "remove that entry, or choose another --out",
}


@pytest.mark.parametrize("number", REMEDIES, ids=errno.errorcode.get)
def test_each_error_of_the_system_has_its_own_remedy(number):
    assert remedy_of(OSError(number, os.strerror(number))) == REMEDIES[number]
    assert remedy_of(NotSaved("checkpoint step-000001 failed", number)) == REMEDIES[number]
    assert str(NotSaved("checkpoint step-000001 failed", number)).endswith("step-000001 failed")


def test_a_run_whose_directory_is_removed_says_so_once(tmp_path):
    file, said = metrics.MetricsFile(tmp_path / "metrics.jsonl"), []
    recorder = SimpleNamespace(_gone=False, _metrics=file, warn=said.extend)
    Recorder._warn_of_removal(recorder)
    assert said == []
    file.path.unlink()
    for _ in range(2):
        Recorder._warn_of_removal(recorder)
    (line,) = said
    assert "metrics.jsonl was removed while the run writes it: checkpoints go into" in line
    with pytest.raises(Unwritable):
        file.close()


def limited(monkeypatch, soft, hard, ranks=1):
    """What the process asks for under these limits."""
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    descriptors.allow_open_files(ranks)
    return asked


def test_a_rank_may_open_as_many_files_as_the_system_lets_it(monkeypatch):
    assert limited(monkeypatch, 1024, 524288) == [(524288, 524288)]
    assert limited(monkeypatch, 1024, resource.RLIM_INFINITY) == [(1 << 20, -1)]
    assert limited(monkeypatch, 4096, 4096) == [] == limited(monkeypatch, 1 << 21, 1 << 22)
    with pytest.raises(
        ValueError, match=r"may open 24 files here, .*: raise the limit with ulimit"
    ):
        limited(monkeypatch, 24, 24)
    assert limited(monkeypatch, 256, 256, ranks=65) == []
    lacking = r"may open 256 files here, but a rank among 66 ranks needs at least 259: .* -n 4144"
    with pytest.raises(ValueError, match=lacking):
        limited(monkeypatch, 256, 256, ranks=66)


def test_ranks_that_other_machines_reach_are_told_of_a_low_limit(monkeypatch):
    """gloo keeps the descriptor of each connection, also of a port scan, and aborts without one, where
    the kernel does not drop connections."""
    monkeypatch.setattr("sys.platform", "darwin")

    def line(soft):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
        return rendezvous.describe_ways(["wg0 (10.10.0.1)"], "10.10.0.1:29500")

    enough = "listening on wg0 (10.10.0.1), towards 10.10.0.1:29500"
    assert {line(4096), line(1 << 20), line(-1)} == {enough}
    assert line(1024) == (
        f"{enough}; a port scan may end the run, because a process may open 1024 files here: raise"
        " the hard limit (ulimit -Hn) to 4096"
    )
