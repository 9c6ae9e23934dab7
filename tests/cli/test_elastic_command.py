"""`detonation train --elastic`: a rank is killed, and the replicas that are left finish the run."""

import json
import os
import signal
import tomllib
from itertools import groupby

import pytest
from torch._C._distributed_c10d import TCPStore

from commands import RECIPE, Command, free_port, outliving, write_recipe
from covering import some
from detonation.checkpoint.files import disk
from detonation.cluster.survive.agreement import latest_axis_store, note_gone
from detonation.cluster.survive.membership import Membership
from detonation.report.terminal import run_rows
from detonation.train.choice import decide
from detonation.train.run import joining, run_directory
from limits import LIMIT_S

pytestmark = pytest.mark.usefixtures("soon", "patient")

SETS = (
    "--set",
    "train.steps=40",
    "train.checkpoint_every=10",
    "train.log_updates=true",
    f"peers.silence_s={LIMIT_S}",
)
LONG = ("--set", "train.steps=100000", "train.checkpoint_every=20", f"peers.silence_s={LIMIT_S}")


def end_first(command, address):
    """Kills the command that is replica 0, and its rank with it, which the others hear of where all meet."""
    ranks = command.ranks
    command.kill()
    assert not outliving(ranks)
    host, port = address.split(":")
    note_gone(latest_axis_store(TCPStore(host, int(port))), 0)


def elastic(folder, *more):
    recipe = write_recipe(folder / "tiny.toml")
    return Command(folder, "train", recipe, "--out", folder / "run", "--elastic", *SETS, *more)


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def metrics(folder):
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture
def begun(tmp_path):
    commands = []

    def begin(*more):
        commands.append(elastic(tmp_path, *more))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()


@some("constant", [True, False], keep=[True])
def test_the_others_finish_the_run_when_the_first_replica_is_lost(begun, tmp_path, constant):
    batches = f"train.constant_batch={str(constant).lower()}"
    command = begun(batches, "--replicas", 3)
    command.wait_for_step(3)
    os.kill(command.ranks[0], signal.SIGKILL)
    assert command.wait() == 0, command.errors
    found = summary(tmp_path)
    assert (found["steps"], found["replicas_left"], found["replicas_equal"]) == (40, 2, True)
    (loss,) = found["losses"]
    assert (loss["replicas"], loss["examples"]) == ([0], [[0, 3]])
    world = "3 replicas x 1 shards at the start, 2 replicas at the end: 1 lost"
    assert dict(run_rows(found))["world"] == world
    assert command.stdout.count("may lack its examples 0 to 3; training goes on\n") == 1
    replayed = Command(tmp_path / "replay", "follow", tmp_path / "run", "--json")
    assert replayed.wait() == 0, replayed.errors
    assert json.loads(replayed.stdout.splitlines()[-1])["fingerprint"] == found["fingerprint"]
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 41))
    taking = [record["taking"] for record in records]
    assert taking == sorted(taking, reverse=True) and {*taking} == {3, 2}
    examples = RECIPE["train"]["batch_size"] * (3 * 40 if constant else sum(taking))
    assert found["examples_per_second"] == pytest.approx(examples / found["seconds"])
    assert found["tokens_per_second"] == pytest.approx(
        RECIPE["data"]["context"] * examples / found["seconds"]
    )
    among = [2 * (each - 1) / each * 4 * found["num_parameters"] for each in taking]
    full_sync = sum(among) / len(among)
    assert found["bytes_full_sync_per_step"] == pytest.approx(full_sync, abs=1)
    assert found["reduction"] == pytest.approx(full_sync / found["bytes_sent_per_step"], rel=1e-4)
    resumed = elastic(
        tmp_path, batches, "train.steps=44", "--resume", "--replicas", 3
    )  # the original number
    assert resumed.wait() == 0, resumed.errors
    assert (
        "resumed after step 40, from 2 replicas" in resumed.stdout
        and summary(tmp_path)["steps"] == 44
    )


@pytest.mark.parametrize(
    ("module", "where"), [(joining, "surviving_axis"), (run_directory, "resume")]
)
def test_the_others_train_where_a_replica_ends_before_its_first_step(
    begun, tmp_path, monkeypatch, module, where
):
    """Before all have met, or while they read a checkpoint."""
    more = ["train.steps=20", "--replicas", 3]
    if where == "resume":
        earlier = begun(*more, "--stop-after", 10)
        assert earlier.wait() == 0, earlier.errors
        more.append("--resume")
    went_on = getattr(module, where)

    def end(*arguments):
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return went_on(*arguments)

    monkeypatch.setattr(module, where, end)
    command = begun(*more)
    assert command.wait() == 0, command.errors
    found = summary(tmp_path)
    assert (found["steps"], found["replicas_left"], found["replicas_equal"]) == (20, 2, True)
    assert [loss["replicas"] for loss in found["losses"]] == [[0]]
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 21))


