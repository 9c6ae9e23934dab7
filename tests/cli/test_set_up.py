"""Faults of set-up in an elastic run: they end all replicas with exit code 2 and one line, and are
never survived."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import Command, free_port, write_recipe
from detonation.cluster.init import join_world
from detonation.cluster.processes import rendezvous, waiting
from detonation.cluster.survive import partition, port
from detonation.train.loop import session

pytestmark = pytest.mark.usefixtures("soon", "patient")
TEXT = Path(__file__).parents[2] / "docs" / "training.md"
TOKEN = {"DETONATION_TOKEN": "0123456789abcdef"}


@pytest.fixture
def taken():
    """An address where somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def start(tmp_path):
    """Starts a command in a folder of its name; ends it with the test."""
    commands = []

    def begin(name, *arguments, out="run", **env):
        given = [*arguments, "--out", tmp_path / out] if arguments[0] == "train" else arguments
        commands.append(Command(tmp_path / name, *given, env=TOKEN | env))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()


def test_an_address_in_use_ends_a_run_on_one_machine_before_its_first_step(tmp_path, start, taken):
    recipe = write_recipe(tmp_path / "tiny.toml")
    command = start(
        "run", "train", recipe, "--replicas", 3, "--elastic", "--publish", taken, out="out"
    )
    assert command.wait() == 2
    assert command.errors == (
        f"error: train.publish: cannot listen at {taken}: Address already in use; choose another "
        "--publish\n"
    )
    assert "\nstep " not in command.stdout and "go on" not in command.stderr


@pytest.mark.parametrize("fault", ["publish", "init_from"])
def test_the_fault_of_one_replica_ends_all_that_meet_and_a_later_start_trains(
    tmp_path, start, taken, fault
):
    """After all have met; and before the replica has come."""
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    start("meet", "meet", address)
    way = ("train", recipe, "--elastic", "--meet", address, "--replicas", 2)
    more = {"publish": ("--publish", taken), "init_from": ("--init-from", tmp_path / "nowhere")}
    other = start("other", *way, "--replica", 1, out=fault)
    faulty = start("faulty", *way, "--replica", 0, *more[fault], out=fault)
    assert (faulty.wait(), other.wait()) == (2, 2)
    (line,) = faulty.errors.splitlines()
    assert f"train.{fault}" in line
    assert other.errors == f"error: replica 0 did not start: {line.removeprefix('error: ')}\n"
    again = [start(f"again{n}", *way, "--replica", n, out="again") for n in (0, 1)]
    assert [command.wait() for command in again] == [0, 0], again[0].errors + again[1].errors
    said = f"replica 1 of 2 trains from step 1 on, in {tmp_path / 'again'}; replica 0 prints"
    assert said in again[1].stdout and "\nstep " not in again[1].stdout
    assert "replica 0 of 2 trains" not in again[0].stdout


@pytest.mark.parametrize("flags", [("--step",), ("--resume",)])
def test_a_command_line_that_one_replica_refuses_ends_the_others(tmp_path, start, flags):
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    start("meet", "meet", address)
    way = ("train", recipe, "--elastic", "--meet", address, "--replicas", 2)
    other = start("other", *way, "--replica", 0)
    faulty = Command(tmp_path / "faulty", *way, "--replica", 1, *flags)
    assert (faulty.wait(), other.wait()) == (2, 2)
    (line,) = other.errors.splitlines()
    assert line.startswith("error: replica 1 did not start: ") and flags[0] in line


NUMBERS = {
    "count": (
        ("--replicas", 3, "--replica", 1),
        "replica 1 was started with 3 replicas x 1 shards, replica 0 with 2 replicas x 1 shards",
    ),
    "data": (
        ("--replicas", 2, "--replica", 1, "--data", TEXT),
        "in the run: copy the same data to all machines",
    ),
    "number": (("--replicas", 2, "--replica", 0), "are both replica 0: give each replica its own"),
}
"""Of the second machine, while the first one is replica 0 of 2, and what both say."""


@pytest.mark.parametrize("fault", NUMBERS)
def test_numbers_that_do_not_fit_end_both_at_once(tmp_path, start, fault):
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    start("meet", "meet", address)
    way = ("train", recipe, "--elastic", "--meet", address)
    flags, said = NUMBERS[fault]
    commands = [
        start("first", *way, "--replicas", 2, "--replica", 0),
        start("second", *way, *flags, out="other"),
    ]
    assert [command.wait() for command in commands] == [2, 2]
    for command in commands:
        (line,) = command.errors.splitlines()
        assert said in line and "\nstep " not in command.stdout


