"""Pipes whose reader has gone: a command ends without a word, a run trains on, and the object of --json still comes."""

import json
import os
import subprocess
import sys

import pytest

from commands import Command, write_recipe
from covering import some

PLAN = ["plan", "--parameters", "1.2b", "--link", "100mbit,20ms", "--step-time", "0.3"]
OUT, ERR = 1, 2


@pytest.fixture
def start(tmp_path):
    """Starts a command of which one of the standard streams, `unread`, is a pipe that nobody reads; it has ended."""

    def ended(unread, *arguments):
        reader, writer = os.pipe()
        os.close(reader)
        command = Command(tmp_path / "said", *arguments, pipes={unread: writer})
        os.close(writer)
        command.wait()
        return command

    return ended


@some(
    "arguments", [["train", "quick-lm", "--print"], ["plan", "--help"], ["--version"], PLAN], keep=[PLAN], ids=" ".join
)
def test_a_reader_that_has_enough_ends_an_interpreter_without_a_word(arguments):
    """As in `detonation plan ... | head`; all others here are forks."""
    command = [sys.executable, "-m", "detonation", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 141


@pytest.mark.parametrize(
    "arguments", [["train", "quick-lm", "--print"], ["plan", "--help"], ["--version"]], ids=" ".join
)
def test_a_reader_that_has_enough_ends_a_command_without_a_word(start, arguments):
    """As in `detonation train quick-lm --print | head`."""
    command = start(OUT, *arguments)
    assert (command.code, command.stderr) == (141, "")


@pytest.mark.parametrize("verb", ["train", pytest.param("simulate", marks=pytest.mark.long)])
def test_a_run_trains_on_without_its_screen(start, tmp_path, verb):
    """As in `detonation train RECIPE | head -1`."""
    out = tmp_path / "run"
    command = start(OUT, verb, write_recipe(tmp_path / "tiny.toml"), "--scheme", "full", "--out", out)
    assert command.errors == ""
    assert json.loads((out / "summary.json").read_text())["steps"] == 6
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [(["plan"], 2, "error"), (PLAN, 0, "first"), (["--version"], 0, "packages")],
)
def test_the_object_for_a_program_comes_without_a_reader_of_stderr(start, arguments, code, key):
    """As in `detonation plan ... --json 2>&1 >plan.json | head`."""
    command = start(ERR, *arguments, "--json")
    assert key in json.loads(command.stdout) and command.code == code


def test_an_error_is_on_stderr_without_a_reader_of_stdout(start):
    command = start(OUT, "plan", "--json")
    assert command.stderr.startswith("error: plan needs a recipe or --parameters") and command.code == 141
