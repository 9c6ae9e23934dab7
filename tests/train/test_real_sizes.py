"""The recipes of real sizes, by their own files, with a model, a tokenizer and data that fit into a test."""

import json
import math
from pathlib import Path

import datasets
import pytest
import transformers
from PIL import Image

import own
from detonation.train.verbs.simulate import Simulation, simulate

SMALL = ("train.batch_size=2", "train.accumulate=1", "train.validation_batches=1", "mesh.shards=1")


def t5(folder):
    transformers.T5Config(
        vocab_size=400,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    ).save_pretrained(folder / "model")
    pairs = [{"translation": {"en": f"the cat {i}", "fr": f"le chat {i}"}} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return f"data.source={folder / 'pairs.jsonl'}", "train.epochs=0.1", "train.bleu_sentences=3"


def vit(folder):
    own.model(folder / "model", "images", weights=False)
    pictures = [Image.new("RGB", (5, 5), (5 * i, 90, 50)) for i in range(40)]
    columns = {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["apple", "bowl"])}
    rows = {"img": pictures, "fine_label": [i % 2 for i in range(40)]}
    part = datasets.Dataset.from_dict(rows, features=datasets.Features(columns))
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(folder / "images")
    return f"data.source={folder / 'images'}", "data.size=8", "train.epochs=0.1"


def olmo(folder):
    transformers.Olmo2Config(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    ).save_pretrained(folder / "model")
    own.json_lines(folder / "texts.jsonl", count=800)
    return (
        f"data.source={folder / 'texts.jsonl'}",
        "data.context=16",
        "train.steps=3",
        "train.compile=eager",
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("name", "made"),
    [("t5-small-opus", t5), ("t5-base-opus", t5), ("vit-b-cifar100", vit), ("olmo2-1b", olmo)],
)
def test_a_recipe_of_real_size_trains_on_its_own_loader(name, made, tmp_path):
    sets = (*SMALL, f"model.name=hf:{tmp_path / 'model'}", *made(tmp_path))
    if made is not vit:
        sets += (f"data.tokenizer={own.tokenizer(tmp_path / 'tokenizer')}",)
    if made is not olmo:
        sets += ("model.pretrained=false",)
    summary = simulate(Simulation(Path(name), sets, replicas=2, out=tmp_path / "run"))
    assert summary["steps"] == (
        3 if made is olmo else math.ceil(0.1 * (54 if made is t5 else 40) / 4)
    )
    assert summary["replicas_equal"] and 0 < summary["val_loss"] < 10
    assert ("val_bleu" in summary) == (made is t5) and ("val_accuracy" in summary) == (made is vit)
