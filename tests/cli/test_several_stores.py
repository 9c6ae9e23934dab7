"""Several `detonation meet` are one store: a minority may be killed, stopped or come back empty."""

import json
import logging
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore

from commands import Command, free_port, write_recipe
from detonation.cluster.position import store_addresses
from detonation.cluster.quorum import stores as quorum
from detonation.cluster.quorum.store import meeting_store
from limits import LIMIT_S, until


class Meets:
    """Three processes that keep a store, and the clients that use them."""

    def __init__(self, folder):
        # all forks come first: a client has threads
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.commands = [
            Command(folder / f"meet{number}", "meet", address)
            for number, address in enumerate(self.addresses)
        ]
        self.clients = []

    def client(self, addresses=None, limit_s=LIMIT_S):
        self.clients.append(meeting_store(",".join(addresses or self.addresses), limit_s))
        return self.clients[-1]

    def signal(self, number, what):
        os.kill(self.commands[number].pid, what)

    def close(self):
        for client in self.clients:
            client.close()
        for command in self.commands:
            command.kill()


@pytest.fixture
def meets(tmp_path):
    made = Meets(tmp_path)
    yield made
    made.close()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "detonation")

    def wait(text, store=None):
        """Waits for a line; a client that asks nothing of a store does not notice its loss."""
        deadline = time.monotonic() + LIMIT_S
        while text not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            if store is not None:
                store.check(["none"])
            time.sleep(0.01)

    return wait


def test_clients_see_one_store_through_a_prefix_and_while_one_of_three_is_killed(meets, said):
    store, other = PrefixStore("run", meets.client()), PrefixStore("run", meets.client())
    store.set("key", "value")
    assert other.get("key") == b"value" and other.check(["key"]) and not other.check(["none"])
    assert other.compare_set("key", "", "later") == b"value"
    assert other.compare_set("record", "", "first") == b"first"
    assert store.compare_set("record", "", "second") == b"first"
    assert store.clone().multi_get(["key", "record"]) == [b"value", b"first"]
    with pytest.raises(DistStoreError, match="no key run/none in the store after"):
        store.wait(["none"], timedelta(seconds=0.1))
    numbers: list[int] = []

    def add(store):
        numbers.extend(store.add("numbers", 1) for _ in range(20))

    threads = [threading.Thread(target=add, args=(each,)) for each in (store, other, store)]
    for thread in threads:
        thread.start()
    meets.commands[1].kill()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 61))
    said(f"the store at {meets.addresses[1]} is lost (", store)
    assert other.get("record") == b"first"


def test_a_removed_key_is_removed_from_all_stores(meets):
    store = meets.client()
    store.set("key", "value")
    assert store.delete_key("key") and not store.check(["key"])
    with pytest.raises(NotImplementedError, match="several stores cannot count their keys"):
        store.num_keys()
    host, port = store_addresses(meets.addresses[2])[0]
    raw = TCPStore(host, port)
    # a check may have made an empty cell
    until(lambda: not (raw.check(["key"]) and raw.get("key")), "the store still has the key")


def test_a_store_that_does_not_answer_delays_nobody_and_is_used_again(meets, said, monkeypatch):
    monkeypatch.setattr(quorum, "HUNG_S", 0.5)
    store = meets.client()
    meets.signal(0, signal.SIGSTOP)
    store.set("key", "before")
    while not any(each.why for each in store._stores._connections):  # another one is tried
        store.set("key", "while")
    said(f"the store at {meets.addresses[0]} is lost (no answer for 0.5 s): 2 of 3 are left")
    meets.signal(0, signal.SIGCONT)
    said(f"the store at {meets.addresses[0]} answers again")
    meets.commands[1].kill()
    assert store.get("key") == b"while"


def test_a_store_whose_first_answer_is_late_is_not_called_lost(meets, caplog, monkeypatch):
    """The replicas that came before have agreed on the stores, so this client needs only two of them."""
    meets.client()
    connect, answers = quorum.Connection.connect, threading.Event()

    def late(connection):
        if connection.number == 2:
            assert answers.wait(LIMIT_S)
        connect(connection)

    monkeypatch.setattr(quorum.Connection, "connect", late)
    store = meets.client()
    answers.set()
    until(lambda: all(each.is_open for each in store._stores._connections))
    assert "is lost" not in caplog.text


