"""Export: what a run trained is what transformers loads, with the loss that the run measured."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import detonation as dt
import own
from detonation import data
from detonation.checkpoint.verify import load_weights
from detonation.cli.command import run_command
from detonation.cluster.launch import run_local
from detonation.models import build_model
from detonation.train.loop.checks import load_data
from detonation.train.verbs import export
from detonation.train.verbs.export import _removed_on_failure, _save


def measured(folder, config):
    """The validation loss of the model in `folder`, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    train = config.train
    held_out = data.batches(
        load_data(config.data).validation, train.batch_size, train.validation_batches * 4
    )
    counts, losses = [], []
    with torch.no_grad():
        for batch in held_out:
            counts.append(data.predictions("text", batch))
            losses.append(model(**batch).loss.item() * counts[-1])
    return sum(losses) / sum(counts)


def test_transformers_loads_what_was_trained_and_measures_the_same_loss(
    train, tiny, tmp_path, capsys
):
    sets = ["scheme.name=diloco", "scheme.every=4", "mesh.shards=2", "train.steps=3"]
    summary = train("run", *sets)[0]
    assert (
        run_command(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model"), "--json"])
        == 0
    )
    exported = json.loads(capsys.readouterr().out)
    assert (exported["step"], exported["num_parameters"]) == (3, summary["num_parameters"])
    assert measured(tmp_path / "model", tiny(*sets)) == pytest.approx(summary["val_loss"], rel=1e-6)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["use_cache"] is True
    assert run_command(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 2
    assert "is not empty: choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "translation", "older", "random", "uncached"])
def test_it_generates_as_its_base_does_with_other_weights(train, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("detonation.data.tokens.cache_dir", lambda: tmp_path / "cache")
    task = {"translation": "translation"}.get(kind, "text")
    config = own.configuration(task)
    config.use_cache = kind != "uncached"
    base = own.CLASSES[task](config)
    ends = {"eos_token_id": [0, 7], "pad_token_id": 1, "decoder_start_token_id": 0}
    base.generation_config = GenerationConfig(max_length=33, repetition_penalty=1.3, **ends)
    base.save_pretrained(tmp_path / "base")
    if kind == "older":
        written = tmp_path / "base" / "generation_config.json"
        table = json.loads((tmp_path / "base" / "config.json").read_text())
        (tmp_path / "base" / "config.json").write_text(
            json.dumps({**table, "repetition_penalty": 1.3, "max_length": 33})
        )
        written.unlink()
    pairs = [{"translation": {"a": f"cat {i}", "b": f"dog {i}"}} for i in range(100)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = {"task": "text", "source": str(own.json_lines(tmp_path / "rows.jsonl")), "context": 16}
    if task == "translation":
        lengths = {"source_length": 20, "target_length": 20}
        data = {"task": task, "source": str(tmp_path / "pairs.jsonl"), **lengths}
    tables = {
        "model": {"name": f"hf:{tmp_path / 'base'}", "pretrained": kind != "random"},
        "data": {**data, "tokenizer": str(own.tokenizer(tmp_path / "words", side="left"))},
    }
    train("run", "train.steps=1", "schedule.warmup=0", "mesh.replicas=1", tables=tables)
    out = tmp_path / "model"
    assert run_command(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    side = {"translation": "right"}.get(task, "left")  # as training padded; it pads no plain text
    assert AutoTokenizer.from_pretrained(out).padding_side == side
    load = own.CLASSES[task].from_pretrained
    base, exported = load(tmp_path / "base"), load(out)
    assert exported.config.use_cache == base.config.use_cache
    if kind == "random":
        assert exported.generation_config.repetition_penalty != 1.3
        return
    assert exported.generation_config.to_diff_dict() == base.generation_config.to_diff_dict()
    base.load_state_dict(exported.state_dict())
    ids = torch.tensor([[10, 11, 12, 13]])
    assert torch.equal(base.generate(ids), exported.generate(ids))


@pytest.mark.parametrize("kind", ["text", "tied", "experts", "sines"])
def test_an_exported_model_has_every_weight(tmp_path, kind):
    sizes = {"layers": 1, "hidden_size": 16, "heads": 2, "feed_forward": 16, "experts": 2}
    if kind == "experts":
        model = build_model("olmoe", sizes)
    else:
        config = own.configuration({"tied": "text"}.get(kind, kind))
        config.tie_word_embeddings = kind != "text"
        model = own.CLASSES[{"tied": "text"}.get(kind, kind)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # as a training changes even weights that a class computes
    _save(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)
    if kind != "experts":  # its file has other names
        load_weights(tmp_path, loaded)


def test_a_weight_that_transformers_does_not_write_is_named(tmp_path, monkeypatch):
    model = own.CLASSES["text"](own.configuration("text"))
    torch.nn.init.constant_(model.model.norm.weight, 2)
    state = {key: value for key, value in model.state_dict().items() if key != "model.norm.weight"}
    save = type(model).save_pretrained
    monkeypatch.setattr(
        type(model), "save_pretrained", lambda self, out: save(self, out, state_dict=state)
    )
    with pytest.raises(ValueError, match=r"would lack model\.norm\.weight, .*: use ") as raised:
        _save(model, tmp_path)
    assert "\n" not in str(raised.value)


def test_in_mid_round_it_is_the_mean_and_replicas_that_never_agree_have_none(
    train, tmp_path, capsys
):
    train("round", "scheme.name=diloco", "scheme.every=4", stop_after=2)
    assert run_command(["export", str(tmp_path / "round"), "--out", str(tmp_path / "mean")]) == 0
    train("alone", "scheme.name=none", stop_after=1)
    capsys.readouterr()
    assert run_command(["export", str(tmp_path / "alone"), "--out", str(tmp_path / "none")]) == 2
    assert "by 2 replicas that trained independently: it has no" in capsys.readouterr().err
    assert run_command(["export", str(tmp_path), "--out", str(tmp_path / "none")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_code_that_a_checkpoint_names_is_run_on_request_alone(
    train, tiny_recipe, tmp_path, capsys, monkeypatch
):
    (tmp_path / "own_model.py").write_text(
        "from detonation.models.built_in import olmo2 as build\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    train(
        "own",
        "train.steps=1",
        tables={"model": {**tiny_recipe["model"], "name": "own_model:build"}},
    )
    assert run_command(["export", str(tmp_path / "own"), "--out", str(tmp_path / "model")]) == 2
    assert (
        "names the code own_model:build, which export would run: say --trust-code"
        in capsys.readouterr().err
    )
    assert (
        run_command(
            ["export", str(tmp_path / "own"), "--out", str(tmp_path / "model"), "--trust-code"]
        )
        == 0
    )


def of_ones_own():
    """A model with buffers, and with a parameter of which the second shard has nothing."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.PReLU())


def own_loop(directory):
    """Two steps of a loop that knows no recipes, on two shards; returns the weights."""
    mesh = dt.init_mesh(replicas=1, shards=2, device="cpu")
    model = dt.shard(of_ones_own(), mesh)
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters()), model, mesh["replicate"], dt.full()
    )
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    dt.save_checkpoint(
        directory, model, optimizer, {"config": {"lr": 0.1}}
    )  # values of its own under any name
    full = [
        p.full_tensor() if hasattr(p, "full_tensor") else p
        for p in (*model.parameters(), *model.buffers())
    ]
    return [tensor.tolist() for tensor in full]


def test_a_checkpoint_of_ones_own_loop_is_a_state_dict(tmp_path, capsys, monkeypatch):
    trained = run_local(own_loop, 2, [str(tmp_path / "checkpoints")])[0]
    assert run_command(["export", str(tmp_path), "--out", str(tmp_path / "model")]) == 0
    assert "load its state dict with safetensors.torch.load_model" in capsys.readouterr().out
    model = of_ones_own()
    assert load_model(model, tmp_path / "model" / "model.safetensors") == (set(), [])
    loaded = [*model.parameters(), *model.buffers()]
    assert [tensor.tolist() for tensor in loaded] == trained

    def on_a_full_disk(tensors, path):
        path.write_text("a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "save_file", on_a_full_disk)
    assert run_command(["export", str(tmp_path), "--out", str(tmp_path / "half")]) == 1
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_an_export_that_fails_leaves_no_part_of_a_model(tmp_path, existed):
    out = tmp_path / "model"
    if existed:
        out.mkdir()
    with pytest.raises(OSError, match="No space left"), _removed_on_failure(out):
        out.mkdir(exist_ok=True)
        (out / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [*tmp_path.rglob("*")] == [out] * existed
