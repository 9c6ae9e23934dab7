"""What a run does not do: unpickle, or listen where strangers can talk to it."""

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch

import detonation as dt
from commands import RECIPE, Command, launched, listening, write_recipe
from detonation.cli.command import run_command
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.train.recipe.resolve import require_trust
from detonation.train.recipe.schema import Choice
from detonation.train.recipe.tables import from_table

LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
}  # 127.0.0.1 as /proc/net writes it, plain and mapped


def pickled(function, folder):
    """The classes that `function` looks up for unpickling, in a process of its own and in all that it starts."""
    noted = folder / "pickled"
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
            folder / "said"
        ).read_text()
        return noted.read_text().splitlines() if noted.exists() else []
    code = 1
    try:
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)

        def note(event, arguments):
            if event == "pickle.find_class":
                with noted.open("a") as file:
                    file.write(f"{arguments}\n")

        sys.addaudithook(note)
        code = function()
    finally:
        os._exit(code)


def test_nothing_is_unpickled_from_training_to_verifying(tmp_path):
    recipe, out = write_recipe(tmp_path / "tiny.toml"), str(tmp_path / "run")
    train = [
        "train",
        str(recipe),
        "--out",
        out,
        "--replicas",
        "2",
        "--shards",
        "2",
        "--checkpoint-every",
        "2",
    ]

    def whole_life():
        steps = (
            [*train, "--stop-after", "3"],
            [*train, "--resume"],
            ["verify", out],
            ["export", out, "--out", f"{out}-exported"],
        )
        return max(run_command(arguments) for arguments in steps)

    assert pickled(whole_life, tmp_path) == []
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_hook_sees_what_is_unpickled(tmp_path):
    assert (
        "PosixPath"
        in pickled(lambda: len(pickle.loads(pickle.dumps([Path("/")]))) - 1, tmp_path)[0]
    )


@pytest.mark.parametrize("by", ["detonation", "a launcher"])
def test_on_one_machine_sockets_listen_on_loopback_alone(tmp_path, by, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    recipe = write_recipe(tmp_path / "tiny.toml")
    train = (
        "train",
        recipe,
        "--out",
        tmp_path / "run",
        "--replicas",
        2,
        "--set",
        "train.steps=100000",
    )
    commands = [Command(tmp_path, *train)] if by == "detonation" else launched(tmp_path, 2, *train)
    try:
        commands[0].wait_for_step(1)
        pids = commands[0].ranks if by == "detonation" else [command.pid for command in commands]
        found = {address for address, _ in listening(pids)}
        assert found and found <= LOOPBACK
    finally:
        for command in commands:
            command.kill()


NAMING = {
    "model": {"model": {"name": "stranger:build"}},
    "data": {"data": {"task": "stranger:build"}},
    "optimizer": {"optimizer": {"name": "stranger:build", "lr": 0.1}},
    "scheme": {"scheme": {"name": "stranger:build"}},
    "an inner level": {
        "scheme": [
            {"axis": "rack", "replicas": 2, "name": "stranger:build"},
            {"axis": "site", "replicas": 2, "name": "full"},
        ],
        "mesh": {"shards": 1},
    },
    "a scheme with the prefix of models": {"scheme": {"name": "hf:build"}},
}
"""Tables of recipes that name code."""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Modules that leave a file behind when they are imported."""
    for name in ("stranger", "hf"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\nbuild = None\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "ran"
    for name in ("stranger", "hf"):
        sys.modules.pop(name, None)


def test_replay_runs_code_that_a_run_names_on_request_alone(tmp_path, stranger, capsys):
    (tmp_path / "run" / "updates").mkdir(parents=True)
    for tables in NAMING.values():
        (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps({**RECIPE, **tables}))
        assert run_command(["follow", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        assert (
            ":build, which follow would run: say --trust-code" in said and not stranger.exists()
        ), said


@pytest.mark.parametrize("section", ["model", "scheme", "a scheme with the prefix of models"])
def test_follow_runs_code_that_a_run_names_on_request_alone(
    tmp_path, stranger, capsys, monkeypatch, section
):
    monkeypatch.setenv("DETONATION_TOKEN", "a token for tests only")
    trained = torch.nn.Linear(2, 2)
    optimizer = dt.replicate(
        torch.optim.AdamW(trained.parameters()), trained, LoopbackCommunicator(2), dt.full()
    )
    feed = dt.Feed(
        trained, optimizer, "127.0.0.1:0", about={"config": {**RECIPE, **NAMING[section]}}
    )
    try:
        assert run_command(["follow", feed.address, "--out", str(tmp_path / "out")]) == 2
    finally:
        feed.close()
    said = capsys.readouterr().err
    assert ":build, which follow would run: say --trust-code" in said and not stranger.exists(), (
        said
    )


def test_a_model_of_transformers_is_no_code():
    config = replace(from_table(RECIPE), model=Choice("hf:somebody/model"))
    require_trust(False, config, "the run", "follow", "model", "data", "optimizer", "scheme")


def test_an_interface_that_is_not_there_is_refused(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    command = Command(tmp_path, "train", recipe, "--out", tmp_path / "run", "--interface", "wg7")
    assert command.wait() == 2
    assert command.errors.startswith("error: --interface is 'wg7', but this machine has ")
    assert not (tmp_path / "run").exists()
