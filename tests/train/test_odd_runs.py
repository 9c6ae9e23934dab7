"""Odd things done to a run: links, a directory that goes, clocks that jump, and what changed before it was resumed."""

import random
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import own
from detonation import whole_files
from detonation.checkpoint.files import disk
from detonation.checkpoint.shard_saver import NotSaved
from detonation.cluster.processes.failure import WorldError
from detonation.core.link import PeerLost
from detonation.data import Data
from detonation.data.text import text
from detonation.train.loop import checkpoints, checks
from detonation.train.loop.checkpoints import (
    _continue_stream,
    _examples_of_step,
    _other_data,
    _require_same_optimizer,
)
from detonation.train.output import metrics
from detonation.train.output.directory import RunDirectory, Unwritable, check_free
from detonation.train.run import worker
from detonation.train.run.elastic_run import SetUp


def test_a_link_is_the_directory_it_leads_to_and_one_to_nowhere_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    with pytest.raises(
        ValueError,
        match=r"link' is a symbolic link without a target: create the target, or choose another --out",
    ):
        check_free(link, resume=False)
    (tmp_path / "disk").mkdir()
    check_free(link, resume=False)
    held = RunDirectory(link)
    with pytest.raises(ValueError, match="in use by process"):
        check_free(tmp_path / "disk", resume=False)
    held.close()


def test_a_start_that_was_killed_while_it_looked_around_leaves_the_directory_free(tmp_path):
    (tmp_path / f"{whole_files.PROBE}0123-7").touch()
    check_free(tmp_path, resume=False)


@pytest.mark.long  # no branch of its own
def test_a_checkpoint_that_was_moved_and_linked_is_removed_as_a_link(train, tmp_path):
    train("run", stop_after=2)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000002").rename(tmp_path / "archive")
    (checkpoints / "step-000002").symlink_to(tmp_path / "archive")
    train("run", "train.keep=1", resume=True)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000006"]
    assert len(list((tmp_path / "archive").iterdir())) == 3, "what the link led to is as it was"


def test_a_metrics_file_that_was_removed_is_missed_at_the_end(tmp_path):
    file = metrics.MetricsFile(tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").unlink()
    file.write(metrics.Record(1, loss=1.5, lr=0.1, seconds=0.2, bytes_sent=10))
    with pytest.raises(Unwritable, match=r"run\.jsonl: it was removed while the run wrote it"):
        file.close()


@pytest.mark.long_cases("<lambda>1")
@pytest.mark.parametrize(
    "damage",
    [lambda lines: [*lines[:3], lines[3][:30]], lambda lines: [lines[0], "\0\n", *lines[2:]]],
)
def test_a_run_goes_on_without_the_damaged_lines_of_its_metrics(train, tmp_path, capfd, damage):
    """As a loss of power leaves them."""
    whole = train("whole")[0]
    train("run", stop_after=4)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(damage(file.read_text().splitlines(keepends=True))))
    capfd.readouterr()
    assert train("run", resume=True)[0]["fingerprint"] == whole["fingerprint"]
    said = f"\nwarning: damaged lines in {file}, which are dropped: 1; training goes on\n"
    assert said in capfd.readouterr().out
    assert len(metrics.read_metrics(file)) == 5


@pytest.mark.long  # no branch of its own
def test_a_run_goes_on_without_its_metrics_and_says_so(train, tmp_path, capfd):
    whole = train("whole")[0]
    train("run", stop_after=4)
    file = tmp_path / "run" / "metrics.jsonl"
    file.unlink()
    assert train("run", resume=True)[0]["fingerprint"] == whole["fingerprint"]
    assert (
        f"{file} has no record of the first 4 steps: the summary covers only later steps"
        in capfd.readouterr().out
    )


def test_a_run_whose_steps_are_taken_and_whose_metrics_are_lost_is_told_so(train, tmp_path):
    train("run")
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(
        WorldError,
        match=r"all 6 steps are trained, but .*metrics\.jsonl has no record of step 6",
    ):
        train("run", resume=True)


def test_the_last_record_that_is_left_is_not_taken_for_the_end(train, tmp_path):
    """A machine that fails may have the checkpoint of a step and not its record."""
    train("run", "train.validate_every=3")
    (tmp_path / "run" / "summary.json").unlink()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(WorldError, match="has no record of step 6: give more --steps"):
        train("run", "train.validate_every=3", resume=True)


def test_records_are_on_the_disk_before_each_checkpoint(train, tmp_path, monkeypatch):
    synced = []
    sync = metrics.MetricsFile.sync

    def noted(self):
        synced.append(len(metrics.read_metrics(self.path)))
        sync(self)

    def stop_before_the_second(operation, path):
        if operation == "create" and ".step-000004.part" in str(path):
            (tmp_path / "synced").write_text(str(synced))

    monkeypatch.setattr(metrics.MetricsFile, "sync", noted)
    monkeypatch.setattr(disk, "observer", stop_before_the_second)
    train("run", "train.checkpoint_every=2", "train.steps=4")
    assert (tmp_path / "synced").read_text() == "[2, 4]"