@pytest.mark.parametrize("shards", [1, 2], ids=["by itself", "of a launcher"])
def test_a_refused_start_ends_a_rank_whose_main_thread_is_busy(
    tmp_path, start, monkeypatch, shards
):
    """It ends by the same code and line as a rank that is not busy, for example importing. Of the ranks
    that a launcher has started on a machine, one says so.
    """

    def stay_busy(*given):
        (tmp_path / f"{os.getpid()}.busy").touch()
        time.sleep(100)

    def compare_then(*given):
        while len(list(tmp_path.glob("*.busy"))) < shards:
            time.sleep(0.01)
        compare(*given)

    compare = session.require_same_settings
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    start("meet", "meet", address)
    way = ("train", recipe, "--elastic", "--meet", address, "--replicas", 2, "--shards", shards)
    place = [{}]
    if shards > 1:
        place = ranks_of_launcher(shards)
    with monkeypatch.context() as patch:
        patch.setattr(partition, "LEAVE_S", 0.5)
        patch.setattr(session, "replicated_run", stay_busy)
        busy = [
            start(f"busy{rank}", *way, "--replica", 0, "--json", **each)
            for rank, each in enumerate(place)
        ]
    monkeypatch.setattr(session, "require_same_settings", compare_then)
    faulty = start("faulty", *way, "--replica", 1, "--data", TEXT, out="other")
    codes = [each.wait() for each in (*busy, faulty)]
    assert codes == [2] * len(codes), [each.stderr for each in (*busy, faulty)]
    said = "replica 1 did not start: " + faulty.errors.removeprefix("error: ")
    assert "".join(each.errors for each in busy) == f"error: {said}"
    (line,) = [line for each in busy for line in each.stdout.splitlines() if line]
    assert json.loads(line) == {"error": said.strip(), "code": 2}


def ranks_of_launcher(count):
    """The environment of each rank of a launcher like srun, on one machine."""
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{**world, **meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


def test_a_replica_that_starts_while_its_run_trains_is_told_of_join(tmp_path, start, monkeypatch):
    """The run goes on."""
    monkeypatch.setattr(port, "RUNNING_S", 1.0)
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    start("meet", "meet", address)
    way = ("train", recipe, "--elastic", "--meet", address, "--replicas", 2, "--steps", 100_000)
    first = start("first", *way, "--replica", 0)
    start("second", *way, "--replica", 1, out="other")
    first.wait_for_step(1)
    for replica in (1, 0):
        late = start(f"late{replica}", *way, "--replica", replica, out=f"out{replica}")
        assert late.wait() == 2
        (line,) = late.errors.splitlines()
        assert line.startswith("error: a run trains at this store already") and "--join" in line
    first.wait_for_step(first.stdout.count("\nstep ") + 3)


def test_an_address_at_which_no_store_can_be_is_refused_with_the_remedy(tmp_path, start, taken):
    recipe = write_recipe(tmp_path / "tiny.toml")
    for address, reason in ((taken, "Address already in use"), ("192.0.2.9:2000", "Cannot assign")):
        meet = start(f"meet{reason[0]}", "meet", address)
        train = start(
            f"train{reason[0]}", "train", recipe, "--elastic", "--meet", address, "--replicas", 2
        )
        for command, remedy in ((meet, "at an address of this machine"), (train, "or --replica")):
            assert command.wait() == 2
            (line,) = command.errors.splitlines()
            assert line.startswith(f"error: no store can be at {address}: {reason}")
            assert remedy in line
    everywhere = start("everywhere", "meet", "0.0.0.0:2000")
    nowhere = start("nowhere", "meet", "nowhere.invalid:2000")
    assert (everywhere.wait(), nowhere.wait()) == (2, 2)
    assert "names all interfaces: give the address of one" in everywhere.errors
    assert "no host has that name" in nowhere.errors


def _closes(connection):
    connection.close()


def _is_silent(connection):
    with contextlib.suppress(ConnectionResetError), connection:
        while connection.recv(1 << 16):  # until the other side gives up
            pass


def _speaks_http(connection):
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    connection.close()


@pytest.mark.parametrize("answer", [_closes, _is_silent, _speaks_http])
def test_a_program_that_is_no_store_is_told_from_one(tmp_path, start, monkeypatch, answer):
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.5)
    monkeypatch.setattr(rendezvous, "_RENDEZVOUS_TIMEOUT_S", 0.7)
    recipe = write_recipe(tmp_path / "tiny.toml")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        host, number = address.split(":")
        rank = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        rank |= {"MASTER_ADDR": host, "MASTER_PORT": number}
        way = ("--elastic", "--meet", address, "--replicas", 2, "--replica", 0)
        why = "the program that listens at this address is no store"
        met = f"error: there is no store at {address} ({why}): start detonation meet, and give the"
        launched = f"error: rank 1 of 2 has not met the other ranks at {address} in 1 s ({why}): start all ranks "
        for command, code, said in (
            (start("meet", "train", recipe, *way), 2, met),
            (start("join", "train", recipe, "--join", address), 2, met),
            (start("launched", "train", recipe, **rank), 1, launched),
        ):
            assert command.wait() == code
            (line,) = command.errors.splitlines(keepends=True)
            assert line.startswith(said)


