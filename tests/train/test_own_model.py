"""Runs of people's own models and data: real worlds, exact resumption, export, other beginnings, more steps."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import tomli_w
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import own
from covering import some
from detonation.checkpoint.verify import load_weights
from detonation.cli.command import run_command
from detonation.models import build_model
from detonation.train.output import metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a model, a tokenizer, and rows of text; tokens are kept in it, too."""
    monkeypatch.setattr("detonation.data.tokens.cache_dir", lambda: tmp_path / "cache")
    own.model(tmp_path / "llama", "text")
    own.tokenizer(tmp_path / "words")
    own.json_lines(tmp_path / "rows.jsonl", count=600)
    return tmp_path


def tables(here, streaming=False, pretrained=True):
    arguments = {
        "source": str(here / "rows.jsonl"),
        "tokenizer": str(here / "words"),
        "context": 16,
    }
    return {
        "model": {"name": f"hf:{here / 'llama'}", "pretrained": pretrained},
        "data": {"task": "text", **arguments, **({"streaming": True} if streaming else {})},
    }


@some("streaming", [False, True], keep=[True], ids=["rows", "stream"])
def test_a_model_and_rows_of_ones_own_resume_exactly(train, here, capfd, streaming):
    if streaming:
        pytest.importorskip("datasets")
    said = {"tables": tables(here, streaming)}
    sets = ["train.steps=6", "train.accumulate=2", "optimizer.lr=0.01"]
    whole = train("whole", *sets, **said)[0]
    train("parts", *sets, stop_after=3, **said)
    resumed = train("parts", *sets, resume=True, **said)[0]
    assert (resumed["fingerprint"], resumed["val_loss"]) == (
        whole["fingerprint"],
        whole["val_loss"],
    )
    curves = [
        [r.loss for r in metrics.read_metrics(here / run / "metrics.jsonl")]
        for run in ("whole", "parts")
    ]
    assert curves[0] == curves[1] and whole["replicas_equal"]
    assert curves[0][-1] < curves[0][0]
    if streaming:
        train("other", *sets, stop_after=3, **said)
        capfd.readouterr()
        assert train("other", *sets, "mesh.shards=2", resume=True, **said)[0]["steps"] == 6
        assert (
            "the stream is read again up to this step, because the number of ranks changed"
            in capfd.readouterr().out
        )


@pytest.mark.long  # no branch of its own
def test_images_of_any_size_train_a_classifier_with_a_new_head(train, tiny, tmp_path):
    for number in range(60):
        folder = tmp_path / "photos" / ("dark", "light", "grey")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10 + number % 7, 12), (80 * (number % 3),) * 3).save(
            folder / f"{number}.png"
        )
    made = {
        "model": {"name": f"hf:{own.model(tmp_path / 'vit', 'images')}", "pretrained": True},
        "data": {"task": "images", "source": str(tmp_path / "photos")},
    }
    config = tiny(**made)
    assert config.data.arguments["size"] == 8
    sizes = {"image_size": 8, "channels": 3, "classes": 3, "task": "images"}
    assert config.model.arguments == {"pretrained": True, **sizes}
    summary = train(
        "run", "train.steps=12", "train.batch_size=8", "optimizer.lr=0.01", tables=made
    )[0]
    assert summary["replicas_equal"] and summary["val_accuracy"] > 0.6


@pytest.mark.long  # no branch of its own
def test_pairs_train_a_sequence_to_sequence_model(train, here):
    rows = [
        json.dumps({"translation": {"a": f"the cat {i}", "b": f"the dog {i}"}}) for i in range(80)
    ]
    (here / "pairs.jsonl").write_text("\n".join(rows))
    made = {
        "model": {"name": f"hf:{own.model(here / 'bart', 'translation')}", "pretrained": True},
        "data": {
            "task": "translation",
            "source": str(here / "pairs.jsonl"),
            "tokenizer": str(here / "words"),
        },
    }
    assert train(
        "run", "data.source_length=16", "data.target_length=16", "train.steps=2", tables=made
    )[0]["replicas_equal"]


