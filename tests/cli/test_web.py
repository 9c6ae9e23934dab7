"""`detonation train --web`: a page on this machine alone, for as long as the run lasts."""

import contextlib
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from commands import Command, free_port, listening, outliving, write_recipe
from detonation.cli.command import run_command


@pytest.mark.parametrize(
    "stop",
    [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL],
    ids=["ctrl-c", "killed"],
)
def test_the_page_is_there_while_the_run_trains_and_ends_with_it(tmp_path, stop):
    port, recipe = free_port(), write_recipe(tmp_path / "tiny.toml")
    train = [
        "train",
        recipe,
        "--steps",
        100_000,
        "--logger",
        f"web:{port}",
        "--out",
        tmp_path / "run",
    ]
    command = Command(tmp_path, *train, env={"TMPDIR": tmp_path})
    command.wait_for_step(3)
    assert f"watch it at http://127.0.0.1:{port}\n" in command.stdout
    with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
        page = answer.read().decode()
    assert "Who waits for whom" in page and "Time of a step by part" in page
    ranks = command.ranks
    (server,) = (pid for rank in ranks for pid in children(rank))
    assert {at for at in listening([server]) if at[1] == port} == {("0100007F", port)}
    os.killpg(command.pid, stop) if stop == signal.SIGINT else command.kill()
    command.wait()
    assert outliving([*ranks, server]) == []


def children(pid):
    """The processes that `pid` has started, by any of its threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            found += map(int, task.read_text().split())
    return found


@pytest.mark.parametrize(
    ("flags", "usual", "other"),
    [
        (["--web"], 0, 1),
        (["--logger", "web:8000"], 0, 1),
        (["--logger", "web:8000"], -1, -1),  # the port after the usual one is taken, too
    ],
)
def test_a_port_that_is_taken_is_said_before_training(
    tmp_path, monkeypatch, capsys, flags, usual, other
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("detonation.train.output.trackers.PORT", port + usual)
        flags = [flag.replace("8000", str(port)) for flag in flags]
        recipe = write_recipe(tmp_path / "tiny.toml")
        assert run_command(["train", str(recipe), *flags, "--out", str(tmp_path / "run")]) == 2
    said = f"port {port} of 127.0.0.1 is in use: give another port, --logger web:{port + other}"
    assert capsys.readouterr().err == f"error: {said}\n" and not (tmp_path / "run").exists()


def test_a_port_that_is_none_is_refused(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "tiny.toml")
    assert run_command(["train", str(recipe), "--logger", "web:99999"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: the port of logger web is 99999, but must be from 1"
    )