def ends(rank):
    """Ends this process if it is that rank of the run."""
    if os.environ["RANK"] == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_others_go_on_where_a_replica_ends_between_an_agreement_and_its_adoption(
    begun, tmp_path, monkeypatch
):
    adopt = Membership._adopt

    def adopts(membership, agreement):
        ends(2)
        adopt(membership, agreement)

    monkeypatch.setattr(Membership, "_adopt", adopts)
    command = begun("--replicas", 4)
    command.wait_for_step(3)
    os.kill(command.ranks[1], signal.SIGKILL)
    require_two_left(command, tmp_path)


def test_the_others_go_on_where_replicas_end_in_the_middle_of_saves(begun, tmp_path, monkeypatch):
    """One in the middle of its file, and one before the manifest of the next checkpoint."""

    def end(operation, path):
        if operation == "write" and path.parent.name == ".step-000010.part":
            ends(3)
        if operation == "write" and path.parent.name == ".step-000020.part":
            ends(1)

    monkeypatch.setattr(disk, "observer", end)
    command = begun("--replicas", 4)
    require_two_left(command, tmp_path)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert newest.name == "step-000040"
    checked = Command(tmp_path / "verify", "verify", tmp_path / "run")
    assert checked.wait() == 0, checked.stdout


def require_two_left(command, folder):
    assert command.wait() == 0, command.errors
    found = summary(folder)
    assert (found["steps"], found["replicas_left"], found["replicas_equal"]) == (40, 2, True)
    assert [record["step"] for record in metrics(folder)] == list(range(1, 41))


def test_replicas_meet_as_worlds_of_their_own_and_another_one_comes_in(tmp_path):
    address, recipe = f"127.0.0.1:{free_port()}", write_recipe(tmp_path / "tiny.toml")
    commands = [Command(tmp_path / "meet", "meet", address)]

    def start(name, *arguments):
        given = ("train", recipe, "--out", tmp_path / "run", *arguments, *LONG)
        commands.append(
            Command(tmp_path / name, *given, env={"DETONATION_TOKEN": "0123456789abcdef"})
        )
        return commands[-1]

    way = ("--elastic", "--meet", address, "--replicas", 2)
    try:
        second, first = start("second", *way, "--replica", 1), start("first", *way, "--replica", 0)
        first.wait_for_step(3)
        newcomer = start("newcomer", "--join", address)
        newcomer.wait_for_step(1)
        first.wait_for_step(first.stdout.count("\nstep ") + 2)  # it has shown who joined
        end_first(first, address)
        second.wait_for_step(1)  # it writes now
        os.kill(newcomer.pid, signal.SIGTERM)
        assert newcomer.wait() == 0, newcomer.errors
        assert (
            "stopped by SIGTERM" in newcomer.stdout
            and "the other replicas train on" in newcomer.stdout
        )
        assert (
            "\nreplica 2 joined after step " in first.stdout
            and "warning: replica 2 joined" not in first.stdout
        )
        second.wait_for_step(len(metrics(tmp_path)) + 2)
        os.kill(second.pid, signal.SIGTERM)  # nobody would be left
        assert second.wait() == 0, second.errors
    finally:
        for command in commands:
            command.kill()
    steps = [record["step"] for record in metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == f"step-{steps[-1]:06d}"
    assert json.loads((newest / "manifest.json").read_text())["replicas"] == 1


@pytest.mark.parametrize("how", ["finished", "killed"])
def test_a_replica_that_joins_a_run_that_has_ended_is_told_so(tmp_path, how):
    address, recipe = f"127.0.0.1:{free_port()}", write_recipe(tmp_path / "tiny.toml")
    token = {"DETONATION_TOKEN": "0123456789abcdef"}
    meet = Command(tmp_path / "meet", "meet", address)
    steps = () if how == "finished" else LONG
    way = ("--elastic", "--meet", address, "--replicas", 1, "--replica", 0, *steps)
    run = Command(tmp_path / "run", "train", recipe, "--out", tmp_path / "out", *way, env=token)
    try:
        if how == "killed":
            run.wait_for_step(2)
            (rank,) = run.ranks
            os.kill(rank, signal.SIGKILL)
        assert (run.wait() == 0) == (how == "finished")
        joins = Command(
            tmp_path / "new",
            "train",
            recipe,
            "--out",
            tmp_path / "new",
            "--join",
            address,
            env=token,
        )
        assert joins.wait() == 1
        assert joins.errors == (
            f"error: ReplicaLost: the run whose replicas met at {address} has ended: start it again,"
            " or give the address of a run that trains\n"
        )
    finally:
        run.kill()
        meet.kill()


@some("replica", [0, 2], keep=[0])
def test_the_others_finish_the_run_when_one_replica_is_asked_to_leave(begun, tmp_path, replica):
    command = begun("--replicas", 3)
    command.wait_for_step(3)
    os.kill(command.ranks[replica], signal.SIGTERM)
    assert command.wait() == 0, command.errors
    found = summary(tmp_path)
    assert (found["steps"], found["replicas_left"], found["replicas_equal"]) == (40, 2, True)
    assert [(loss["replicas"], loss["left"]) for loss in found["losses"]] == [([replica], True)]
    assert f"replica {replica} left after step" in command.stdout + command.errors
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 41))


