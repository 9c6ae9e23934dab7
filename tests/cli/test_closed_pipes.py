"""Pipes whose reader has gone: a command ends without a word, a run trains on, and the object of --json still comes."""

import json
import os
import subprocess
import sys

import pytest

from commands import write_recipe

PLAN = ["plan", "--parameters", "1.2b", "--link", "100mbit,20ms", "--step-time", "0.3"]


def started(*arguments, **pipes):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    return subprocess.Popen([sys.executable, "-m", "detonation", *map(str, arguments)], **pipes, text=True)


@pytest.mark.parametrize(
    "arguments", [["train", "quick-lm", "--print"], ["plan", "--help"], ["--version"], PLAN], ids=" ".join
)
def test_a_reader_that_has_enough_ends_a_command_without_a_word(arguments):
    """As in `detonation train quick-lm --print | head`."""
    with started(*arguments) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 141


@pytest.mark.parametrize("verb", ["train", pytest.param("simulate", marks=pytest.mark.long)])
def test_a_run_trains_on_without_its_screen(tmp_path, verb):
    """As in `detonation train RECIPE | head -1`."""
    out = tmp_path / "run"
    with started(verb, write_recipe(tmp_path / "tiny.toml"), "--scheme", "full", "--out", out) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert json.loads((out / "summary.json").read_text())["steps"] == 6
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [(["plan"], 2, "error"), (PLAN, 0, "first"), pytest.param(["--version"], 0, "packages", marks=pytest.mark.long)],
)
def test_the_object_for_a_program_comes_without_a_reader_of_stderr(arguments, code, key):
    """As in `detonation plan ... --json 2>&1 >plan.json | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with started(*arguments, "--json", stderr=writer) as running:
        os.close(writer)
        assert key in json.loads(running.stdout.read())
    assert running.returncode == code


def test_an_error_is_on_stderr_without_a_reader_of_stdout():
    with started("plan", "--json") as running:
        running.stdout.close()
        assert running.stderr.read().startswith("error: plan needs a recipe or --parameters")
    assert running.returncode == 141
