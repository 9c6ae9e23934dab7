"""Keys and verbs that are gone: each gets one line with what to do in its place."""

from pathlib import Path

import pytest

from detonation.cli.command import run_command

QUICK = str(Path(__file__).parents[2] / "recipes" / "quick-lm.toml")


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            "model.rope_theta=1e6",
            "argument of model olmo2 'rope_theta' is gone since version 0.2: "
            'take model "hf:NAME" and its key rope_parameters',
        ),
        (
            "mesh.shard_resync_every=3",
            "key of [mesh] 'shard_resync_every' is gone since version 0.2: "
            "leave it out, or give dt.shard_wire(resync_every=...) in a loop of your own",
        ),
    ],
)
def test_a_setting_that_is_not_there_any_more_names_the_remedy(sets, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_command(["train", QUICK, "--set", sets]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_in_a_recipe_too(capsys, tmp_path):
    recipe = tmp_path / "old.toml"
    recipe.write_text(Path(QUICK).read_text().replace("[mesh]\n", "[mesh]\nnamespaces = true\n"))
    assert run_command(["train", str(recipe)]) == 2
    line = "key of [mesh] 'namespaces' is gone since version 0.2: leave it out; `link` emulates the network"
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["replay", "runs/first", "--to", "3"], "detonation follow DIR"),
        (["recipes"], "detonation train, which lists them, and detonation train NAME --print"),
        (["env", "--json"], "detonation --version"),
    ],
)
def test_a_verb_that_is_not_there_any_more_names_the_new_one(arguments, instead, capsys):
    assert run_command(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: detonation {arguments[0]} is gone: say {instead}\n"
    assert (instead in printed.out) == ("--json" in arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["simulate", QUICK, "--profile=profile.json"],
            "simulate --profile is gone: say detonation plan RECIPE --link RATE --replicas INT --step-time SECONDS",
        ),
        (
            ["plan", "--shard-nodes", "2"],
            "plan --shard-nodes is gone: the tutorial larger-than-a-node has the bytes and the memory of a shard wire "
            "by formula",
        ),
        (
            ["report", "runs/first", "--plan=plan.json"],
            "report --plan is gone: detonation plan prints it, and that of scheme auto is in plan.json of the run",
        ),
        (["--completion", "zsh"], "--completion is gone: say detonation --tyro-print-completion bash, zsh or fish"),
    ],
)
def test_a_flag_that_is_not_there_any_more_names_what_to_say(arguments, line, capsys):
    assert run_command(arguments) == 2
    assert capsys.readouterr().err == f"error: detonation {line}\n"
