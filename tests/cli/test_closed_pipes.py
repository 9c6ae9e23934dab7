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


@pytest.mark.parametrize("arguments", [["recipes", "--keys"], ["plan", "--help"], ["--version"], PLAN], ids=" ".join)
def test_a_reader_that_has_enough_ends_a_command_without_a_word(arguments):
    """As in `detonation recipes --keys | head`."""
    with started(*arguments) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 141


@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_a_run_trains_on_without_its_screen(tmp_path, verb):
    """As in `detonation train RECIPE | head -1`."""
    out = tmp_path / "run"
    with started(verb, write_recipe(tmp_path / "tiny.toml"), "--scheme", "full", "--out", out) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert json.loads((out / "summary.json").read_text())["steps"] == 6
    assert (out / "report.html").exists()


def test_an_error_as_json_comes_without_a_reader_of_stderr():
    reader, writer = os.pipe()
    os.close(reader)
    with started("plan", "--json", stderr=writer) as running:
        os.close(writer)
        found = json.loads(running.stdout.read())
    assert found["error"].startswith("plan needs a recipe or --parameters") and running.returncode == found["code"] == 2
