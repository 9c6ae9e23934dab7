"""`detonation simulate`: what it prints and leaves, what bad input gets, and that Ctrl-C ends it."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from detonation.cli.command import run_command
from limits import LIMIT_S

QUICK = str(Path(__file__).parents[2] / "recipes" / "quick-lm.toml")
SHORT = [
    "--set",
    "train.steps=2",
    "train.validation_batches=1",
    "model.layers=1",
    "model.hidden_size=32",
]


def test_sixteen_replicas_in_one_process_and_their_report(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (
        run_command(
            ["simulate", QUICK, "--replicas", "16", "--total-batch", "16", *SHORT, "--json"]
        )
        == 0
    )
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (summary["replicas"], summary["shards"], summary["replicas_equal"]) == (16, 1, True)
    assert "16 replicas x 1 shards, virtual" in printed.err
    run = tmp_path / summary["directory"]
    assert run.name.startswith("quick-lm-demo-16-") and (run / "report.html").exists()
    assert run_command(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--replicas", "0"], "mesh.replicas is 0, but must be at least 1"),
        (
            ["--replicas", "3", "--total-batch", "32"],
            "--total-batch is 32, but must be a multiple of 3",
        ),
        (["--set", "mesh.shards=2"], "mesh.shards is 2, but must be 1 in a simulation"),
        (["--set", "scheme.name=demi"], "unknown scheme 'demi', did you mean 'demo'?"),
        (["--set", "scheme.topk=64", "scheme.precision=fp32"], "demo with topk=64"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, arguments, line):
    monkeypatch.chdir(tmp_path)
    assert run_command(["simulate", QUICK, *arguments]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {line}")
        and len(printed.err.splitlines()) == 1
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long  # no branch of its own
def test_ctrl_c_ends_it(tmp_path):
    command = [
        sys.executable,
        "-m",
        "detonation",
        "simulate",
        QUICK,
        "--out",
        str(tmp_path / "run"),
    ]
    sets = ["--set", "train.log_every=1", "train.batch_size=1"]
    heard = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # ignored where tests run in the background
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, *sets], **pipes, text=True, preexec_fn=heard) as process:
        assert any(line.startswith("step") for line in iter(process.stdout.readline, ""))
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (130, "error: interrupted\n")
