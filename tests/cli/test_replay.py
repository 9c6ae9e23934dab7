"""`detonation follow DIR`: a run's log and its checkpoints are any step since, for every way of saving them."""

import json
import shutil
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest

from commands import Command, write_recipe
from detonation.log import continuity
from detonation.log.continuity import log_files
from detonation.log.records import STEP, whole_records
from detonation.train.loop import checkpoints, checks
from detonation.train.output import directory
from detonation.train.run import run_directory
from detonation.train.run.log_check import checked_log


def detonation(folder, *arguments):
    command = Command(folder, *arguments)
    command.wait()
    return command


def last_line(text):
    return json.loads(text.splitlines()[-1])


@pytest.fixture(scope="module", params=["demo", pytest.param("diloco", marks=pytest.mark.long)])
def run(request, tmp_path_factory):
    """A run of six steps with a log, without its last checkpoint, and its summary."""
    folder = tmp_path_factory.mktemp(request.param)
    recipe, out = write_recipe(folder / "tiny.toml"), folder / "run"
    rounds = ["scheme.every=3"] if request.param == "diloco" else []
    flags = ["--shards", 2, "--checkpoint-every", 2, "--log", "--out", out, "--json"]
    done = detonation(
        folder, "train", recipe, "--scheme", request.param, "--set", "seed=3", *rounds, *flags
    )
    assert done.code == 0, done.stderr
    shutil.rmtree(out / "checkpoints" / "step-000006")
    return folder, recipe, out, last_line(done.stdout)


def test_a_replay_ends_with_the_weights_of_the_run(run):
    folder, _, out, summary = run
    done = detonation(folder, "follow", out, "--json")
    assert done.code == 0, done.stderr
    assert last_line(done.stdout) == {
        "step": 6,
        "replayed": 2,
        "fingerprint": summary["fingerprint"],
    }


def test_a_replay_needs_no_data(run, tmp_path, monkeypatch):
    """A follower may run on a machine without the data of the training."""
    folder, _, out, summary = run

    def refuse(*given):
        raise ValueError("there are no data here")

    enter = partial(monkeypatch.setattr, checks, "_load_data", refuse)
    done = Command(folder, "follow", out, "--out", tmp_path / "alone", "--json", enter=enter)
    assert done.wait() == 0, done.stderr
    assert last_line(done.stdout)["fingerprint"] == summary["fingerprint"]


def test_a_checkpoint_that_the_run_removes_when_it_was_found_is_looked_for_again(
    run, tmp_path, monkeypatch
):
    """A run that trains keeps only the newest ones."""
    folder, _, out, summary = run
    copied, load = shutil.copytree(out, tmp_path / "run"), checkpoints.load_found

    def late(found, *given):
        if found.manifest.step == 4:
            shutil.rmtree(found.path, ignore_errors=True)
        return load(found, *given)

    enter = partial(monkeypatch.setattr, checkpoints, "load_found", late)
    done = Command(folder, "follow", copied, "--json", enter=enter)
    assert done.wait() == 0, done.stderr
    found = {"step": 6, "replayed": 4, "fingerprint": summary["fingerprint"]}
    assert last_line(done.stdout) == found


def test_verify_reads_logs_too(run, tmp_path):
    folder, _, out, _ = run
    done = detonation(folder, "verify", out, "--json")
    updates = last_line(done.stdout)["updates"]
    assert done.code == 0 and [
        (file["first"], file["last"], file["fault"]) for file in updates
    ] == [(first, last, "") for _ in (0, 1) for first, last in ((3, 4), (5, 6))]
    copied = shutil.copytree(out, tmp_path / "run")
    path = copied / "updates" / "replica0-shard0-2.updates"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = detonation(folder, "verify", copied)
    assert done.code == 1 and f"{path} is damaged at byte" in done.stdout


def emptied(updates):
    (updates / "replica0-shard0-4.updates").write_bytes(b"")


def shortened(updates):
    path = updates / "replica0-shard1-4.updates"
    first, *_ = whole_records(path)
    path.write_bytes(path.read_bytes()[: first.size])


def missing(updates):
    (updates / "replica0-shard0-4.updates").unlink()


def all_missing(updates):
    for path in updates.glob("replica0-shard1-*"):
        path.unlink()


