"""What bad input gets: one line that says what to do, exit 2, and nothing written."""

import errno
import json
import os
import re
import socket
import typing
from pathlib import Path

import pytest
import tyro

from commands import Command, write_recipe
from detonation import __main__
from detonation.cli.arguments import Train, verbs
from detonation.cli.command import run_command
from detonation.cli.verbs import VERBS
from detonation.cluster.launch import run_local
from detonation.cluster.survive.elastic_axis import Survival
from detonation.train.output.directory import RunDirectory
from detonation.train.run import start

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def fails(capsys, monkeypatch, tmp_path):
    """Runs `detonation train RECIPE arguments...` in an empty directory; returns its one line of error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # which asks a hub that is away for long

    def run(*arguments, recipe="quick-lm", code=2):
        assert run_command(["train", str(RECIPES / f"{recipe}.toml"), *arguments]) == code
        printed = capsys.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1
        return printed.err

    return run


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            "scheme.name=dem",
            "unknown scheme 'dem', did you mean 'demo'? Valid: decoupled_adamw, demo, diloco,",
        ),
        ("train.stps=3", "unknown key of [train] 'stps', did you mean 'steps'? Valid: accumulate,"),
        (
            "model.hiden_size=3",
            "unknown argument of model olmo2 'hiden_size', did you mean 'hidden_size'? Valid:",
        ),
        ("scheme.tpk=3", "unknown argument of scheme demo 'tpk', did you mean 'topk'? Valid:"),
        (
            "optimizer.momentun=0",
            "unknown argument of optimizer SignSGD 'momentun', did you mean 'momentum'? Valid:",
        ),
        (
            "optimizer.name=Adm optimizer.lr=1",
            "unknown optimizer 'Adm', did you mean 'Adam'? Valid: ASGD,",
        ),
        (
            "optimizer.name=LBFGS optimizer.lr=1",
            "optimizer LBFGS cannot be used: it evaluates the loss several times",
        ),
        (
            "optimizer.name=SparseAdam optimizer.lr=1",
            "optimizer SparseAdam cannot be used: it takes sparse gradients",
        ),
        (
            "optimizer.name=Adafactor optimizer.lr=1",
            "optimizer Adafactor cannot be used: its step does not work on",
        ),
        (
            "optimizer.name=Rprop optimizer.lr=1",
            "optimizer Rprop cannot be used: its step does not work on shards",
        ),
        (
            "optimizer.name=adm",
            "unknown optimizer 'adm'. Valid: ASGD,",
        ),  # the name before what it lacks
        ("optimizer.name=sgd", "unknown optimizer 'sgd', did you mean 'SGD'? Valid: ASGD,"),
        (
            "optimizer.name=SGD",
            "optimizer.lr is missing: give it in [optimizer] of the recipe, or with --set"
            " optimizer.lr=...; a new optimizer.name drops all settings of the previous optimizer",
        ),
        (
            "optimizer.name=AdamW optimizer.lr=1 optimizer.embeding_lr_ratio=3",
            "unknown argument of optimizer AdamW 'embeding_lr_ratio', did you mean"
            " 'embedding_lr_ratio'? Valid: ",
        ),
        (
            "model.name=vit",
            "model vit is for images, but the data sotu-sample are text: choose olmo2 or olmoe, or other data",
        ),
        (
            "model.name=t5",
            "model t5 is for translation, but the data sotu-sample are text: choose olmo2 or olmoe, or other data",
        ),
        (
            "model.name=hf:nowhere/at/all",
            "hf:nowhere/at/all is no directory with a config.json, and no model that the",
        ),
        (
            "model.name=gpt2",
            "unknown model 'gpt2'. Valid: olmo2, olmoe, t5, vit; or package.module:function, or hf:NAME for a",
        ),
        ("data.source=pyproject.toml", "unknown source 'pyproject.toml'"),
        (
            "data.tokenizer=nowhere",
            "data.tokenizer nowhere cannot be loaded from a directory or from the hub: ",
        ),
        (
            "train.init_from=nowhere",
            "train.init_from is 'nowhere', but must be the directory of a run or a model",
        ),
        (
            "optimizer.name=AdamW optimizer.lr=1 optimizer.betas=[0.9]",
            "optimizer AdamW does not accept {'betas': (0.9,)}:",
        ),
        ("optimizer.lr=-1", "optimizer.lr is -1.0, but must be a finite number above 0"),
        (
            "mesh.link=100mb",
            "a link is '100mb', must be a rate above 0 in bit, kbit, mbit or gbit (a second)",
        ),
        ("scheme.topk=65", "topk is 65, must be from 1 to chunk (64)"),
        ("scheme.topk=1.5", "scheme.topk is 1.5, but must be a whole number"),
        ("scheme.name=random scheme.rate=0", "rate is 0, must be above 0 and at most 1"),
        ("scheme.name=random scheme.rate=1.5", "rate is 1.5, must be above 0 and at most 1"),
        ("scheme.decay=1.1", "decay is 1.1, must be from 0 to 1"),
        ("scheme.chunk=0", "chunk is 0, must be at least 1"),
        ("model.vocab=100", "model.vocab is 100, but the data sotu-sample need vocab 256"),
        ("model.layers=two", "model.layers is 'two', but must be a whole number"),
        ("data.source=nowhere", "unknown source 'nowhere'"),
        (
            "train.batch_size=99999",
            "train.batch_size 99999 x 2 replicas x 2 shards = 399996 examples, but the data have",
        ),
        ("mesh.shards=0", "mesh.shards is 0, but must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named_before_any_process_starts(fails, tmp_path, sets, line):
    assert fails("--set", *sets.split()).startswith(f"error: {line}")
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_that_sends_more_than_full_synchronisation(fails, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "run_local", None)  # no process is started
    line = fails("--set", "scheme.topk=64", "scheme.precision=fp32")
    assert (
        "would send 1,218,888 bytes per step over 2 replicas, full synchronisation sends 1,181,952"
        in line
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_data_names_the_command_that_brings_it(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    line = fails(recipe="t5-translation")
    assert line.startswith(
        "error: bible-en-es is not on this machine: run `detonation fetch bible-en-es` (Debian packages"
    )


def test_a_replica_does_not_join_into_the_directory_of_a_finished_run(fails, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/summary.json").write_text("{}")
    line = fails("--join", "127.0.0.1:7400", "--out", "old")
    assert line.startswith("error: run directory old holds a finished run, and the joined run")


def test_a_missing_recipe_and_resuming_nothing(fails):
    assert fails(recipe="none").startswith("error: cannot read the recipe")
    assert fails("--resume").startswith("error: --resume needs --out")
    assert fails("--resume", "--out", "new").startswith("error: nothing to resume in new")
    assert fails("--keep", "0").startswith("error: train.keep is 0, but must be at least 1")
    assert fails("--checkpoint-every", "-1").startswith(
        "error: train.checkpoint_every is -1, but must be at least 0"
    )
    assert fails("--stop-after", "0").startswith("error: --stop-after is 0, but must be at least 1")


def test_a_run_directory_in_use(fails, tmp_path):
    held = RunDirectory(tmp_path / "busy")
    assert fails("--out", "busy").startswith("error: run directory busy is in use by process ")
    held.close()


def test_json_says_it_too_and_debug_shows_where(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(RECIPES / "quick-lm.toml"), "--set", "scheme.name=dem"]
    assert run_command([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["code"] == 2 and printed.err.startswith("error: unknown scheme")
    assert run_command([*arguments, "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_wrong_flag_suggests_the_right_one(capsys):
    with pytest.raises(SystemExit) as end:
        run_command(["train", "a.toml", "--replcas", "3"])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert "--replcas" in printed and "Perhaps you meant" in printed and "--replicas INT" in printed


def test_the_other_verbs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_command(["report"]) == 2
    assert "report needs at least one run directory" in capsys.readouterr().err
    assert run_command(["fetch", "mnit"]) == 2
    assert "unknown data set 'mnit'" in capsys.readouterr().err
    assert run_command(["fetch"]) == 2
    assert "fetch needs at least one name" in capsys.readouterr().err


def test_a_full_disk_is_said_with_what_to_do(capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("detonation.report.page.write_page", full)
    assert run_command(["report", "run", "--out", "page.html"]) == 1
    said = "No space left on device: free some space, or choose another --out"
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("name", "out", "blamed"),
    [
        ("w/checkpoints/a", "w", True),
        ("runs", "runs/w", True),
        ("page.html.part", "page.html", True),
        ("weights.pt", "w", False),
        ("page.css", "page.html", False),
        ("a", ".", True),
    ],
)
def test_a_file_that_cannot_be_written_blames_out_where_it_is_of_it(
    name, out, blamed, capsys, monkeypatch
):
    def refused(*_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr("detonation.report.page.write_page", refused)
    assert run_command(["report", "run", "--out", out]) == 1
    assert (
        capsys.readouterr().err
        == f"error: Permission denied: {name}{': choose another --out' * blamed}\n"
    )


def test_a_link_without_a_unit_is_refused(fails):
    assert fails("--link", "100").startswith(
        "error: a link is '100', must be a rate above 0 in bit, kbit, mbit or"
    )


def test_the_examples_in_the_help_are_command_lines():
    found = []
    for verb in typing.get_args(verbs()):
        kind = typing.get_args(verb)[0]
        for line in re.findall("Example: (.*)", kind.__doc__):
            command, name, *arguments = line.split()
            assert command == "detonation" and isinstance(
                tyro.cli(verbs(), args=[name, *arguments]), kind
            )
            found.append(name)
    assert found == [
        "train",
        "compare",
        "compare",
        "simulate",
        "probe",
        "plan",
        "plan",
        "report",
        "report",
        "follow",
        "follow",
    ]


def test_a_port_that_another_process_has(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = Command(
            tmp_path / "out", "train", write_recipe(tmp_path / "tiny.toml"), env=place
        )
        assert (command.wait(), command.stdout) == (2, "")
    remedy = "give all ranks another MASTER_PORT, or end the program that listens there"
    assert command.errors == f"error: port {port} of 127.0.0.1 is in use: {remedy}\n"


def test_where_the_profile_cannot_be_written_no_link_is_measured(capsys, tmp_path):
    assert run_command(["probe", "--out", str(tmp_path / "none" / "profile.json")]) == 2
    assert capsys.readouterr().err.endswith("but must be a file in a directory that exists\n")
    assert run_command(["probe", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("but must be a file in a directory that exists\n")


def test_a_run_that_has_trained_is_no_place_for_a_follower(capsys, tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert run_command(["follow", "127.0.0.1:1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("holds a run that has trained: choose another --out\n")


def test_a_port_in_use_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match="no store can be at"),
    ):
        run_local(len, 2, [[]], survival=Survival(1, 1, f"127.0.0.1:{taken.getsockname()[1]}"))
    assert not any(tmp_path.iterdir())


def test_a_working_directory_that_was_removed_is_named(tmp_path, monkeypatch, capsys):
    """Libraries abort the process there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert __main__._run_somewhere() == 2
    assert capsys.readouterr().err == (
        "error: the working directory was removed: change to one that exists\n"
    )


@pytest.mark.parametrize(
    ("flags", "saved", "says"),
    [
        (["--join", "store:7000"], False, "; continue with --join store:7000 while others train"),
        (
            ["--elastic", "--meet", "store:7000", "--replica", "1"],
            True,
            "; continue with --join store:7000 while others train, else with --out run --resume",
        ),
        ([], True, "; continue with --out run --resume"),
        ([], False, ""),
    ],
)
def test_ctrl_c_says_how_this_run_can_continue(fails, monkeypatch, tmp_path, flags, saved, says):
    """While others train, a replica that comes back without --join is refused."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, Train, interrupted)
    if saved:
        (tmp_path / "run/checkpoints/step-000002").mkdir(parents=True)
    assert fails("--out", "run", *flags, code=130) == f"error: interrupted{says}\n"


def test_a_replica_that_joins_has_no_number_yet(fails):
    line = fails("--join", "127.0.0.1:1", "--replica", "1", "--out", "run")
    assert (
        line
        == "error: --replica 1 conflicts with --join, which takes the next free number: leave --replica out\n"
    )