SITES = [
    {"axis": axis, "replicas": count, "name": "full"} for axis, count in (("rack", 2), ("site", 3))
]


@some(
    "scheme, shards",
    [({"name": "full"}, 1), ({"name": "full"}, 2), (SITES, 1)],
    keep=[({"name": "full"}, 1)],
)
def test_a_run_that_a_replica_left_has_the_losses_of_one_that_all_finished(
    tmp_path, scheme, shards
):
    """Of two shards one computes 2 examples and the other 1, and FSDP2 waits in each pass."""
    train = {**RECIPE["train"], "batch_size": 5 if shards == 1 else 1, "steps": 12}
    mesh = {"shards": shards} | ({"replicas": 3} if scheme != SITES else {})
    recipe = write_recipe(tmp_path / "tiny.toml", scheme=scheme, train=train, mesh=mesh)
    way = ("train", recipe, "--elastic")
    slow = ("--link", "1gbit,100ms") if scheme != SITES else ()  # else it ends before all agree
    runs = [
        Command(tmp_path / name, *way, *link, "--out", tmp_path / name / "run")
        for name, link in (("a", ()), ("b", slow))
    ]
    runs[1].wait_for_step(3)
    os.kill(runs[1].ranks[0], signal.SIGTERM)
    for run in runs:
        assert run.wait() == 0, run.errors
    whole, left = (metrics(tmp_path / name) for name in "ab")
    assert len({record["taking"] for record in left}) == 2
    assert [record["loss"] for record in left] == pytest.approx(
        [record["loss"] for record in whole], rel=1e-5
    )
    assert summary(tmp_path / "b")["val_loss"] == pytest.approx(
        summary(tmp_path / "a")["val_loss"], rel=1e-5
    )


def test_a_replica_that_came_in_goes_on_with_the_metrics_when_it_alone_is_left(tmp_path):
    address, recipe = f"127.0.0.1:{free_port()}", write_recipe(tmp_path / "tiny.toml")
    commands = [Command(tmp_path / "meet", "meet", address)]

    def start(name, *way):
        given = ("train", recipe, "--out", tmp_path / "run", "--replicas", 1, *way, *LONG)
        commands.append(
            Command(tmp_path / name, *given, env={"DETONATION_TOKEN": "0123456789abcdef"})
        )
        return commands[-1]

    try:
        first = start("first", "--elastic", "--meet", address, "--replica", 0)
        first.wait_for_step(3)
        newcomer = start("newcomer", "--join", address)
        newcomer.wait_for_step(2)
        end_first(first, address)
        while "lost replica" not in newcomer.stdout:
            newcomer.wait_for_step(newcomer.stdout.count("\nstep ") + 1)
        newcomer.wait_for_step(newcomer.stdout.count("\nstep ") + 2)
        os.kill(newcomer.pid, signal.SIGTERM)
        assert newcomer.wait() == 0, newcomer.errors
    finally:
        for command in commands:
            command.kill()
    assert "may lack its examples 0 to 1; training goes on\n" in newcomer.stdout  # of the four
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert [taking for taking, _ in groupby(record["taking"] for record in records)] == [1, 2, 1]


@pytest.fixture
def auto(monkeypatch):
    """Links are probed for a short time; the settings by which a scheme is chosen."""
    monkeypatch.setattr(decide, "PROBE_S", 0.2)  # also in the ranks, which are forks
    return ("scheme.name=auto",)


