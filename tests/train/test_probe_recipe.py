"""The probe of a recipe: every scheme's step is timed on its own, and the profile is what the next verb reads."""

import json

import pytest

from detonation.cli.command import run_command
from detonation.cluster.launch import run_local
from detonation.cluster.network.profile import Profile
from detonation.core.schemes.registry import SCHEMES
from detonation.train.recipe.layers import Layers
from detonation.train.verbs import probe


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Also in the ranks, which are forks."""
    monkeypatch.setattr(probe, "_AXIS_S", 0.3)


def test_a_recipe_is_probed_with_every_scheme(tiny, tiny_recipe):
    config = tiny("mesh.shards=2", "optimizer.name=SignSGD", "optimizer.lr=1e-3")
    recipe = {**tiny_recipe, "optimizer": {"name": "SignSGD", "lr": 1e-3}}  # which every scheme can be used with
    task = probe.ProbeTask(config.mesh, "tiny", Layers(recipe, {}), config)
    tables = run_local(probe.probe_on_rank, 4, [task], timeout_s=120)
    profile = Profile.of(tables[0])
    assert (profile.replicas, profile.shards, profile.backend) == (2, 2, "gloo")
    assert profile.compute is not None and profile.compute.steps.keys() == SCHEMES.keys()
    assert all(step.exchange_s > 0 for step in profile.compute.steps.values())
    assert {name: axis.size for name, axis in profile.axes.items()} == {"replicate": 2, "shard": 2}


def test_the_verb_measures_a_world_without_a_recipe(tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert run_command(["probe", "--replicas", "2", "--shards", "1", "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text())
    assert Profile.read(out).compute is None and "all-gather" in printed.err


def test_bad_input_is_one_line(capsys):
    for arguments, line in {
        ("--set", "train.steps=1"): "error: --set changes a recipe: name one",
        ("--link", "fast"): "error: a link is 'fast', must be a rate above 0",
        ("--replicas", "0"): "error: mesh.replicas is 0, but must be at least 1",
        ("nothing.toml",): "error: cannot read the recipe 'nothing.toml'",
    }.items():
        assert run_command(["probe", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(line) and len(error.splitlines()) == 1
