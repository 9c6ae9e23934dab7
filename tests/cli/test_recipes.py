"""Recipes by name, the flags that stand for settings, and the version, as someone without a checkout uses them."""

import json
from pathlib import Path

import pytest
import torch

from detonation.cli.arguments import Train
from detonation.cli.command import run_command
from detonation.cli.verbs import requested
from detonation.core.schemes.scheme import SCHEMES
from detonation.link_speed import LinkSpeed
from detonation.models import MODELS
from detonation.train.output import directory
from detonation.train.recipe.optimizers import REFUSED, optimizer_classes
from detonation.train.recipe.resolve import Request, read_recipe, shipped_recipes
from detonation.version import __version__


def test_recipes_are_listed_printed_and_found_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # no checkout here
    assert run_command(["train", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["recipes"]
    assert (
        {"quick-lm", "vit-fashion", "t5-translation", "three-tiers"}
        <= listed.keys()
        == shipped_recipes().keys()
    )
    assert all(text.endswith((".", "images.")) for text in listed.values())
    for name in listed:
        assert run_command(["train", name, "--print"]) == 0
        (tmp_path / f"{name}.toml").write_text(capsys.readouterr().out)
        assert read_recipe(tmp_path / f"{name}.toml") == packaged(name)
    assert run_command(["train", "quick", "--print"]) == 2
    assert "unknown recipe 'quick', did you mean 'quick-lm'?" in capsys.readouterr().err
    (tmp_path / "own.toml").write_text("seed = 3\n")
    assert run_command(["train", str(tmp_path / "own.toml"), "--print"]) == 0
    assert capsys.readouterr().out == "seed = 3\n"


def packaged(name):
    return read_recipe(Path(name))


def test_a_file_of_the_directory_hides_a_recipe_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick-lm").write_text("seed = 7\n")
    assert packaged("quick-lm") == {"seed": 7}


def test_a_name_that_is_no_recipe_gets_the_names_of_those_that_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["train", "quick"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: cannot read the recipe 'quick': No such file")
        and "quick-lm, t5-base" in error
    )


def test_flags_stand_for_settings_and_set_counts_more():
    flags = {
        "scheme": "random_sign",
        "steps": 7,
        "lr": 0.5,
        "model": "vit",
        "data": "fashion-mnist",
    }
    verb = Train(recipe=Path("vit-fashion"), set=(("optimizer.lr=0.25",),), **flags)
    config = requested(Request, verb).layers(None).config()
    assert (config.scheme.name, config.train.steps, config.optimizer.lr) == ("random_sign", 7, 0.25)
    assert (config.model.name, config.data.arguments["source"]) == ("vit", "fashion-mnist")
    assert config.optimizer.name == "SignSGD"  # as the recipe has tuned it for that scheme


def test_train_alone_lists_all_that_a_run_can_be_made_of(capsys):
    assert run_command(["train", "--json"]) == 0
    printed = capsys.readouterr()
    listed = json.loads(printed.out)
    assert {*listed["optimizers"]} == optimizer_classes().keys() - REFUSED
    assert (
        {*listed["schemes"]} >= SCHEMES.keys()
        and {*listed["models"]} >= {*MODELS}
        and "sotu" in listed["data sets"]
    )
    assert all(name in printed.err for names in listed.values() for name in names)
    assert max(map(len, printed.err.splitlines())) <= 100


@pytest.mark.parametrize("flags", [["--steps", "3"], ["quick-lm", "--print", "--web"]])
def test_a_flag_that_would_train_nothing_is_refused(flags, capsys):
    assert run_command(["train", *flags]) == 2
    said = (
        "train needs a recipe, and --print takes no other flag: run detonation train without"
        " arguments for a list of the recipes"
    )
    assert capsys.readouterr().err == f"error: {said}\n"


def test_the_version_is_printed_and_all_others_for_a_bug_report(capsys):
    assert run_command(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"detonation {__version__}" and any(
        line.startswith("- torch: ") for line in others
    )
    assert run_command(["--version", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["packages"]["torch"]
    assert torch.__version__.startswith(
        shown
    )  # whose wheel may leave out which CUDA it was built for


def test_two_machines_are_compared_before_a_run(capsys, tmp_path):
    assert run_command(["--version", "--json"]) == 0
    printed = capsys.readouterr().out
    there = tmp_path / "there.json"
    there.write_text(printed)
    assert run_command(["--version", "--compare", str(there)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "If a scheme exchanges gradients, replicas stay equal with "
        "SignSGD, SGD, AdamW, Muon, AdamW(fused=True) (bit for bit).",
        "If a scheme has rounds (diloco, ...), any optimizer works.",
    ]
    assert run_command(["--version", "--compare", str(tmp_path / "nothing")]) == 2
    assert "must be a file that detonation --version --json printed" in capsys.readouterr().err


def test_what_differs_between_two_machines_is_named():
    here = {"platform": "Linux 6 x86_64", "gpus": [], "packages": {"torch": "2.13"}}
    steps = {"SGD": "1", "Muon": "2", "AdamW": "3", "AdamW rounded singly": "4"}
    other = {**steps, "AdamW": "5", "Muon": "6"}
    told = directory.compare_machines(
        {**here, "steps": steps}, {**here, "steps": other, "platform": "Linux 5 aarch64"}
    )
    assert told[0] == "- platform: Linux 6 x86_64 here, Linux 5 aarch64 there"
    alike = (
        "If a scheme exchanges gradients, replicas stay equal with SGD (bit for bit); "
        "with AdamW, too, in slower steps"
    )
    assert told[1] == f"{alike}; close, but not equal, with Muon."
    here["steps"] = steps
    other = directory.compare_machines(
        here, {**here, "packages": {"torch": "2.12"}, "gpus": ["H100"]}
    )
    assert (
        other[-1]
        == "They will not train together, because these differ: torch, GPUs. Make them equal."
    )


@pytest.mark.parametrize(
    "text",
    [
        "20mbit",
        "20Mbit",
        "20Mbps",
        "20mbit/s",
        "20 Mbit/s",
        "0.02Gbit/s",
        "20000kbps",
        "20MBIT/S",
        "20mbps",
    ],
)
def test_a_link_is_read_as_people_and_our_own_tables_write_it(text):
    assert LinkSpeed.parse(text).rate_bits_per_s == pytest.approx(2e7)


@pytest.mark.parametrize("text", ["20MB/s", "20MBps", "20kBps", "2GBPS", "20mb", "20", "20mbit/h"])
def test_a_link_in_bytes_or_without_a_unit_is_refused(text):
    with pytest.raises(ValueError, match="must be a rate above 0 in bit"):
        LinkSpeed.parse(text)