@pytest.mark.parametrize(
    "scheme",
    [
        {"name": "diloco", "every": 4},
        {"name": "streaming_diloco", "every": 4, "fragments": 2, "delay": 1},
    ],
)
def test_a_run_that_stopped_within_a_round_is_no_whole_run(train, scheme):
    rounds = {"scheme": scheme}
    sets = ("train.validate_every=3",)
    train("run", *sets, tables=rounds, stop_after=3)
    with pytest.raises(WorldError, match="stopped at step 3 within a round"):
        train("run", *sets, "train.steps=3", tables=rounds, resume=True)
    ends = train("run", *sets, tables=rounds, resume=True)
    assert ends[0]["replicas_equal"]


def test_a_directory_that_goes_under_a_run_is_told_and_the_last_state_is_saved(
    train, tmp_path, monkeypatch
):
    """It goes at the first save, which fails; the save at the end makes it again."""

    def remove(operation, path):
        if operation == "create" and ".step-000002.part" in str(path):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    monkeypatch.setattr(disk, "observer", remove)
    with pytest.raises(WorldError, match=r"metrics\.jsonl: it was removed while the run wrote it"):
        train("run", "train.checkpoint_every=2", "train.steps=4")
    assert (tmp_path / "run" / "checkpoints" / "step-000004" / "manifest.json").is_file()


@pytest.mark.long  # no branch of its own
def test_clocks_that_jump_change_nothing(train, monkeypatch, tmp_path):
    still = train("still", "train.checkpoint_every=2")[0]
    rng, now = random.Random(3), time.time()
    monkeypatch.setattr(time, "time", lambda: now + rng.uniform(-1e6, 1e6))
    jumping = train("jumping", "train.checkpoint_every=2", stop_after=3)[0]
    assert jumping["stopped_after"] == 3
    assert (
        train("jumping", "train.checkpoint_every=2", resume=True)[0]["fingerprint"]
        == still["fingerprint"]
    )
    assert not list(Path(tmp_path / "jumping").glob("*.part"))


def test_what_changed_since_the_checkpoint_is_told_in_a_line(train, tmp_path, capfd):
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    tables = {"data": {"task": "text", "source": str(source), "context": 32}}
    train("run", tables=tables, stop_after=2)
    capfd.readouterr()
    train("run", tables=tables, resume=True, stop_after=3)
    assert "changed since" not in capfd.readouterr().out
    train(
        "run", "optimizer.lr=0.001", "train.batch_size=2", tables=tables, resume=True, stop_after=4
    )
    said = capfd.readouterr().out
    assert (
        "\nchanged since the checkpoint: optimizer.lr is 0.001, was 0.003; train.batch_size is 2, was 4\n"
        in said
    )
    assert re.search(r"\na step has (\d+) examples, had (\d+): train.accumulate", said)
    text = source.read_text()
    for changed, told in (
        (text[1:] + "T", "training examples as before, but with other contents"),
        (text * 2, "training examples, was "),
    ):
        source.write_text(changed)
        checks._load_data.cache_clear()
        train(
            "run",
            "optimizer.lr=0.001",
            "train.batch_size=2",
            tables=tables,
            resume=True,
            stop_after=4,
        )
        said = capfd.readouterr().out
        assert "\nthe data have changed since the checkpoint: " in said and told in said


class Numbers:
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, indices):
        return {"x": self.values[indices]}


def marked(count, changed=(), files=None):
    """The mark of `count` numbers, of which some are changed."""
    values = torch.arange(count)
    values[list(changed)] *= -1
    data = Data("own", "own", "images", Numbers(values), Numbers(values), files=files or {})
    return checks.mark_of_data(data)


@pytest.mark.parametrize("changed", [range(100, 200), range(700, 720), range(5, 1000, 10)])
def test_data_of_which_a_part_has_changed_are_told_from_those_of_the_checkpoint(changed):
    saved = marked(1000)
    assert _other_data(saved, marked(1000)) == []
    (line,) = _other_data(saved, marked(1000, changed))
    assert "1000 training examples as before, but with other contents" in line


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a": 1, "b": 2}, None),
        ({"a": 1, "b": 2, "c": 3}, "3 files, was 2"),
        ({"a": 1, "b": 3}, "2 files as before, but with other contents"),
        ({"b": 2, "a": 1}, "2 files as before, but with other contents"),
    ],
)
def test_a_stream_whose_files_have_changed_is_told(files, told):
    lines = _other_data(marked(9, files={"a": 1, "b": 2}), marked(9, files=files))
    end = "from now on the stream may skip or repeat documents"
    expected = [f"the data have changed since the checkpoint: {told}; {end}"]
    assert lines == (expected if told else [])
    assert _other_data(marked(9), marked(9, files=files)) == []  # of a build without files


