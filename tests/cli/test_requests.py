"""Requests: the flags of a command reach it by their names, and a rank that starts afresh as plain values."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import tyro

from commands import RECIPE, write_recipe
from detonation.cli.arguments import verbs
from detonation.cli.command import run_command
from detonation.cli.verbs import requested
from detonation.cluster import launch
from detonation.train.recipe.resolve import Request, from_plain, to_plain
from detonation.train.run import start
from detonation.train.verbs.plan import Question
from detonation.train.verbs.probe import ProbeRequest
from detonation.train.verbs.simulate import Simulation

TRAIN = "train a.toml --set seed=1 mesh.shards=1 --set train.steps=3 --replicas 3 --shards 2 --link 1mbit --out runs/a"
MORE = "--resume --checkpoint-every 5 --keep 2 --stop-after 4 --logger wandb --logger trackio --web --interface lo"
SETS = ("seed=1", "mesh.shards=1", "train.steps=3")
FLAGS = (
    *('mesh.link="1mbit"', "train.checkpoint_every=5", "train.keep=2"),
    'train.loggers=["wandb", "trackio"]',
)


def test_flags_arrive_under_their_names():
    request = requested(Request, tyro.cli(verbs(), args=f"{TRAIN} {MORE} --json".split()))
    assert request == Request(
        Path("a.toml"),
        (*SETS, *FLAGS),
        replicas=3,
        shards=2,
        out=Path("runs/a"),
        resume=True,
        stop_after=4,
        web=True,
        interface="lo",
        to_stderr=True,
    )


def test_the_page_comes_to_the_loggers_of_the_recipe(tmp_path):
    recipe = str(
        write_recipe(tmp_path / "tiny.toml", train={**RECIPE["train"], "loggers": ["wandb"]})
    )
    for more, loggers in (
        ([], ("wandb", "web")),
        (["--logger", "trackio", "--logger", "web"], ("trackio", "web")),
    ):
        asked = requested(Request, tyro.cli(verbs(), args=["train", recipe, "--web", *more]))
        assert asked.layers(None).config().train.loggers == loggers


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        (Request, "train a.toml"),
        (Simulation, "simulate a.toml"),
        (Question, "plan"),
        (ProbeRequest, "probe"),
    ],
)
def test_each_field_of_a_request_is_a_flag(kind, verb):
    flags = {field.name for field in fields(tyro.cli(verbs(), args=verb.split()))}
    renamed = {"overrides": "set", "to_stderr": "json"}
    assert {renamed.get(field.name, field.name) for field in fields(kind)} <= flags


def test_a_request_travels_as_json():
    for request in (
        Request(Path("a.toml"), SETS, out=Path("b")),
        Request(Path("a.toml")),
        ProbeRequest(),
        ProbeRequest(Path("a.toml"), SETS, 2),
    ):
        assert from_plain(type(request), json.loads(json.dumps(to_plain(request)))) == request


@pytest.mark.long
def test_ranks_that_start_afresh_read_the_recipe_by_themselves(tmp_path, monkeypatch, capfd):
    """As where each has a GPU: a process of its own, to which JSON travels."""
    recipe = str(write_recipe(tmp_path / "tiny.toml"))
    train = ["train", recipe, "--set", "train.steps=2", "--json", "--out"]
    assert run_command([*train, str(tmp_path / "forked")]) == 0
    monkeypatch.setattr(launch, "gpus_for", lambda count: True)
    monkeypatch.setattr(start, "gpus_for", lambda count: True)
    assert run_command([*train, str(tmp_path / "afresh")]) == 0
    forked, afresh = map(json.loads, capfd.readouterr().out.splitlines())
    assert afresh["fingerprint"] == forked["fingerprint"] and afresh["directory"] == str(
        tmp_path / "afresh"
    )


@pytest.mark.long
def test_ranks_that_start_afresh_are_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "gpus_for", lambda count: True)
    monkeypatch.setattr(start, "gpus_for", lambda count: True)
    profile = tmp_path / "profile.json"
    assert (
        run_command(["probe", "--replicas", "2", "--shards", "1", "--out", str(profile), "--json"])
        == 0
    )
    assert json.loads(profile.read_text())["replicas"] == 2