@some("shards, link", [(1, "1mbit,1ms"), (2, "")], keep=[(1, "1mbit,1ms")])
def test_replicas_choose_a_scheme_with_which_those_that_are_left_go_on(
    begun, tmp_path, auto, shards, link
):
    command = begun(*auto, "--replicas", 3, "--shards", shards, "--link", link)
    command.wait_for_step(3)
    os.kill(command.ranks[shards], signal.SIGKILL)
    assert command.wait() == 0, command.errors
    plan, config = (
        (tmp_path / "run" / "plan.json").read_text(),
        tomllib.loads((tmp_path / "run" / "config.toml").read_text()),
    )
    assert (
        config["scheme"]["name"]
        == json.loads(plan)["chosen"]["scheme"]
        not in ("auto", "none", link and "full")
    )
    assert command.stdout.count(f"auto: {json.loads(plan)['why']}\n") == 1
    found = summary(tmp_path)
    assert (found["steps"], found["replicas_left"], found["replicas_equal"]) == (40, 2, True)
    resumed = elastic(
        tmp_path,
        *auto,
        "train.steps=44",
        "--resume",
        "--replicas",
        3,
        "--shards",
        shards,
        "--link",
        link,
    )
    assert resumed.wait() == 0, resumed.errors
    assert "auto:" not in resumed.stdout and summary(tmp_path)["steps"] == 44
    assert (
        tomllib.loads((tmp_path / "run" / "config.toml").read_text())["scheme"] == config["scheme"]
    )


TIERS = [
    {"axis": "rack", "replicas": 2, "name": "full"},
    {"axis": "site", "replicas": 3, "name": "diloco", "every": 4},
]


@some("leaves", [False, True], keep=[False])
def test_a_site_of_several_nodes_is_lost_or_leaves_as_a_whole(tmp_path, leaves):
    """Under two levels: the outermost goes on without it, and what is inside the others stays."""
    recipe = write_recipe(tmp_path / "tiers.toml", scheme=TIERS, mesh={"shards": 1})
    steps = ("--set", "train.steps=40", "train.checkpoint_every=10", f"peers.silence_s={LIMIT_S}")
    way = ("train", recipe, "--out", tmp_path / "run", "--elastic", *steps)
    command = Command(tmp_path, *way)
    try:
        command.wait_for_step(3)
        os.kill(
            command.ranks[3], signal.SIGTERM if leaves else signal.SIGKILL
        )  # one node of the second site
        assert command.wait() == 0, command.errors
        found = summary(tmp_path)
        assert (found["steps"], found["replicas_left"], found["replicas_equal"]) == (40, 4, True)
        assert [(loss["replicas"], loss.get("left", False)) for loss in found["losses"]] == [
            ([1], leaves)
        ]
        assert {record["taking"] for record in metrics(tmp_path)} == {6, 4}
        resumed = Command(tmp_path, *way, "train.steps=44", "--resume")
        assert resumed.wait() == 0, resumed.errors
        assert (
            "resumed after step 40, from 4 replicas" in resumed.stdout
            and summary(tmp_path)["replicas_left"] == 6
        )
    finally:
        command.kill()


def test_a_newcomer_takes_the_scheme_that_the_run_has_chosen(tmp_path, auto):
    """It may ask to come in while the others still measure."""
    address, recipe = f"127.0.0.1:{free_port()}", write_recipe(tmp_path / "tiny.toml")
    commands = [Command(tmp_path / "meet", "meet", address)]

    def start(name, *way):
        given = (
            "train",
            recipe,
            "--out",
            tmp_path / "run",
            *way,
            *LONG,
            *auto,
            "--replicas",
            2,
            "--link",
            "5mbit,1ms",
        )
        commands.append(
            Command(tmp_path / name, *given, env={"DETONATION_TOKEN": "0123456789abcdef"})
        )
        return commands[-1]

    try:
        way = ("--elastic", "--meet", address, "--replica")
        first, second, newcomer = (
            start("first", *way, 0),
            start("second", *way, 1),
            start("newcomer", "--join", address),
        )
        newcomer.wait_for_step(2)
        assert "as replica 2; 3 replicas train" in newcomer.stdout
        for command in (newcomer, second, first):
            os.kill(command.pid, signal.SIGTERM)
            assert command.wait() == 0, command.errors
    finally:
        for command in commands:
            command.kill()


def test_a_replica_with_another_recipe_is_told_before_it_comes_in(tmp_path):
    """Otherwise its learning rates part it from the others, who all stop at the next comparison."""
    address, recipe = f"127.0.0.1:{free_port()}", write_recipe(tmp_path / "tiny.toml")
    token = {"DETONATION_TOKEN": "0123456789abcdef"}
    meet = Command(tmp_path / "meet", "meet", address)
    way = (
        "--out",
        tmp_path / "run",
        "--elastic",
        "--meet",
        address,
        "--replicas",
        1,
        "--replica",
        0,
        *LONG,
    )
    first = Command(tmp_path / "first", "train", recipe, *way, env=token)
    try:
        first.wait_for_step(2)
        other = Command(
            tmp_path / "other", "train", recipe, "--join", address, "--out", tmp_path / "run", *LONG, "train.steps=300",
            "--replicas", 1, env=token,
        )  # fmt: skip
        assert other.wait() == 2
        assert (
            "train.steps is 300 here, 100000 in the run: give all replicas the same recipe"
            in other.errors
        )
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait() == 0, first.errors
    finally:
        for command in (first, meet):
            command.kill()