def with_a_gap(updates):
    path = updates / "replica0-shard0-2.updates"
    ends = list(accumulate(record.size for record in whole_records(path)))
    steps = [record.step for record in whole_records(path) if record.kind == STEP]
    assert steps == [3, 4]
    path.write_bytes(path.read_bytes()[: ends[len(ends) // 2 - 1]])


def a_link(updates):
    path = updates / "replica0-shard0-4.updates"
    path.rename(updates.parent / "elsewhere")
    path.symlink_to(updates.parent / "elsewhere")


LACKING = {
    emptied: "shard0 in {} ends after step 4, and 6 steps were measured: replica0-shard0-4",
    shortened: "shard1 in {} ends after step 4, and 6 steps were measured: replica0-shard1-4",
    missing: "shard0 in {} ends after step 4, and 6 steps were measured",
    all_missing: "the log of replica0-shard1 in {} is missing: 6 steps were measured",
    with_a_gap: "replica0-shard0 in {} lacks the steps 3 to 4: replica0-shard0-2.updates was",
    a_link: "replica0-shard0-4.updates cannot be read: it is a link, which is not followed",
}


@pytest.mark.parametrize("damage", LACKING, ids=lambda damage: damage.__name__)
def test_verify_tells_what_a_log_lacks(run, tmp_path, damage, monkeypatch):
    monkeypatch.setattr(continuity, "LATE_STEPS", 1)  # a run of six steps has no more to lose
    copied = shutil.copytree(run[2], tmp_path / "run")
    damage(copied / "updates")
    faults = said_by_verify(copied)
    assert any(LACKING[damage].format(copied / "updates") in fault for fault in faults), faults


def said_by_verify(run):
    files, faults = checked_log(run, saved=6)
    return [*filter(None, (file.fault for file in files)), *faults]


def test_the_torn_end_of_a_kill_is_no_fault(run, tmp_path):
    copied = shutil.copytree(run[2], tmp_path / "run")
    path = copied / "updates" / "replica0-shard0-4.updates"
    path.write_bytes(path.read_bytes()[:-3])
    assert said_by_verify(copied) == []
    done = detonation(run[0], "verify", copied)
    assert done.code == 0 and "bytes of a step that was not finished" in done.stdout


def test_the_checkpoint_that_it_writes_is_whole_and_goes_on(run, tmp_path):
    folder, recipe, out, summary = run
    done = detonation(folder, "follow", out, "--to", 5, "--out", tmp_path / "at-5")
    assert done.code == 0 and done.stdout.startswith("step 5, 1 steps replayed, fingerprint "), (
        done.stderr
    )
    assert detonation(folder, "verify", tmp_path / "at-5").code == 0
    rounds = ["scheme.every=3"] if "diloco" in summary["scheme"] else []
    flags = ["--shards", 2, "--out", tmp_path / "at-5", "--resume", "--json"]
    done = detonation(
        folder, "train", recipe, "--scheme", summary["scheme"], "--set", "seed=3", *rounds, *flags
    )
    assert done.code == 0, done.stderr
    assert last_line(done.stdout)["steps"] == 6 and last_line(done.stdout)["replicas_equal"]
    assert len((tmp_path / "at-5" / "metrics.jsonl").read_text().splitlines()) == 6


def killed(out, to):
    """A copy of a run, as if all its machines were gone in step 6: without its last checkpoint, and a torn log."""
    run = shutil.copytree(out, to / "run")
    (run / "summary.json").unlink()
    for path in run.glob("updates/replica0-shard*-4.updates"):
        content = path.read_bytes()
        path.write_bytes(content[: 3 * len(content) // 4])
    return run


@pytest.mark.parametrize(
    "more", [[], pytest.param(["--replicas", 3, "--elastic"], marks=pytest.mark.long)]
)
def test_a_run_that_lost_all_its_machines_goes_on_after_the_last_step_of_its_log(
    run, more, tmp_path
):
    """It draws no batch again but for that of the step under way, and its own log goes on."""
    folder, recipe, out, summary = run
    out = killed(out, tmp_path)
    rounds = ["scheme.every=3"] if "diloco" in summary["scheme"] else []
    flags = ["--shards", 2, *more, "--checkpoint-every", 2, "--log", "--out", out, "--json"]
    set_up = ["--scheme", summary["scheme"].partition("(")[0], "--set", "seed=3", *rounds]
    done = detonation(folder, "train", recipe, *set_up, *flags, "--resume")
    assert done.code == 0, done.stderr
    goes_on = [line for line in done.stderr.splitlines() if "of the log follow" in line]
    said = "1 steps of the log follow: training goes on after step 5, with no unsent momentum"
    assert goes_on == (
        [] if rounds else [said]
    )  # the last round ended after three steps, before the checkpoint
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 7)] and last_line(done.stdout)["replicas_equal"]
    logged = [
        (log.begun + 1, log.last) for log in log_files(out / "updates") if "shard0" in log.path.name
    ]
    assert logged == ([(3, 4), (5, 6)] if rounds else [(3, 4), (5, 5), (6, 6)])


def test_a_log_that_does_not_begin_with_the_checkpoint_is_of_another_training(
    tmp_path, monkeypatch
):
    """As where a run was resumed without one, and then with: its steps would be those of other weights."""
    monkeypatch.setattr(run_directory, "replay_together", lambda *_: pytest.fail("it was replayed"))
    (tmp_path / "updates").mkdir()
    (tmp_path / "updates" / "replica0-shard0-3.updates").write_text("")
    texts = SimpleNamespace(broadcast=lambda text: text)
    config = SimpleNamespace(train=SimpleNamespace(steps=9))
    session = SimpleNamespace(
        optimizer=SimpleNamespace(step_count=4),
        world=SimpleNamespace(texts=lambda: texts),
        config=config,
    )
    assert run_directory.replay_rest(session, tmp_path, directory.log_starts(tmp_path), False) == []


def test_steps_that_are_not_there_are_said_in_one_line(run, tmp_path):
    folder, _, out, _ = run
    for flags, said in (
        (
            ["--to", 1],
            f"step 1 is too old: the log in {out / 'updates'} begins after 2 steps; give --to 2 or a later step",
        ),
        (["--to", 9], "ends after step 6, before step 9"),
        (["--out", out], "is not empty"),
    ):
        done = detonation(folder, "follow", out, *flags)
        assert done.code == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )
    (tmp_path / "config.toml").write_text((out / "config.toml").read_text())
    assert "train with --log" in detonation(folder, "follow", tmp_path).stderr
    assert "holds no run" in detonation(folder, "follow", tmp_path / "nothing").stderr
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "config.toml").write_bytes(b"\xff\x00")
    assert (
        "binary holds no run: config.toml: 'utf-8' codec"
        in detonation(folder, "follow", tmp_path / "binary").stderr
    )


def test_a_run_of_levels_or_of_none_keeps_no_log(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    done = detonation(
        tmp_path, "train", recipe, "--scheme", "none", "--log", "--out", tmp_path / "run"
    )
    assert done.code == 2 and "train.log_updates" in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.long  # no branch of its own
def test_a_run_that_is_killed_has_left_whole_steps(tmp_path):
    """Not a byte is asked of the disk, and nobody is asked to stop."""
    recipe = write_recipe(tmp_path / "tiny.toml")
    flags = ["--steps", 400, "--log"]
    killed = Command(tmp_path / "killed", "train", recipe, *flags, "--out", tmp_path / "first")
    killed.wait_for_step(5)
    killed.kill()
    whole = detonation(
        tmp_path, "train", recipe, *flags, "--stop-after", 20, "--out", tmp_path / "second"
    )
    assert whole.code == 0, whole.stderr
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    found = last_line(detonation(tmp_path, "follow", tmp_path / "first", "--json").stdout)
    seen = min(found["step"], 20)
    ends = [
        last_line(detonation(tmp_path, "follow", tmp_path / run, "--to", seen, "--json").stdout)[
            "fingerprint"
        ]
        for run in ("first", "second")
    ]
    assert found["step"] >= 5 and ends[0] == ends[1]


def test_a_run_that_began_with_weights_is_replayed_from_them(run, tmp_path):
    folder, recipe, out, summary = run
    start = shutil.copytree(out, tmp_path / "start")
    flags = [
        "--scheme",
        summary["scheme"],
        "--init-from",
        start,
        "--log",
        "--out",
        tmp_path / "run",
        "--json",
    ]
    trained = detonation(folder, "train", recipe, *flags)
    assert trained.code == 0, trained.stderr
    checkpoints = (tmp_path / "run" / "checkpoints").rename(tmp_path / "aside")
    done = detonation(folder, "follow", tmp_path / "run", "--json")
    assert done.code == 0, done.stderr
    assert last_line(done.stdout)["fingerprint"] == last_line(trained.stdout)["fingerprint"]
    checkpoints.rename(tmp_path / "run" / "checkpoints")
    shutil.rmtree(start)  # which a replay from a checkpoint does not read
    done = detonation(folder, "follow", tmp_path / "run", "--json")
    assert done.code == 0, done.stderr
    assert last_line(done.stdout) == {
        "step": 6,
        "replayed": 0,
        "fingerprint": last_line(trained.stdout)["fingerprint"],
    }
