"""`report` fails for a directory without a good run: exit 2 and one line with its name and the remedy.

A run that has diverged is shown as such.
"""

import errno
import json
import sys

import pytest

from detonation.cli.command import run_command as main
from detonation.report.read import read_run
from detonation.report.terminal import show_all
from made import made


@pytest.fixture
def error_of(capsys, tmp_path, monkeypatch):
    """Runs `detonation report arguments...` in `tmp_path` and returns its error line."""
    monkeypatch.chdir(tmp_path)

    def line(*arguments):
        assert main(["report", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1
        return printed.err.strip()

    return line


def test_a_directory_that_holds_no_run(error_of, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    remedy = "give the directory of a finished run, which detonation train prints last"
    for name in ("empty", "other", "gone", "file"):
        assert error_of(name) == f"error: {name} holds no finished run: {remedy}"


def test_an_unfinished_run_and_a_directory_of_runs(error_of, tmp_path):
    (made(tmp_path / "run") / "summary.json").unlink()
    made(tmp_path / "whole")
    assert error_of("run", "whole").endswith(
        "finish it with detonation train RECIPE.toml --out run --resume, or report this run alone"
    )
    made(tmp_path / "compared" / "full")
    made(tmp_path / "compared" / "demo")
    assert (
        error_of("compared")
        == "error: compared holds 2 runs, not one: detonation report compared/*/"
    )


def test_a_full_disk_leaves_no_part_of_a_page(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["report", str(made(tmp_path / "run"))]) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.mark.parametrize("line", ["{", "3", "null", '{"step": 7, "loss": 2.0}', "\x00\x00"])
def test_damaged_metrics_are_named_by_their_line(error_of, tmp_path, line):
    metrics = made(tmp_path / "run") / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:6], line, *lines[6:]]) + "\n")
    needs = "bytes_sent, loss, seconds, step"
    assert (
        error_of("run")
        == f"error: run/metrics.jsonl is damaged in line 7, which is no JSON object with {needs}: remove the line"
    )
    metrics.write_text("")
    assert (
        error_of("run")
        == "error: run/metrics.jsonl holds no step: give the directory of a run that has trained"
    )


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "environment.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe = \x00"])
def test_other_damaged_files_are_named(error_of, tmp_path, name, content):
    (made(tmp_path / "run") / name).write_bytes(content)
    assert error_of("run").startswith(f"error: run/{name} is damaged, ")
    assert not (tmp_path / "run" / "report.html").exists()


def test_an_incomplete_summary(error_of, tmp_path):
    run = made(tmp_path / "run")
    (run / "summary.json").write_text("{}")
    assert error_of("run").startswith(
        "error: run/summary.json is damaged, it lacks bytes_full_sync_per_step, bytes_sent_per_step"
    )


def test_a_page_at_an_impossible_path(error_of, tmp_path):
    made(tmp_path / "run")
    assert (
        error_of("run", "--out", "run")
        == "error: the page run is a directory: choose another --out"
    )
    assert error_of("run", "--out", "a/b.html").startswith(
        "error: the page a/b.html would be in a, which is no directory"
    )


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("every", [False, True])
def test_a_run_that_has_diverged_is_shown(capsys, tmp_path, monkeypatch, loss, every):
    monkeypatch.setenv("COLUMNS", "160")
    run = made(tmp_path / "run", val_loss=loss, train_loss=loss)
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines if every else lines[-5:]:
        line |= {"loss": loss, "val_loss": loss}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "page.html"
    shown = "-" if loss is None else "diverged"
    for runs in ([run], [run, made(tmp_path / "other")]):
        assert main(["report", *map(str, runs), "--out", str(page)]) == 0, capsys.readouterr().err
        assert f">{shown}<" in page.read_text()
    show_all([read_run(path).summary | {"directory": str(path)} for path in runs], [], sys.stdout)
    marked, other = [line for line in capsys.readouterr().out.splitlines() if "│ " in line]
    assert f" {shown} " in marked and "(lowest)" not in marked and "(lowest)" in other


@pytest.mark.parametrize("key", ["seconds", "bytes_sent", "step"])
def test_a_record_without_a_number_is_damaged(error_of, tmp_path, key):
    metrics = made(tmp_path / "run") / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([json.dumps(json.loads(lines[0]) | {key: None}), *lines[1:]]))
    assert error_of("run").startswith(
        "error: run/metrics.jsonl is damaged in line 1, which is no JSON object with "
    )
