"""Names of version 0.1: each gets one line with the name that took its place."""

import json
from pathlib import Path

import pytest
import torch

import detonation as dt
from detonation.cli.command import run_command
from detonation.cluster.network.loopback import LoopbackCommunicator

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


def test_in_a_loop_too():
    model = torch.nn.Linear(2, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"argument of replicate 'lanes' is called intra_node since version 0\.2"):
        dt.replicate(base, model, LoopbackCommunicator(), dt.full(), lanes=None)
    with pytest.raises(TypeError, match=r"argument of Safety 'on_drift' is called on_desync since version 0\.2"):
        dt.Safety(on_drift="stop")
    with pytest.raises(TypeError, match=r"argument of scheme demo 'combine' is called aggregate since version 0\.2"):
        dt.demo(combine="senders")
    optimizer = dt.replicate(base, model, LoopbackCommunicator(), dt.full())
    with pytest.raises(AttributeError, match=r"optimizer\.settle is called optimizer\.synchronize since version 0\.2"):
        optimizer.settle()
    with pytest.raises(AttributeError, match=r"optimizer\.bytes_sent is called optimizer\.stats\.bytes_sent since"):
        _ = optimizer.bytes_sent
    assert not hasattr(optimizer, "nothing")
