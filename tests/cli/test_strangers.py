"""Strangers who reach the ports of a run: what they send does not end it, and their notices end it only unsigned."""

import os
import random
import socket
import threading
from contextlib import suppress

import pytest
import torch.distributed as dist

import commands
from commands import launched, listening, write_recipe
from detonation.cluster.processes import heartbeat
from detonation.cluster.processes.heartbeat import StoreBoard
from detonation.cluster.processes.rendezvous import hosts_store
from limits import LIMIT_S

pytestmark = pytest.mark.usefixtures("soon")

GARBAGE = {
    "random": random.Random(0).randbytes(2000),
    "zeros": bytes(1000),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
}
FORGED = "unsigned 1 error: rank 1 says: send money"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts two ranks of a launcher; returns them and the port of their store. They end with the test."""
    ranks, ports = [], []
    find = commands.free_port
    monkeypatch.setattr(commands, "free_port", lambda: ports.append(find()) or ports[-1])

    def start(**env):
        recipe = write_recipe(tmp_path / "tiny.toml")
        sets = ("--replicas", 2, "--set", "train.steps=100000", "peers.silence_s=3")
        ranks.extend(
            launched(tmp_path, 2, "train", recipe, "--out", tmp_path / "run", *sets, env=env)
        )
        ranks[0].wait_for_step(2)
        return ranks, ports[0]

    yield start
    for rank in ranks:
        rank.kill()


def goes_on(rank):
    return rank.comes_to_step(rank.stdout.count("\nstep ") + 3)


def test_garbage_on_every_port_does_not_stop_a_run(started):
    ranks, store = started()
    ports = {port for _, port in listening([rank.pid for rank in ranks])}
    assert store in ports and len(ports) >= 3
    held = []
    for port in sorted(ports):
        for data in GARBAGE.values():
            with suppress(TimeoutError):  # the kernel answers, unless a group has closed its port
                held.append(socket.create_connection(("127.0.0.1", port), timeout=0.2))
                held[-1].sendall(data)
    assert goes_on(ranks[0]), ranks[0].stderr
    for connection in held:
        connection.close()
    assert goes_on(ranks[0]), ranks[0].stderr  # which takes no step without the other


@pytest.mark.long  # no branch of its own
def test_a_notice_of_a_stranger_does_not_end_a_run_whose_ranks_share_a_token(started):
    ranks, port = started(DETONATION_TOKEN="a secret of this run")
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    board = next(key for key in stranger.list_keys() if key.endswith("detonation/notice"))
    for notice in (FORGED, "no notice at all", f"{'0' * 64} 1 forged", f"{'0' * 64} x"):
        stranger.set(board, notice)
        assert goes_on(ranks[0]), ranks[0].stderr
    os.kill(ranks[1].pid, 9)  # a notice of the run itself takes its place
    assert (
        ranks[0].wait() == 1
        and "rank 1 (replica 1, shard 0) has not been heard of" in ranks[0].errors
    )


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_notice_is_read_by_those_who_share_the_token_and_in_this_attempt_only(token, caplog):
    store = dist.HashStore()
    boards = [StoreBoard(store, rank, "rank 0", rank == 0, token) for rank in range(2)]
    assert boards[0].read_notice() == ""
    if token:
        for forged in (FORGED, "", "é" * 9):
            store.set("detonation/notice", forged)
            assert boards[0].read_notice() == "", forged
        assert len(caplog.messages) == 1 and "this run ignores a notice in" in caplog.messages[0]
    assert (
        boards[1].post_notice("1 the disk is full")
        == "1 the disk is full"
        == boards[0].read_notice()
    )
    assert boards[0].post_notice("0 another") == "1 the disk is full", "the first one stays"
    if token:
        later, replayed = dist.HashStore(), store.get("detonation/notice")
        board = StoreBoard(later, 0, "rank 0", True, token)
        later.set("detonation/notice", replayed)
        assert board.read_notice() == ""


def test_a_heartbeat_that_is_no_number_is_reported():
    store = dist.HashStore()
    board = StoreBoard(store, 0, "rank 0", True)
    store.set("detonation/1", "many")
    with pytest.raises(RuntimeError, match="a foreign process has written the heartbeats"):
        board.read_counts([0, 1])


def test_the_first_machine_of_torchrun_stays_until_the_others_have_read(monkeypatch):
    monkeypatch.setattr(heartbeat, "_READING_S", LIMIT_S)
    first = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}
    second = {**first, "GROUP_RANK": "1"}
    hosts = [hosts_store(first, 0), hosts_store(first, 1), hosts_store(second, 2)]
    assert hosts == [True, True, False]
    assert not hosts_store({**first, "GROUP_WORLD_SIZE": "1"}, 0)
    assert [hosts_store({}, rank) for rank in range(2)] == [True, False]
    store = dist.HashStore()
    boards = [StoreBoard(store, rank, "the launcher", here) for rank, here in enumerate(hosts)]
    threads = [threading.Thread(target=board.close, args=[2]) for board in boards[:2]]
    for thread in threads:
        thread.start()
    while int(store.add("detonation/closed", 0)) < 2:
        pass
    assert all(thread.is_alive() for thread in threads)
    boards[2].close(2)
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
