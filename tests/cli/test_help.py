"""The help of each verb: on one screen, with what people use first at its top."""

import dataclasses
import re

import pytest
import tyro
from torch.distributed import run as torchs_run

from detonation.cli.arguments import Probe, Train
from detonation.cli.command import run_command
from detonation.cli.verbs import VERBS

NAMES = [kind.__name__.lower() for kind in VERBS]


def helped(arguments, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        run_command(arguments)
    assert end.value.code == 0
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "arguments", [["--help"], [], *([name, "--help"] for name in NAMES)], ids=" ".join
)
def test_it_fits_on_a_screen_of_40_lines_of_100_columns(arguments, capfd, monkeypatch):
    shown = helped(arguments, capfd, monkeypatch)
    assert len(shown) <= 40 and max(map(len, shown)) <= 100, "\n".join(shown)


def test_the_list_of_verbs_has_one_line_for_each(capfd, monkeypatch):
    shown = [line.split()[2] for line in helped(["--help"], capfd, monkeypatch) if "•" in line]
    assert shown == NAMES


@pytest.mark.parametrize(
    ("verb", "first"),
    [
        ("train", ["--scheme", "--steps", "--replicas", "--shards", "--out", "--web"]),
        ("plan", ["--link", "--profile", "--replicas", "--parameters", "--step-time"]),
    ],
)
def test_what_people_use_first_is_at_the_top_and_what_all_verbs_have_at_the_end(
    verb, first, capfd, monkeypatch
):
    shown = helped([verb, "--help"], capfd, monkeypatch)
    flags = [found.group(1) for line in shown if (found := re.match(r"│ (--\S+)", line))]
    assert flags[: len(first)] == first and flags[-2:] == ["--json", "--debug"]


def test_a_live_run_needs_a_directory_and_a_log_has_no_checkpoints_to_keep(tmp_path, capsys):
    assert run_command(["follow", "127.0.0.1:1"]) == 2
    said = "--out is missing: give a run directory for the checkpoints of 127.0.0.1:1"
    assert capsys.readouterr().err == f"error: {said}\n"
    assert run_command(["follow", str(tmp_path), "--every", "3"]) == 2
    said = f"--every needs a live run, HOST:PORT, but {tmp_path} is a directory: leave --every out"
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize("kind", [Train, Probe])
def test_torchrun_passes_each_flag_on_by_one_of_its_names(kind):
    """torchrun of Python 3.11 refuses what may abbreviate two of its own options."""
    others = {"log": "log-updates"}
    for field in dataclasses.fields(kind):
        flag = f"--{others.get(field.name, field.name).replace('_', '-')}"
        given = torchs_run.get_args_parser().parse_args(["-m", "detonation", flag])
        assert given.training_script_args == [flag]
    assert tyro.cli(Train, args=["quick-lm", "--log-updates"]).log
