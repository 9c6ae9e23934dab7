"""`detonation follow`: the weights of a run elsewhere, through a restart of that run, and as a standby of it."""

import json
import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import detonation as dt
from commands import Command, free_port, write_recipe
from detonation.cli.command import run_command
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.processes import waiting
from detonation.feed import publisher, stream
from detonation.train.recipe.resolve import from_plain, read_layers, to_plain
from detonation.train.recipe.tables import from_table, to_table
from detonation.train.verbs import follow as follow_verb

SECRET = {"DETONATION_TOKEN": "a token for tests only"}


def last_line(text):
    return json.loads(text.splitlines()[-1])


def test_a_run_is_followed_through_its_restart_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(
        stream, "PAUSES_S", (0.02,)
    )  # it comes again at once, so that the run may be short
    recipe, address = (
        write_recipe(tmp_path / "tiny.toml"),
        f"127.0.0.1:{free_port(2)}",
    )  # one per shard
    train = ["train", recipe, "--shards", 2, "--out", tmp_path / "run", "--publish", address]
    clip = ["--set", "train.clip=0.1"]
    first = Command(tmp_path / "first", *train, "--steps", 100_000, *clip, env=SECRET)
    first.wait_for_step(2)
    standby = ["follow", address, "--out", tmp_path / "standby", "--every", 10, "--keep", 2]
    follower = Command(tmp_path / "follower", *standby, env=SECRET)
    follower.wait_for_step(2)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 0, first.stderr
    stopped = int(next((tmp_path / "run" / "checkpoints").iterdir()).name.removeprefix("step-"))
    last = stopped + 20
    more = ["--steps", last, "--resume", "--json"]
    end = publisher.Feed.end

    def waits(feed, what, optimizer):
        while optimizer.step_count == last - 10 and not feed.followers:
            time.sleep(0.01)
        end(feed, what, optimizer)

    enter = partial(
        monkeypatch.setattr, publisher.Feed, "end", waits
    )  # otherwise it may end before it is followed
    second = Command(tmp_path / "second", *train, *clip, *more, env=SECRET, enter=enter)
    assert second.wait() == 0, second.stderr
    assert follower.wait() == 0, follower.stderr
    summary, said = last_line(second.stdout), follower.stdout.splitlines()
    assert any(line.startswith("connected again, at step") for line in said)
    assert said[-1].startswith(
        f"step {last}, fingerprint {summary['fingerprint'][:16]}, checkpoint: "
    )
    kept = sorted(path.name for path in (tmp_path / "standby" / "checkpoints").iterdir())
    assert len(kept) == 2 and kept[-1] == f"step-{last:06}"
    more = [
        "train",
        recipe,
        "--replicas",
        2,
        "--out",
        tmp_path / "standby",
        "--resume",
        "--steps",
        last + 2,
        *clip,
    ]
    resumed = Command(tmp_path / "resumed", *more, "--json")
    assert resumed.wait() == 0, resumed.stderr
    assert last_line(resumed.stdout)["replicas_equal"]


def test_a_wrong_token_or_none_is_said_in_one_line(tmp_path, monkeypatch):
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    train = ["train", recipe, "--out", tmp_path / "run", "--publish", address]
    untold = Command(tmp_path / "untold", *train)
    assert (
        untold.wait() == 2
        and "DETONATION_TOKEN" in untold.stderr
        and not (tmp_path / "run").exists()
    )
    trainer = Command(tmp_path / "trainer", *train, "--steps", 100_000, env=SECRET)
    trainer.wait_for_step(2)
    follow = ["follow", address, "--out", tmp_path / "out"]
    other = Command(
        tmp_path / "other", *follow, env={"DETONATION_TOKEN": "another token, of as many"}
    )
    assert other.wait() == 1 and len(other.stderr.splitlines()) == 1
    assert other.stderr.startswith(
        f"error: cannot follow {address}: the feed has refused the token; give this "
    )
    os.kill(trainer.pid, signal.SIGTERM)
    assert trainer.wait() == 0, trainer.stderr
    at_once = partial(monkeypatch.setattr, follow_verb, "START_S", 0.0)
    nobody = Command(tmp_path / "nobody", *follow, env=SECRET, enter=at_once)
    assert (
        nobody.wait() == 1
        and not (tmp_path / "out").exists()
        and len(nobody.stderr.splitlines()) == 1
    )
    said = f"error: cannot follow {address}: Connection refused; check the address, that train --publish runs there"
    assert nobody.stderr.startswith(said)