def test_a_host_without_a_name_is_refused_at_once(tmp_path, start):
    recipe = write_recipe(tmp_path / "tiny.toml")
    way = ("--elastic", "--meet", "nowhere.invalid:2000", "--replicas", 2, "--replica", 0)
    command = start("meet", "train", recipe, *way)
    joins = start("join", "train", recipe, "--join", "nowhere.invalid:2000")
    for flag, each in (("--meet", command), ("--join", joins)):
        assert each.wait() == 2
        assert each.errors == (
            f"error: {flag} is 'nowhere.invalid:2000', but no host has that name: give the name or "
            "address of a host\n"
        )


def test_one_request_to_stop_ends_a_replica_that_waits_for_the_store(tmp_path, start, monkeypatch):
    def warning(text, *values):  # pytest keeps what loggers say in forks, too
        print(text % values, file=sys.stderr, flush=True)

    monkeypatch.setattr(waiting, "_log", SimpleNamespace(warning=warning))
    recipe, address = write_recipe(tmp_path / "tiny.toml"), f"127.0.0.1:{free_port()}"
    command = start(
        "first", "train", recipe, "--elastic", "--meet", address, "--replicas", 2, "--replica", 0
    )
    while f"at most 300, for {address}: Connection refused" not in command.stderr:
        assert not command.ended, command.stderr
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


