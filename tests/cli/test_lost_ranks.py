"""A rank that is dead, stopped or cut off: all others end with its name within the limit."""

import os
import signal

import pytest

from commands import Command, write_recipe

QUICK = ("--set", "train.steps=100000", "peers.silence_s=2")


@pytest.fixture
def start(tmp_path):
    started = []

    def started_with(*arguments):
        recipe = write_recipe(tmp_path / "tiny.toml")
        started.append(Command(tmp_path, "train", recipe, "--out", tmp_path / "run", *arguments))
        return started[-1]

    yield started_with
    for command in started:
        command.kill()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_rank_is_named_after_the_limit(start, victim):
    command = start("--replicas", 2, "--shards", 2, *QUICK)
    command.wait_for_step(2)
    os.kill(command.ranks[victim], signal.SIGSTOP)
    assert command.wait() == 1
    who = rf"rank {victim} (replica {victim // 2}, shard {victim % 2}) has not been heard of for 2."
    assert command.stderr.startswith(f"error: {who}")
    assert command.stderr.endswith("s: ended, stopped or cut off; go on with --resume\n")
