"""Comparing schemes: a run each on the same data, one page, and nothing that is finished is done twice."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from detonation.cli.command import run_command
from detonation.train.run.start import run_task
from detonation.train.verbs import compare

QUICK = str(Path(__file__).parents[2] / "recipes" / "quick-lm.toml")
SHORT = ("--set", "train.steps=2", "train.validation_batches=1", "--replicas", "2", "--shards", "1")


def test_a_comparison_does_not_replace_the_report_of_a_run(tmp_path, capfd):
    (tmp_path / "config.toml").touch()
    arguments = ["compare", QUICK, "--schemes", "full,random_sign", "--out", str(tmp_path)]
    assert run_command(arguments) == 2
    assert f"run directory {tmp_path} holds a run: choose another --out" in capfd.readouterr().err


def test_schemes_are_run_one_after_another_and_shown_side_by_side(tmp_path, capfd):
    arguments = [
        "compare",
        QUICK,
        "--schemes",
        "full,random_sign",
        *SHORT,
        "--out",
        str(tmp_path),
        "--json",
    ]
    assert run_command(arguments) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert [run["scheme"] for run in found["runs"]] == ["full", "random_sign"]
    assert [run["optimizer"] for run in found["runs"]] == [
        "AdamW",
        "SignSGD",
    ]  # each as the recipe has tuned it
    assert found["runs"][0]["bytes_sent_per_step"] > 100 * found["runs"][1]["bytes_sent_per_step"]
    page = Path(found["report"]).read_text()
    assert page.count("<figure") == 4 and "<script" not in page
    assert "What differs" in page and "scheme.name" in page and "scheme.rate" in page
    assert "train.steps</th>" not in page  # the same in both

    assert run_command(arguments) == 0
    again = capfd.readouterr()
    assert json.loads(again.out) == found and "step 2/2" not in again.err
    assert "run 1 of 2: full\n" in printed.err and "run 2 of 2: random_sign\n" in printed.err
    assert "by AdamW at lr 0.003, in " in printed.err
    assert "run 1 of 2" not in again.err


@pytest.mark.long  # the comparison of schemes above takes the same way
def test_settings_are_varied_and_the_run_with_the_lowest_loss_is_marked(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")
    rates = ["--vary", "optimizer.lr=1e-9,1e-2", "optimizer.betas=[0.9,0.95],[0.9,0.999]"]
    arguments = ["compare", QUICK, "--schemes", "full", *rates, *SHORT, "--out", str(tmp_path)]
    assert run_command(arguments) == 0
    shown = capfd.readouterr().out
    names = [
        f"full,optimizer.lr={lr},optimizer.betas=[0.9,{b}]"
        for lr in ("1e-9", "1e-2")
        for b in ("0.95", "0.999")
    ]
    assert sorted(
        path.name for path in tmp_path.iterdir() if (path / "summary.json").is_file()
    ) == sorted(names)
    (marked,) = [line for line in shown.splitlines() if "(lowest)" in line]
    assert "lr=1e-2" in marked and all(name in shown for name in names)


def test_a_run_with_long_values_has_a_name_that_a_file_system_allows(tmp_path):
    values = [f"data.source={'a' * 300},{'a' * 299}b"]
    names = [*compare.runs_of(["full"], values)]
    assert len({*names}) == 2 and names == [*compare.runs_of(["full"], values)]
    for name in names:
        assert name.startswith("full,data.source=aaa")
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("saved", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_comparison_that_was_interrupted_goes_on(tmp_path, capfd, monkeypatch, saved):
    arguments = [
        "compare",
        QUICK,
        "--schemes",
        "full,random_sign",
        *SHORT,
        "--out",
        str(tmp_path),
        "--json",
    ]

    def interrupted(task):
        if task.request.out.name == "full":
            return run_task(task)
        run_task(replace(task, request=replace(task.request, stop_after=1)))
        if not saved:
            shutil.rmtree(task.request.out / "checkpoints")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compare, "run_task", interrupted)
        assert run_command(arguments) == 130
    first = (tmp_path / "full" / "summary.json").read_bytes()
    capfd.readouterr()
    assert run_command(arguments) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert [(run["scheme"], run["steps"]) for run in found["runs"]] == [
        ("full", 2),
        ("random_sign", 2),
    ]
    said = f"in {tmp_path}: 1 of 2 runs are finished and kept, 1 were stopped and go on"
    assert printed.err.startswith(f"{said}\nrun 2 of 2: random_sign\n")
    assert ("resumed after step 1" in printed.err) == saved
    assert (tmp_path / "full" / "summary.json").read_bytes() == first


def test_a_run_that_fails_is_shown_and_the_others_go_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    rates = ["--vary", "optimizer.lr=1e30,1e-3"]
    short = [*SHORT, "--set", "train.steps=3"]
    arguments = [
        "compare",
        QUICK,
        "--schemes",
        "full",
        *rates,
        *short,
        "--out",
        str(tmp_path),
        "--json",
    ]
    assert run_command(arguments) == 1
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    diverged, finished = found["runs"]
    assert (
        not found["good"]
        and diverged["diverged"]
        and "the loss is nan at step" in diverged["error"]
    )
    assert finished["steps"] == 3 and "error" not in finished
    assert f"full,optimizer.lr=1e30: {diverged['error']}\n" in printed.err
    row, lowest = [line for line in printed.err.splitlines() if line.startswith("│ full,")]
    assert "│ diverged" in row and "(lowest)" in lowest
    assert "lr=1e30" not in Path(found["report"]).read_text()


def test_a_comparison_ends_where_a_signal_has_ended_a_run(tmp_path, monkeypatch, capsys):
    started = []

    def stopped(task):
        started.append(task.request.out)
        return {"stopped_after": 3, "stopped_by": "SIGTERM", "directory": str(task.request.out)}

    monkeypatch.setattr(compare, "run_task", stopped)
    arguments = ["compare", QUICK, "--schemes", "full,demo", "--out", str(tmp_path)]
    assert run_command(arguments) == 128 + signal.SIGTERM
    full = tmp_path / "full"
    line = f"error: stopped by SIGTERM after step 3 of {full}: the same command with --out {tmp_path} continues it"
    assert capsys.readouterr().err.startswith(line)
    assert started == [full]


def test_a_directory_with_another_run_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.toml").write_text("seed = 3")
    assert run_command(["compare", QUICK, "--schemes", "full,demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: run directory {tmp_path / 'demo'} is not empty"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_bad_comparisons_get_one_line_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, line in {
        ("--schemes", "full"): "error: --schemes is 'full': compare needs two runs or more",
        (
            "--vary",
            "seed=0,0",
        ): "error: --vary is seed=0,0, only one run, because equal values count once: compare needs two",
        ("--schemes", "full,full"): "error: --schemes is 'full,full', must be different schemes",
        ("--schemes", "full,dem"): "error: unknown scheme 'dem', did you mean 'demo'?",
        (
            "--vary",
            "optimizer.lr",
        ): "error: --vary takes key=value,value, each key once, got 'optimizer.lr'",
        ("--vary", "seed=1,"): "error: --vary takes key=value,value, each key once, got 'seed=1,'",
        (
            "--vary",
            "seed=1,2",
            "seed=3",
        ): "error: --vary takes key=value,value, each key once, got 'seed=3'",
        (
            "--schemes",
            "full,demo",
            "--vary",
            "scheme.name=loco",
        ): "error: --vary takes key=value,value, each key once",
        (
            "--vary",
            "optimiser.lr=1e-3,2e-3",
        ): "error: unknown table of the recipe 'optimiser', did you mean 'optimizer'?",
    }.items():
        assert run_command(["compare", QUICK, *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(line) and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