FAULTS = {
    "resume": (("--resume",), {}, "--resume is True on rank 1, False on rank 0: give all ranks"),
    "publish": (
        ("--publish", "127.0.0.1:1"),
        {},
        "--publish is '127.0.0.1:1' on rank 1, '' on rank 0: give all ranks the same recipe",
    ),
    "steps": (("--steps", 7), {}, "train.steps is 7 on rank 1, 6 on rank 0: give all ranks"),
    "data files": (("--data", TEXT), {}, "data (examples and hash) is ["),
    "token": (
        (),
        {"DETONATION_TOKEN": "another of 16 bytes"},
        "rank 1 has another DETONATION_TOKEN",
    ),
    "data": (("--data", "nowhere"), {}, "unknown source 'nowhere'. Valid: a path that exists"),
    "out": (("--out", "/dev/null/run"), {}, "cannot write into the run directory: "),
}
"""Of the second of two machines: its flags, its environment, and what both say."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_machine_of_a_launcher_is_said_on_each_and_ends_all(tmp_path, fault):
    """Each machine has one rank, and a terminal of its own."""
    recipe, port = write_recipe(tmp_path / "tiny.toml"), free_port()
    flags, env, said = FAULTS[fault]
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(2):
        own = flags if rank else ()
        train = ("train", recipe, "--out", tmp_path / "run", *own)
        given = {**TOKEN, **world, "RANK": rank, **(env if rank else {})}
        ranks.append(Command(tmp_path / f"rank{rank}", *train, env=given))
    code = 1 if fault == "out" else 2
    assert [rank.wait() for rank in ranks] == [code, code], [rank.errors for rank in ranks]
    for rank in ranks:
        assert rank.errors.startswith(f"error: {said}") and rank.errors.count("\n") == 1
        assert "\nstep " not in rank.stdout


@pytest.mark.parametrize("worlds", [(2, 3), (3, 2)])
def test_launchers_that_count_other_ranks_end_all(tmp_path, worlds):
    recipe, port = write_recipe(tmp_path / "tiny.toml"), free_port()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": 1}
    ranks = []
    for rank, size in enumerate(worlds):
        env = {**meeting, "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0}
        given = ("train", recipe, "--replicas", size, "--out", tmp_path / "run")
        ranks.append(Command(tmp_path / f"rank{rank}", *given, env=env))
    assert [rank.wait() for rank in ranks] == [2, 2], [rank.stderr for rank in ranks]
    said = f"the world has {worlds[1]} ranks for rank 1 and {worlds[0]} for rank 0: start all"
    assert all(said in rank.errors and rank.errors.count("\n") == 1 for rank in ranks)


LAUNCHERS = {
    "torchrun": {"RANK": "%d", "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0},
    "SLURM": {
        "SLURM_PROCID": "%d",
        "SLURM_NTASKS": 2,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": "%d",
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    },
}
ALONE = {
    "recipe": (["nowhere.toml"], "cannot read the recipe 'nowhere.toml'"),
    "interface": (["quick-lm", "--interface", "wg7"], "--interface is 'wg7', but this machine has"),
    "setting": (["quick-lm", "--set", "train.step=3"], "unknown key of [train] 'step'"),
    "flag": (["quick-lm", "--step"], "invalid command line: detonation train quick-lm --step"),
}
"""What one machine finds before it meets the others: its arguments, and a part of what it says."""


@pytest.mark.parametrize(
    ("launcher", "fault", "faulty"),
    [("torchrun", fault, 1) for fault in ALONE]
    + [("torchrun", "recipe", 0), ("SLURM", "recipe", 0), ("SLURM", "recipe", 1)],
)
def test_what_one_machine_finds_before_it_meets_the_others_ends_all(
    tmp_path, launcher, fault, faulty
):
    recipe, port = write_recipe(tmp_path / "tiny.toml"), free_port()
    arguments, said = ALONE[fault]
    ranks = []
    for rank in range(2):
        env = {key: str(text).replace("%d", str(rank)) for key, text in LAUNCHERS[launcher].items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given = arguments if rank == faulty else [recipe, "--out", tmp_path / "run"]
        ranks.append(Command(tmp_path / f"rank{rank}", "train", *given, env=env))
    assert [rank.wait() for rank in ranks] == [2, 2], [rank.stderr for rank in ranks]
    own, (line,) = ranks[faulty].errors, ranks[1 - faulty].errors.splitlines()
    assert line.startswith(f"error: rank {faulty} did not start: ") and said in line
    if fault != "flag":  # the parser draws a box
        assert line.partition("start: ")[2] == own.removeprefix("error: ").rstrip("\n")


def test_a_rank_of_a_loop_without_a_device_ends_all(tmp_path):
    """In a loop of one's own."""
    port = free_port()

    def program(arguments):
        try:
            join_world(*arguments)
        except ValueError as error:
            print(error, flush=True)
        return 0

    ranks = []
    for rank, device in enumerate(["cpu", "tpu"]):
        env = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(Command(tmp_path / device, device, env=env, program=program))
    assert [rank.wait() for rank in ranks] == [0, 0]
    cpu, tpu = (rank.stdout for rank in ranks)
    assert "tpu" in tpu and cpu == f"rank 1 did not start: {tpu}"


def test_a_page_goes_on_with_the_replica_that_takes_over_or_its_end_is_said(tmp_path, start):
    recipe, port = write_recipe(tmp_path / "tiny.toml"), free_port()
    way = ("--replicas", 2, "--elastic", "--logger", f"web:{port}", "--steps", 100_000)
    command = start("first", "train", recipe, *way)
    command.wait_for_step(3)
    said = f"watch it at http://127.0.0.1:{port}\n"
    assert command.stdout.count(said) == 1
    os.kill(command.ranks[0], signal.SIGKILL)
    command.wait_for_step(command.stdout.count("\nstep ") + 5)
    goes_on = command.stdout.count(said) == 2
    # the page of the lost replica may still have the port
    assert goes_on or f"warning: logger web:{port} failed" in command.stdout
