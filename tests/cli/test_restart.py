"""A run that its launcher starts again goes on by itself, and ends where an uninterrupted one does."""

import json
import os
import signal
import tomllib

import pytest
import torch.distributed.run

from commands import Command, launched, write_recipe
from covering import some

pytestmark = pytest.mark.usefixtures("soon")

SETS = (
    "--replicas",
    2,
    "--shards",
    1,
    "--checkpoint-every",
    2,
    "--set",
    "train.steps=30",
    "peers.silence_s=3",
)
SAME = ("fingerprint", "train_loss", "val_loss", "bytes_sent_per_step", "steps")


def result(run):
    """What must be the same however often a run was interrupted."""
    summary = json.loads((run / "summary.json").read_text())
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {key: summary[key] for key in SAME}, losses


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "tiny.toml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    command = Command(
        folder, "train", write_recipe(folder / "tiny.toml"), "--out", folder / "run", *SETS
    )
    assert command.wait() == 0, command.stderr
    return result(folder / "run")


def torchrun(arguments):
    """`torchrun arguments...`, whose ranks are interpreters of their own."""
    torch.distributed.run.main(
        ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *arguments]
    )
    return 0


@pytest.mark.long
def test_under_torchrun_a_killed_rank_starts_all_again_from_the_last_checkpoint(
    tmp_path, recipe, whole
):
    out = tmp_path / "run"
    agent = Command(
        tmp_path, "-m", "detonation", "train", recipe, "--out", out, *SETS, program=torchrun
    )
    agent.wait_for_step(7)
    os.kill(agent.ranks[1], signal.SIGKILL)
    assert agent.wait() == 0, agent.stderr
    assert "rank 1 (replica 1, shard 0) has not been heard of" in agent.errors
    assert "\nresumed after step " in agent.stdout
    assert result(out) == whole


@some("saved", [True, False], keep=[False], ids=["after a checkpoint", "before the first"])
def test_a_restart_goes_on_or_starts_and_a_finished_run_stays(tmp_path, recipe, whole, saved):
    out = tmp_path / "run"
    train = (
        ("train", recipe, "--out", out, *SETS)
        if saved
        else ("train", recipe, "--out", out, *SETS[:4], *SETS[6:])
    )
    restarts = iter(range(3))

    def start():
        env = {"TORCHELASTIC_MAX_RESTARTS": 3, "TORCHELASTIC_RESTART_COUNT": next(restarts)}
        return launched(tmp_path, 2, *train, env=env)

    ranks = start()
    ranks[0].wait_for_step(5)
    victim = 1 if saved else 0  # the latter keeps the store, the run directory and its lock
    os.kill(ranks[victim].pid, signal.SIGKILL)
    assert ranks[1 - victim].wait() == 1
    assert ranks[victim].wait() == -signal.SIGKILL  # so that it holds no lock
    ranks = start()
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert ("no checkpoint was saved yet: starting from the beginning" in ranks[0].stdout) == (
        not saved
    )
    assert result(out) == whole
    ranks = start()
    assert [rank.wait() for rank in ranks] == [0, 0]
    alone = Command(tmp_path, *train, env={"SLURM_RESTART_COUNT": 1})
    assert alone.wait() == 0, alone.errors
    assert result(out) == whole


@pytest.mark.parametrize("by", ["a launcher", pytest.param("itself", marks=pytest.mark.long)])
def test_a_run_in_epochs_keeps_its_steps_in_a_larger_world(tmp_path, recipe, by):
    out = tmp_path / "run"
    train = (
        "train",
        recipe,
        "--out",
        out,
        "--shards",
        1,
        "--checkpoint-every",
        2,
        "--set",
        "train.steps=0",
    )
    alone = Command(tmp_path, *train, "train.epochs=0.002", "--replicas", 1, "--stop-after", 8)
    assert alone.wait() == 0, alone.errors
    steps = tomllib.loads((out / "config.toml").read_text())["train"]["steps"]
    assert 8 < steps < 16, "as many as two replicas take in half as many are not enough"
    again = (*train, "train.epochs=0.002", "--replicas", 2, "--resume")
    ranks = (
        [Command(tmp_path / "both", *again)] if by == "itself" else launched(tmp_path, 2, *again)
    )
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), ranks[0].errors
    assert json.loads((out / "summary.json").read_text())["steps"] == steps


def test_what_is_there_is_kept_from_a_run_that_may_start(tmp_path, recipe):
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").touch()
    train = ("train", recipe, "--out", out, "--resume", "--replicas", 1, "--shards", 1)
    command = Command(tmp_path, *train, env={"TORCHELASTIC_MAX_RESTARTS": 3})
    assert command.wait() == 2
    assert "is not empty: choose another --out" in command.errors
    command = Command(tmp_path, *train[:2], env={"SLURM_RESTART_COUNT": 1})
    assert command.wait() == 2
    assert "a run that its launcher may start again needs --out" in command.errors