def test_a_stream_without_its_saved_position_is_read_again(tmp_path):
    pytest.importorskip("datasets")
    source = own.json_lines(tmp_path / "a.jsonl", count=300)
    stream = text(str(source), context=16, streaming=True)
    session = SimpleNamespace(data=stream, rank=0, world_size=1)
    drawn = [stream.train.draw(step, 0, 1, 2)["input_ids"] for step in range(9)]
    foreign = stream.train.position(0, 1)
    assert _continue_stream(session, [foreign]) == []
    foreign["before"]["examples_iterable"] = {"shards": 1}
    (line,) = _continue_stream(session, [foreign])
    assert line.startswith("the stream is read again up to this step, because {'at': 18,")
    assert torch.equal(stream.train.draw(8, 0, 1, 2)["input_ids"], drawn[8])


@pytest.mark.parametrize("saved", [1000, [1000, "hash of 3 examples"]])
def test_a_checkpoint_of_a_build_that_hashed_fewer_examples_tells_of_another_count(saved):
    assert _other_data(saved, marked(1000)) == _other_data(None, marked(10)) == []
    (line,) = _other_data(saved, marked(999))
    assert "999 training examples, was 1000" in line


@pytest.mark.parametrize(("ratio", "refused"), [(1.0, False), (30.0, True)])
def test_a_checkpoint_of_a_build_without_a_second_rate_had_one_rate(ratio, refused):
    was = {"name": "AdamW", "lr": 3e-3}
    now = {**was, "embedding_lr_ratio": ratio}
    expected = pytest.raises(ValueError, match=r"embedding_lr_ratio 1\.0, this run has 30")
    with expected if refused else nullcontext():
        _require_same_optimizer(Path("step-000002"), was, now)


def test_a_setting_of_the_optimizer_that_the_checkpoint_would_override_is_refused(train):
    train("run", stop_after=2)
    message = "was written with optimizer.weight_decay None, this run has 0.5: resume with the same"
    with pytest.raises(WorldError, match=message):
        train("run", "optimizer.weight_decay=0.5", resume=True)


@pytest.mark.parametrize(("option", "refused"), [("weight_decay", True), ("lr", False)])
def test_an_option_that_the_checkpoint_would_override_is_refused_also_by_another_name(
    option, refused
):
    """Another name may stand for the same class, whose state is then loaded with its options."""
    was = {"name": "AdamW", "lr": 0.1, "weight_decay": 0.1}
    now = {**was, "name": "mine:adam", option: 0.9}
    with pytest.raises(ValueError, match=f"optimizer.{option}") if refused else nullcontext():
        _require_same_optimizer(Path("step-000002"), was, now)


def test_the_examples_of_a_step_are_counted_over_unequal_nodes():
    train = {"batch_size": 4, "accumulate": 2}
    nodes = {"replicas": 2, "shards": 1, "nodes": [2, 1]}
    alike = {"replicas": 3, "shards": 1, "nodes": []}
    assert _examples_of_step({"train": train, "mesh": nodes}) == 24
    assert _examples_of_step({"train": train, "mesh": alike}) == 24


def raising(*errors):
    """A function that raises each of `errors` in turn, and then returns "done"."""
    left = [*errors]

    def act(*_):
        if left:
            raise left.pop(0)
        return "done"

    return act


def counting():
    """A session whose optimizer counts how often it synchronizes."""
    session = SimpleNamespace(optimizer=SimpleNamespace(times=0))

    def synchronize():
        session.optimizer.times += 1

    session.optimizer.synchronize = synchronize
    return session


def test_the_last_checkpoint_is_saved_again_after_a_loss(monkeypatch):
    monkeypatch.setattr(checkpoints, "save_async", lambda *_: None)
    session, lost = counting(), NotSaved("step-000004 failed", lost=True)
    saves = SimpleNamespace(wait=raising(lost, lost))
    assert checkpoints.save_now(session, saves, checkpoints.Counts()) == "done"
    assert session.optimizer.times == 2


def test_a_run_begins_again_after_a_loss_only_before_its_first_step():
    set_up = SetUp("", None)
    session = counting()
    assert worker._trained(raising(PeerLost("lost")), session, set_up) == "done"
    set_up.done()
    with pytest.raises(PeerLost):
        worker._trained(raising(PeerLost("lost")), session, set_up)
    assert session.optimizer.times == 1
