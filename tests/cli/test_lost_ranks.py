"""A rank that is dead, stopped or cut off: all others end with its name, within the limit."""

import os
import re
import signal
import subprocess
import time

import pytest

from commands import Command, free_port, launched, write_recipe

pytestmark = pytest.mark.usefixtures("soon")

LONG = ("--set", "train.steps=100000", "peers.silence_s=3")
REMEDY = " s: ended, stopped or cut off; go on with --resume, unless a launcher restarts the run\n"


@pytest.fixture
def started():
    commands = []
    yield commands
    for command in commands:
        command.kill()


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_stopped_rank_is_named_after_the_limit(started, tmp_path, victim):
    recipe = write_recipe(tmp_path / "tiny.toml")
    command = Command(
        tmp_path, "train", recipe, "--out", tmp_path / "run", "--replicas", 2, "--shards", 2, *LONG
    )
    started.append(command)
    command.wait_for_step(2)
    os.kill(command.ranks[victim], signal.SIGSTOP)
    assert command.wait() == 1
    who, _, silence = command.errors.partition(" has not been heard of for ")
    assert (
        who == f"error: rank {victim} (replica {victim // 2}, shard {victim % 2})"
        and silence.endswith(REMEDY)
    )
    assert float(silence.removesuffix(REMEDY)) >= 3


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_the_ranks_of_a_launcher_end_too_and_one_of_them_tells(started, tmp_path, how):
    recipe = write_recipe(tmp_path / "tiny.toml")
    ranks = launched(
        tmp_path, 4, "train", recipe, "--out", tmp_path / "run", "--replicas", 4, *LONG
    )
    started += ranks
    ranks[0].wait_for_step(2)
    os.kill(ranks[2].pid, signal.Signals[how])
    rest = [rank for rank in ranks if rank is not ranks[2]]
    assert [rank.wait() for rank in rest] == [1, 1, 1]
    told = [rank.errors for rank in rest if rank.errors]
    assert len(told) == 1
    assert told[0].startswith("error: rank 2 (replica 2, shard 0) has not been heard of") and told[
        0
    ].endswith(REMEDY)


