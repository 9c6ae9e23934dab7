"""Outputs that take nothing: pipes whose reader has gone, full disks, and encodings that lack a character.

A command ends without a word or with one line, a run trains on, and the object of --json still comes.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Command, write_recipe
from covering import some
from detonation.cli.command import run_command
from detonation.report import page
from detonation.train.output.screen import Screen

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


@pytest.fixture
def start_full(tmp_path):
    """Starts a command whose stdout lies on a full disk; it has ended."""

    def ended(*arguments):
        writer = os.open("/dev/full", os.O_WRONLY)
        command = Command(tmp_path / "said", *arguments, pipes={OUT: writer})
        os.close(writer)
        command.wait()
        return command

    return ended


@some(
    "arguments",
    [["train", "quick-lm", "--print"], ["plan", "--help"], ["--version"], PLAN],
    keep=[PLAN],
    ids=" ".join,
)
def test_a_reader_that_has_enough_ends_an_interpreter_without_a_word(arguments):
    """As in `detonation plan ... | head`; all others here are forks."""
    command = [sys.executable, "-m", "detonation", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
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
    command = start(
        OUT, verb, write_recipe(tmp_path / "tiny.toml"), "--scheme", "full", "--out", out
    )
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
    assert (
        command.stderr.startswith("error: plan needs either a recipe or --parameters")
        and command.code == 141
    )


NO_SPACE = "error: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("arguments", [PLAN, ["plan", "--help"], ["--version"]], ids=" ".join)
def test_a_full_disk_under_stdout_is_one_line(start_full, arguments):
    """As in `detonation plan ... > plan.txt`."""
    command = start_full(*arguments)
    assert (command.code, command.stderr) == (1, NO_SPACE)


def test_a_run_trains_on_where_the_disk_under_its_screen_is_full(start_full, tmp_path):
    out = tmp_path / "run"
    command = start_full(
        "train", write_recipe(tmp_path / "tiny.toml"), "--scheme", "full", "--out", out
    )
    assert (command.code, command.errors) == (1, NO_SPACE)
    assert json.loads((out / "summary.json").read_text())["steps"] == 6
    assert (out / "report.html").exists()


def test_the_object_for_a_program_comes_where_the_disk_under_stderr_is_full(monkeypatch, capsys):
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run_command(["plan", "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)


def test_what_the_encoding_of_stdout_lacks_is_escaped(monkeypatch, tmp_path):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(page, "write_page", lambda directories, out: out)
    assert run_command(["report", "run", "--out", "日本é.html"]) == 0
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(written, encoding="ascii")
    )  # of a rank that starts afresh
    Screen(silent=False, to_stderr=False).line("in 日本é")
    assert (
        written.getvalue().decode() == "report: \\u65e5\\u672c\\xe9.html\nin \\u65e5\\u672c\\xe9\n"
    )