def test_a_store_that_was_started_again_is_not_asked(meets, said):
    store = meets.client()
    store.set("key", "value")
    meets.commands[0].kill()
    host, port = store_addresses(meets.addresses[0])[0]
    said(f"the store at {meets.addresses[0]} is lost (", store)
    empty = TCPStore(host, port, is_master=True, wait_for_workers=False)
    said(f"the store at {meets.addresses[0]} is lost (started after the run", store)
    assert meets.client().get("key") == b"value"  # a client that comes later does not trust it
    meets.commands[1].kill()
    with pytest.raises(DistNetworkError, match="no majority of the stores answers"):
        while True:
            store.set("key", "more")
    del empty


def test_a_run_goes_on_with_the_majority_that_answers_at_the_start(meets, said, monkeypatch):
    monkeypatch.setattr(quorum, "ALL_S", 0.0)
    meets.commands[2].kill()
    store = meets.client()
    said(f"the store at {meets.addresses[2]} is lost (Connection refused): 2 of 3 are left, 2 are")
    host, port = store_addresses(meets.addresses[2])[0]
    late = TCPStore(host, port, is_master=True, wait_for_workers=False)
    meets.commands[0].kill()
    with pytest.raises(DistNetworkError, match="no majority of the stores answers"):
        while True:
            store.set("key", "value")
    del late


def test_wrong_addresses_are_refused_in_one_line(meets):
    first, second, third = meets.addresses
    with pytest.raises(
        ValueError, match=r"their number must be odd: .* 2 stores survive no more losses than"
    ):
        meets.client([first, second])
    with pytest.raises(ValueError, match="must be different: give each address once"):
        meets.client([first, second, first])
    same = first.replace("127.0.0.1", "localhost")
    with pytest.raises(ValueError, match=f"{first} and {same} are one store"):
        meets.client([first, same, second])
    nowhere = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(ValueError, match="no majority of the stores answers"):
        meets.client([first, *nowhere], limit_s=0.5)
    meets.client()
    with pytest.raises(ValueError, match="5 stores are named, but the run has 3"):
        meets.client([first, second, third, *nowhere])


@pytest.mark.usefixtures("soon", "patient")
def test_a_run_goes_on_when_a_store_and_a_replica_are_killed_and_lets_another_in(meets, tmp_path):
    recipe, where = write_recipe(tmp_path / "tiny.toml"), ",".join(meets.addresses)
    sets = ("--set", "train.steps=100000", f"peers.silence_s={LIMIT_S}")

    def start(name, *more):
        given = ("train", recipe, "--out", tmp_path / "run", *more, *sets)
        return Command(tmp_path / name, *given, env={"DETONATION_TOKEN": "0123456789abcdef"})

    way = ("--elastic", "--replicas", 3, "--meet", where, "--replica")
    commands = [start(str(number), *way, number) for number in range(3)]
    try:
        commands[0].wait_for_step(3)
        meets.commands[0].kill()
        commands[2].kill()
        metrics = tmp_path / "run" / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        commands[0].wait_for_step(steps[-1] + 20)
        commands.append(start("newcomer", "--join", where))
        commands[-1].wait_for_step(1)
        os.kill(commands[0].pid, signal.SIGUSR1)  # all save and end
        codes = [commands[number].wait() for number in (0, 1, 3)]
        assert codes == [0, 0, 0], commands[0].errors
        assert "lost replica 2" in commands[0].stdout
    finally:
        for command in commands:
            command.kill()


def test_a_command_without_a_replica_hosts_one_store_only(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    addresses = "127.0.0.1:7001,127.0.0.1:7002,127.0.0.1:7003"
    command = Command(tmp_path, "train", recipe, "--elastic", "--meet", addresses)
    assert command.wait() == 2
    assert command.errors == (
        f"error: --meet is '{addresses}', but a command hosts one store only: start detonation meet"
        " at each address, and give --replica\n"
    )