def test_when_the_rank_that_keeps_the_store_is_gone_the_others_say_so(started, tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    ranks = launched(
        tmp_path, 3, "train", recipe, "--out", tmp_path / "run", "--replicas", 3, *LONG
    )
    started += ranks
    ranks[0].wait_for_step(2)
    os.kill(ranks[0].pid, signal.SIGKILL)
    for rank in ranks[1:]:
        assert rank.wait() == 1
        assert re.match(
            r"error: .*(the store, which rank 0 at 127\.0\.0\.1:\d+ keeps)", rank.errors
        ), rank.errors


@pytest.fixture
def two_machines():
    """Two network namespaces with a wire between them, 10.93.0.1 and 10.93.0.2: their names, and how to cut it."""
    if os.geteuid() or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("only root can lay a wire between two network namespaces")
    names = [f"dt{os.getpid()}{side}" for side in "ab"]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "wire",
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.93.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield names, lambda: ip("-n", names[0], "link", "set", "wire", "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def addresses_in_use(names):
    """The addresses on which processes listen in each network."""
    found = []
    for name in names:
        shown = subprocess.run(
            ["ip", "netns", "exec", name, "ss", "-Hltn"], capture_output=True, text=True, check=True
        )
        listening = {line.split()[3].rsplit(":", 1)[0] for line in shown.stdout.splitlines()}
        found.append({host.removeprefix("[::ffff:").rstrip("]") for host in listening})
    return found


def test_with_rank_and_world_size_alone_sockets_listen_towards_the_first_rank(
    started, tmp_path, two_machines, monkeypatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    recipe, port = write_recipe(tmp_path / "tiny.toml"), free_port()
    for rank, network in enumerate(two_machines[0]):
        env = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "10.93.0.1", "MASTER_PORT": port}
        train = ("train", recipe, "--out", tmp_path / "run", "--shards", 1, *LONG)
        started.append(Command(tmp_path / f"rank{rank}", *train, env=env, network=network))
    started[0].wait_for_step(2)
    assert addresses_in_use(two_machines[0]) == [{"10.93.0.1"}, {"10.93.0.2"}]


def test_a_cut_wire_is_told_on_both_sides_and_sockets_listen_on_the_wire_alone(
    started, tmp_path, two_machines
):
    names, cut = two_machines
    recipe = write_recipe(tmp_path / "tiny.toml")
    train = [
        "train",
        recipe,
        "--out",
        tmp_path / "run",
        "--replicas",
        4,
        "--shards",
        1,
        "--interface",
        "wire",
        *LONG,
    ]
    networks = [names[0], names[0], names[1], names[1]]
    ranks = launched(tmp_path, 4, *train, networks=networks, address="10.93.0.1")
    started += ranks
    ranks[0].wait_for_step(2)
    assert addresses_in_use(names) == [{"10.93.0.1"}, {"10.93.0.2"}]
    cut()
    assert [rank.wait() for rank in ranks] == [1, 1, 1, 1]
    for rank in ranks[:2]:  # by their environment each has a machine of its own
        assert rank.errors.startswith(
            "error: ranks 2 (replica 2, shard 0), 3 (replica 3, shard 0) have not been heard of"
        )
        assert rank.errors.endswith(REMEDY) and rank.errors.count("error") == 1
    for rank in ranks[2:]:
        assert rank.errors.startswith(
            f"error: rank {ranks.index(rank)} has lost the store, which rank 0 at 10.93.0.1:"
        )


PATIENT = ("--set", "train.steps=100000", "peers.silence_s=6")


def across(started, tmp_path, two_machines, *settings):
    """Two running replicas, one on each machine."""
    recipe = write_recipe(tmp_path / "tiny.toml")
    train = [
        "train",
        recipe,
        "--out",
        tmp_path / "run",
        "--replicas",
        2,
        "--interface",
        "wire",
        *settings,
    ]
    ranks = launched(tmp_path, 2, *train, networks=two_machines[0], address="10.93.0.1")
    started += ranks
    ranks[0].wait_for_step(2)
    return ranks


def goes_on(rank):
    return rank.comes_to_step(rank.stdout.count("\nstep ") + 5)


@pytest.mark.long  # no branch of its own
def test_a_wire_that_comes_back_within_the_limit_costs_nothing_but_time(
    started, tmp_path, two_machines
):
    ranks = across(started, tmp_path, two_machines, *PATIENT)
    for state in ("down", "up"):
        subprocess.run(["ip", "-n", two_machines[0][0], "link", "set", "wire", state], check=True)
        time.sleep(1.5)  # the length of the fault
    assert goes_on(ranks[0]), [rank.errors for rank in ranks]


@pytest.mark.long  # no branch of its own
def test_a_wire_that_carries_one_way_only_ends_both_sides_with_the_cause(
    started, tmp_path, two_machines
):
    ranks = across(started, tmp_path, two_machines, *LONG)
    nobody = ["10.93.0.1", "lladdr", "02:00:00:00:00:01", "dev", "wire", "nud", "permanent"]
    subprocess.run(["ip", "-n", two_machines[0][1], "neigh", "replace", *nobody], check=True)
    assert [rank.wait() for rank in ranks] == [1, 1]
    assert ranks[0].errors.startswith(
        "error: rank 1 (replica 1, shard 0) has not been heard of for "
    )
    assert ranks[1].errors.startswith(
        "error: rank 1 has lost the store, which rank 0 at 10.93.0.1:"
    )


def test_a_rank_that_stands_still_for_less_than_the_limit_goes_on(started, tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    ranks = launched(
        tmp_path, 2, "train", recipe, "--out", tmp_path / "run", "--replicas", 2, *PATIENT
    )
    started += ranks
    ranks[0].wait_for_step(2)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(1.5)  # the length of the fault
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert goes_on(ranks[0]), [rank.errors for rank in ranks]
