"""The probe of a recipe: every scheme's step is timed on its own, and the profile is what the next verb reads."""

import json
import logging

import pytest
import tomli_w

from detonation.cli.command import run_command
from detonation.cluster.launch import run_local
from detonation.cluster.network.profile import Profile
from detonation.core.schemes.scheme import SCHEMES
from detonation.train.recipe.resolve import Layers
from detonation.train.verbs import probe
from limits import LIMIT_S


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Also in the ranks, which are forks."""
    monkeypatch.setattr(probe, "_AXIS_S", 0.3)


def test_a_recipe_is_probed_with_every_scheme(tiny, tiny_recipe):
    config = tiny("mesh.shards=2", "optimizer.name=SignSGD", "optimizer.lr=1e-3")
    recipe = {
        **tiny_recipe,
        "optimizer": {"name": "SignSGD", "lr": 1e-3},
    }  # which every scheme can be used with
    task = probe.ProbeTask(config.mesh, "tiny", Layers(recipe, {}), config)
    tables = run_local(probe.probe_on_rank, 4, [task], timeout_s=LIMIT_S)
    profile = Profile.of(tables[0])
    assert (profile.replicas, profile.shards, profile.backend) == (2, 2, "gloo")
    assert profile.compute is not None and profile.compute.steps.keys() == SCHEMES.keys()
    assert all(step.exchange_s > 0 for step in profile.compute.steps.values())
    assert {name: axis.size for name, axis in profile.axes.items()} == {"replicate": 2, "shard": 2}


@pytest.mark.long  # no branch of its own
def test_a_recipe_that_logs_publishes_and_is_elastic_is_probed_without_that(
    tmp_path, capsys, tiny_recipe
):
    """Such a recipe allows no scheme in which replicas never agree; the profile says what was measured."""
    recipe, out = tmp_path / "tiny.toml", tmp_path / "profile.json"
    train = {**tiny_recipe["train"], "log_updates": True, "publish": "127.0.0.1:0"}
    recipe.write_text(
        tomli_w.dumps(
            {**tiny_recipe, "train": train, "mesh": {**tiny_recipe["mesh"], "elastic": True}}
        )
    )
    assert (
        run_command(["probe", str(recipe), "--out", str(out), "--set", "train.accumulate=2"]) == 0
    )
    compute = Profile.read(out).compute
    assert {"none", "full"} < compute.steps.keys() and compute.examples == 2 * train["batch_size"]


def test_the_verb_measures_a_world_without_a_recipe(tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert (
        run_command(["probe", "--replicas", "2", "--shards", "1", "--out", str(out), "--json"]) == 0
    )
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text())
    assert Profile.read(out).compute is None and "all-gather" in printed.err


def test_a_profile_counts_for_the_model_that_was_measured_alone(tmp_path, capsys, tiny_recipe):
    recipe, out = tmp_path / "tiny.toml", tmp_path / "profile.json"
    tuned = {
        "decoupled_adamw": {"optimizer": {"name": "AdamW", "lr": 1e-3}}
    }  # as the recipes have it
    recipe.write_text(
        tomli_w.dumps({**tiny_recipe, "optimizer": {"name": "SignSGD", "lr": 1e-3}, "tuned": tuned})
    )
    warnings = logging.FileHandler(tmp_path / "warnings")  # of the ranks, which are forks
    logging.getLogger("detonation").addHandler(warnings)
    try:
        assert run_command(["probe", str(recipe), "--out", str(out)]) == 0
    finally:
        logging.getLogger("detonation").removeHandler(warnings)
        warnings.close()
    assert (
        "loss" not in (tmp_path / "warnings").read_text()
    )  # nothing is trained that could warn of one
    capsys.readouterr()
    measured = Profile.read(out).compute
    seconds, larger = measured.forward_backward_s, ["--set", "model.layers=2"]
    twice, half = (["--set", f"train.{key}"] for key in ("accumulate=2", "batch_size=2"))
    known = [
        ([str(recipe)], 1),
        (["--parameters", "27k"], 1),
        ([str(recipe), *twice], 2),
        ([str(recipe), *half], 0.5),
    ]
    for about, times in known:
        assert run_command(["plan", *about, "--profile", str(out), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {option["compute_s"] for option in found["options"]} == {times * seconds}
    assert run_command(["plan", str(recipe), *larger, "--profile", str(out), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    was = (
        f"{out} is of the recipe tiny with {measured.parameters:,} parameters, and this model has "
    )
    assert found["error"].startswith(was) and found["error"].endswith(
        ": probe again, or give --step-time"
    )
    assert run_command(["plan", "--parameters", "1b", "--profile", str(out), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith(
        f"{was}1,000,000,000: probe again"
    )
    assert (
        run_command(["plan", "--parameters", "1b", "--profile", str(out), "--step-time", "0.5"])
        == 0
    )


def test_bad_input_is_one_line(capsys):
    for arguments, line in {
        ("--set", "train.steps=1"): "error: --set changes a recipe: name a recipe",
        ("--link", "fast"): "error: a link is 'fast', must be a rate above 0",
        ("--replicas", "0"): "error: mesh.replicas is 0, but must be at least 1",
        ("nothing.toml",): "error: cannot read the recipe 'nothing.toml'",
    }.items():
        assert run_command(["probe", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(line) and len(error.splitlines()) == 1
