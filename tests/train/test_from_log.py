"""A run with a log that is killed before its first checkpoint goes on from its log, from its first step on."""

import shutil

import pytest

import own
from detonation.checkpoint.verify import load_weights
from detonation.core.flat.tensors import digest
from detonation.models import build_model
from detonation.train.output import directory, metrics

SETS = ["train.steps=6", "train.log_updates=true", "optimizer.lr=0.01"]
FULL = ["scheme.name=full"]


@pytest.fixture
def killed(train, tmp_path):
    """Trains five steps of a run in `run`, and leaves it without a checkpoint; returns the directory of that."""

    def trained(*sets, **said):
        train("run", *SETS, *sets, stop_after=5, **said)
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "aside")
        return tmp_path / "aside"

    return trained


def weights(config, path):
    model = build_model(config.model.name, config.model.arguments)
    load_weights(path, model)
    return digest(model.parameters())


def content(path):
    return {
        each: each.read_bytes()
        for each in path.rglob("*")
        if each.is_file() and each.name != ".lock"
    }


@pytest.mark.parametrize("name, step", [("demo", 5), ("diloco", 3)])
def test_the_weights_are_those_after_the_last_step_on_which_all_agreed(
    name, step, train, killed, tiny, tmp_path
):
    """With error feedback, and of rounds of three steps."""
    sets = [f"scheme.name={name}", *["scheme.every=3"] * (name == "diloco")]
    seen = killed(*sets)
    if step < 5:
        shutil.rmtree(seen)
        train("whole", *SETS, *sets, stop_after=step)
        (tmp_path / "whole" / "checkpoints").rename(seen)
    (
        tmp_path / "run" / "checkpoints"
    ).mkdir()  # as of a process that was killed while it saved the first
    train("run", *SETS, *sets, stop_after=step, resume=True)
    assert weights(tiny(), seen) == weights(tiny(), tmp_path / "run")
    assert [record.step for record in metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        *range(1, step + 1)
    ]


def test_without_memories_the_run_ends_as_if_it_had_not_been_killed(
    train, killed, tmp_path, monkeypatch, capfd
):
    """It began with a model of its own; where the weights of that are others now, it is refused."""
    monkeypatch.setattr("detonation.data.tokens.cache_dir", lambda: tmp_path / "cache")
    rows = {"source": str(own.json_lines(tmp_path / "rows.jsonl", count=600)), "context": 16}
    model = {"name": f"hf:{own.model(tmp_path / 'llama', 'text')}", "pretrained": True}
    data = {"task": "text", "tokenizer": str(own.tokenizer(tmp_path / "words")), **rows}
    said = {"tables": {"model": model, "data": data}}
    whole = train("whole", *SETS, *FULL, **said)[0]
    killed(*FULL, **said)
    shutil.copytree(tmp_path / "llama", tmp_path / "as it was")
    own.model(tmp_path / "llama", "text")
    before = content(tmp_path / "run")
    with pytest.raises(RuntimeError, match="begins with other weights than this run"):
        train("run", *SETS, *FULL, resume=True, **said)
    assert content(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "llama")
    shutil.copytree(tmp_path / "as it was", tmp_path / "llama")
    capfd.readouterr()
    resumed = train("run", *SETS, *FULL, resume=True, **said)[0]
    assert "5 steps of the log follow: training goes on after step 5" in capfd.readouterr().out
    assert (resumed["fingerprint"], resumed["val_loss"]) == (
        whole["fingerprint"],
        whole["val_loss"],
    )
    curves = [
        [r.loss for r in metrics.read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "run")
    ]
    assert curves[0] == curves[1]


def test_what_is_not_the_run_of_the_log_is_refused_and_leaves_it(train, killed, tmp_path):
    """A start that may be a restart, where nobody is there to say what to do, begins anew."""
    killed(*FULL)
    before, other = content(tmp_path / "run"), "mesh.shards=2"
    for sets, said in (
        ("seed=4", r"config.toml was written with seed 0, this run has 4: resume with the same"),
        (
            "optimizer.weight_decay=0.5",
            r"config.toml was written with optimizer.weight_decay .*, this run has 0.5",
        ),
        (
            other,
            r"cannot continue from the log: .* shards 1, this run has 2: .*; resume with the settings of",
        ),
        (
            "train.log_updates=false",
            "which has no checkpoints; add --log to continue from its log of updates",
        ),
    ):
        with pytest.raises(RuntimeError, match=said):
            train("run", *SETS, *FULL, sets, resume=True)
        assert content(tmp_path / "run") == before
    assert train("run", *SETS, *FULL, other, resume=True, may_start=True)[0]["steps"] == 6
    assert 0 in directory.log_starts(tmp_path / "run")
