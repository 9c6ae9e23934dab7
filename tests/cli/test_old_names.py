"""Names of version 0.1: each gets one line with the name that took its place."""

import json
from pathlib import Path

import pytest

from detonation.cli.command import run_command

QUICK = str(Path(__file__).parents[2] / "recipes" / "quick-lm.toml")


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        ("scheme.combine=mean", "argument of scheme demo 'combine' is called aggregate since version 0.2"),
        (
            "scheme.error=keep",
            "argument of scheme demo 'error' is called error_feedback (true or false) since version 0.2",
        ),
        ("scheme.aggregate=replicas", "aggregate 'replicas' is called mean since version 0.2"),
        ("scheme.aggregate=senders", "aggregate 'senders' is called mean_nonzero since version 0.2"),
        ("scheme.aggregate=majority", "aggregate 'majority' is called majority_vote since version 0.2"),
        ("scheme.aggregate=clipped", "aggregate 'clipped' is called clipped_mean since version 0.2"),
        ("train.on_drift=stop", "key of [train] 'on_drift' is called on_desync since version 0.2"),
        ("mesh.lab=true", "key of [mesh] 'lab' is called namespaces since version 0.2"),
    ],
)
def test_a_setting_of_version_0_1_names_the_new_one(sets, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_command(["train", QUICK, "--set", sets]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_in_a_recipe_too(capsys, tmp_path):
    recipe = tmp_path / "old.toml"
    recipe.write_text(Path(QUICK).read_text().replace("[mesh]\n", "[mesh]\nlab = true\n"))
    assert run_command(["train", str(recipe)]) == 2
    assert capsys.readouterr().err == "error: key of [mesh] 'lab' is called namespaces since version 0.2\n"


def test_a_flag_of_version_0_1_names_the_new_one(capsys):
    compare = ["compare", QUICK, "--schemes", "full,demo", "--link", "1gbit", "--lab"]
    line = "flag --lab is called --namespaces since version 0.2"
    assert run_command(compare) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert run_command([*compare, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": line, "code": 2}