def test_a_follower_waits_for_a_trainer_that_starts_after_it(monkeypatch, caplog):
    monkeypatch.setenv(*next(iter(SECRET.items())))
    monkeypatch.setattr(waiting, "MEET_LINE_S", 0.0)
    address, feeds = f"127.0.0.1:{free_port()}", []

    def read_about(address, token):
        try:
            return stream.read_about(address, token)
        except ConnectionRefusedError:  # so that the trainer starts after the first attempt
            model = torch.nn.Linear(2, 1)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = dt.replicate(sgd, model, LoopbackCommunicator(2), dt.full())
            feeds.append(dt.Feed(model, optimizer, address, about={"config": {}}))
            raise

    monkeypatch.setattr(follow_verb, "read_about", read_about)
    assert follow_verb._about(address) == {"config": {}} and len(feeds) == 1
    (line,) = caplog.messages
    assert line.startswith("this follower has waited for 0 s, at most 300, for ")
    assert line.endswith(f"{address}: Connection refused")
    feeds[0].close()


def test_an_unknown_host_is_not_waited_for(monkeypatch):
    monkeypatch.setenv(*next(iter(SECRET.items())))
    with pytest.raises(dt.errors.DetonationError, match=r"cannot follow nobody\.invalid:1: "):
        follow_verb._about("nobody.invalid:1")


def test_a_rank_with_a_gpu_gets_plain_values_since_it_is_no_fork(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path / "tiny.toml")
    settings = to_table(read_layers(recipe, (), mesh={}).config())
    sent = []
    about = {"config": settings, "exported": {"labels": ["no", "yes"]}}
    monkeypatch.setattr(follow_verb, "_about", lambda address: about)
    monkeypatch.setattr(follow_verb, "run_local", lambda *given: sent.append(given[2]) or [{}])
    follow_verb.follow_run(follow_verb.Following("127.0.0.1:1", tmp_path / "standby", keep=2))
    ((asked, config, exported),) = json.loads(json.dumps(sent))
    assert exported == about["exported"]
    assert from_plain(follow_verb.Following, asked).out == tmp_path / "standby"
    assert from_table(config) == from_table(settings)


class LosesItsFeed(SimpleNamespace):
    """A follower that reaches step 5 and step 7, waits twice for its feed, and then loses it."""

    step, joins, ended, trouble, fingerprint = 3, 1, False, "", "f" * 64
    current, waits = True, 0

    def update(self, to, wait_s):
        if self.step < 7:
            self.step += 2
        elif self.waits < 2:
            self.waits += 1
            self.current, self.trouble = False, "10.0.0.1:7000: Connection refused"
        else:
            raise dt.errors.LostFeed("training has ended before its final weights arrived")

    def join(self, axis):
        return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_feed_that_is_gone_is_told_once_and_its_last_weights_are_saved(
    tmp_path, monkeypatch, capsys
):
    settings = to_table(read_layers(write_recipe(tmp_path / "tiny.toml"), (), mesh={}).config())
    saved = []
    follower = LosesItsFeed()
    monkeypatch.setattr(follow_verb, "local_device", lambda: "cpu")
    monkeypatch.setattr(follow_verb, "follow", lambda *_: follower)
    monkeypatch.setattr(follow_verb, "saved_run", lambda *_: saved.append(follower.step))
    asked = to_plain(follow_verb.Following("127.0.0.1:1", tmp_path / "standby", every=100))
    with pytest.raises(dt.errors.LostFeed):
        follow_verb._follow_on_rank(asked, settings, {})
    assert saved == [5, 7]
    line = "waits for the feed after step 7: 10.0.0.1:7000: Connection refused"
    assert capsys.readouterr().out.count(line) == 1


def test_the_library_has_a_function_replay_and_the_command_a_verb_follow(capsys):
    assert run_command(["replay", "run"]) == 2
    assert "unknown verb 'replay', did you mean 'follow'?" in capsys.readouterr().err