def test_an_export_has_its_tokenizer_and_the_modes_of_new_files(train, here, capsys):
    train("run", "train.steps=2", tables=tables(here))
    mask = os.umask(0o027)
    try:
        assert run_command(["export", str(here / "run"), "--out", str(here / "model")]) == 0
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (here / "model").iterdir()} == {0o640}
    model, words = (
        kind.from_pretrained(here / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = words("the cat sat on", return_tensors="pt").input_ids
    assert (
        ids.tolist()
        == AutoTokenizer.from_pretrained(here / "words")(
            "the cat sat on", return_tensors="pt"
        ).input_ids.tolist()
    )
    assert words.decode(model.generate(ids, max_new_tokens=2)[0]).startswith("the cat sat on")


def tokenizer_is_of_bytes(folder):
    words = AutoTokenizer.from_pretrained(folder)
    for text in ("Fellow citizens,\n\t we", "Grüße, 世界 \x00\x7f"):
        assert (
            words(text).input_ids == list(text.encode())
            and words.decode(list(text.encode())) == text
        )
    return len(words) == 256


def test_a_run_begins_with_the_weights_of_a_run_or_of_an_export(
    train, tiny_recipe, tmp_path, capfd
):
    first = train("first", "train.steps=8", "optimizer.lr=0.01")[0]
    assert run_command(["export", str(tmp_path / "first"), "--out", str(tmp_path / "model")]) == 0
    assert tokenizer_is_of_bytes(tmp_path / "model")
    losses = {}
    for name, source in {"run": "first", "export": "model", "nothing": ""}.items():
        begin = [f"train.init_from={tmp_path / source}"] if source else []
        sets = [
            *begin,
            "train.steps=2",
            "mesh.shards=2",
            "scheme.name=diloco",
            "scheme.every=2",
            "seed=5",
        ]
        train(name, *sets)
        losses[name] = [
            record.loss for record in metrics.read_metrics(tmp_path / name / "metrics.jsonl")
        ]
    assert losses["run"] == losses["export"] != losses["nothing"]
    assert losses["run"][0] < first["train_loss"] < losses["nothing"][0]
    assert f"weights of {tmp_path / 'first'}/checkpoints/step-000008\n" in capfd.readouterr().out
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(tiny_recipe))
    arguments = [
        "--init-from",
        str(tmp_path / "first"),
        "--steps",
        "1",
        "--out",
        str(tmp_path / "virtual"),
        "--json",
    ]
    assert run_command(["simulate", str(tmp_path / "tiny.toml"), *arguments]) == 0
    assert (
        metrics.read_metrics(tmp_path / "virtual" / "metrics.jsonl")[0].loss
        < losses["nothing"][0] - 0.5
    )


@pytest.mark.long  # a start and a restart are the tests around it
def test_a_start_that_may_be_a_restart_begins_with_the_weights_too(
    train, tiny_recipe, tmp_path, monkeypatch, capfd
):
    """As by the launch files of examples, which give --resume at each start."""
    train("first", "train.steps=8", "optimizer.lr=0.01")
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(tiny_recipe))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    command = [
        "train",
        str(tmp_path / "tiny.toml"),
        "--init-from",
        str(tmp_path / "first"),
        "--steps",
        "1",
        "--out",
    ]
    assert run_command([*command, str(tmp_path / "plain")]) == 0
    assert run_command([*command, str(tmp_path / "resumed"), "--resume"]) == 0
    plain, resumed = (
        metrics.read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in ("plain", "resumed")
    )
    assert resumed.loss == plain.loss
    assert (
        capfd.readouterr().out.count(f"weights of {tmp_path / 'first'}/checkpoints/step-000008\n")
        == 2
    )


def test_a_restart_from_a_checkpoint_does_not_read_the_weights_of_the_start(train, tmp_path):
    train("first", "train.steps=1")
    sets = [f"train.init_from={tmp_path / 'first'}", "train.steps=4"]
    whole = train("whole", *sets)[0]
    train("run", *sets, stop_after=2)
    shutil.rmtree(tmp_path / "first")
    again = train("run", *sets, resume=True, may_start=True)[0]
    assert again["fingerprint"] == whole["fingerprint"]


def test_weights_of_another_model_and_of_nowhere_are_refused(train, tiny, tmp_path, capsys):
    train("run", "train.steps=1")
    model = build_model("olmo2", {**tiny().model.arguments, "layers": 2})
    with pytest.raises(
        ValueError,
        match=r"model\.layers\.1\..* is not in the checkpoint: it was written by another",
    ):
        load_weights(tmp_path / "run", model)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_weights(tmp_path, model)
    own.model(tmp_path / "llama", "text")
    with pytest.raises(
        ValueError,
        match=r"llama has model\.embed_tokens\.weight with shape \(400, 16\), but this model has \(256, 32\)",
    ):
        load_weights(tmp_path / "llama", model)
    assert run_command(["train", "quick-lm", "--init-from", str(tmp_path / "none")]) == 2
    assert "error: train.init_from is" in capsys.readouterr().err


def test_the_example_trains(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(EXAMPLES)
    out = [
        "--steps",
        "12",
        "--set",
        "train.validation_batches=2",
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]
    assert run_command(["train", "my_model.toml", *out]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    records = metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert summary["replicas_equal"] and records[-1].loss < records[0].loss - 1
    sys.modules.pop("my_model", None)


CONSTANT = ("schedule.name=constant", "optimizer.name=SGD", "optimizer.lr=0.05")


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize(
    ("sets", "equal"),
    [
        pytest.param(CONSTANT, True, marks=pytest.mark.long),
        (["scheme.name=diloco", "scheme.every=2", *CONSTANT], True),
        pytest.param(["scheme.name=diloco", "scheme.every=3"], False, marks=pytest.mark.long),
    ],
    ids=["demo", "diloco", "cosine-in-mid-round"],
)
def test_a_finished_run_goes_on_as_if_more_steps_had_been_asked_for(
    train, tmp_path, capfd, sets, equal
):
    whole = train("whole", *sets, "train.steps=8")[0]
    train("more", *sets, "train.steps=4")
    capfd.readouterr()
    resumed = train("more", *sets, "train.steps=8", resume=True)[0]
    said = capfd.readouterr().out
    assert (resumed["fingerprint"] == whole["fingerprint"]) == equal
    assert (
        resumed["steps"] == 8
        and len(metrics.read_metrics(tmp_path / "more" / "metrics.jsonl")) == 8
    )
    assert "train.steps is 8, was 4" in said


def test_a_finished_run_is_not_begun_again(train, tmp_path, capsys, monkeypatch):
    train("run", "train.steps=2")
    for steps in ("2", "1"):
        assert (
            run_command(
                ["train", "quick-lm", "--out", str(tmp_path / "run"), "--resume", "--steps", steps]
            )
            == 2
        )
        assert (
            "choose another --out, or remove it; give --resume and more --steps than 2 to continue it"
            in capsys.readouterr().err
        )
    assert (tmp_path / "run" / "summary.json").exists()
