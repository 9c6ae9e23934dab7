"""Classifiers of people's own data: which id is padding, and what an export says about classes and images."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from PIL import Image

import own
from detonation.cli.command import run_command
from detonation.models import build_model
from detonation.train.loop.checks import load_data
from detonation.train.verbs.export import _name_classes

END = 280


def texts(folder, padded=True, side="right"):
    """The table [data] of texts of two classes and unlike lengths. padded: the tokenizer has an id of padding, 1."""
    words = own.tokenizer(folder / "words", side)
    if not padded:
        table = json.loads((words / "tokenizer_config.json").read_text())
        del table["pad_token"]
        (words / "tokenizer_config.json").write_text(json.dumps(table))
    rows = [
        {"text": " ".join(own.TEXT[: 1 + i % 12]), "label": ("yes", "no")[i % 2]} for i in range(60)
    ]
    rows = [{**row, "text": f"{i} {row['text']}"} for i, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = {"source": str(folder / "rows.jsonl"), "tokenizer": str(words), "context": 24}
    return {"task": "text", "label": "label", **arguments}


def decoder(folder, **settings):
    """A tiny decoder that classifies, in a directory; returns its name."""
    sizes = {"vocab_size": 400, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(bos_token_id=END, eos_token_id=END, **sizes, **settings)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder / "decoder")
    return f"hf:{folder / 'decoder'}"


@pytest.mark.parametrize(
    ("of_tokenizer", "of_model", "one"),
    [(1, None, END), (1, 1, 1), (None, 2, 2), (None, None, END), (1, END, END), (1, -1, END)],
)
def test_a_decoder_reads_a_text_alike_in_a_batch_and_alone(
    tiny, tmp_path, of_tokenizer, of_model, one
):
    model = {"name": decoder(tmp_path, pad_token_id=of_model), "pretrained": True}
    config = tiny(model=model, data=texts(tmp_path, padded=of_tokenizer is not None))
    made = build_model(config.model.name, config.model.arguments).eval()
    assert made.config.pad_token_id == one
    held_out = load_data(config.data).validation
    with torch.no_grad():
        together = made(**held_out[torch.arange(4)]).logits
        alone = [made(**held_out[torch.tensor([i])]).logits for i in range(4)]
    assert together.isfinite().all() and len({*together[:, 0].tolist()}) == 4
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def exported(train, folder, tables, *sets):
    """Trains a step on one replica, and exports the model; returns its directory."""
    more = ("train.steps=1", "schedule.warmup=0", "mesh.replicas=1", "train.batch_size=2")
    train("run", *more, *sets, tables=tables)
    assert run_command(["export", str(folder / "run"), "--out", str(folder / "model")]) == 0
    return folder / "model"


def names_of(folder):
    """The names of the classes in the configuration of an exported model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.label2id == {name: number for number, name in config.id2label.items()}
    return [config.id2label[number] for number in range(config.num_labels)]


def test_an_exported_text_classifier_names_the_classes_of_the_data(train, tmp_path):
    other = {0: "yes", 1: "no"}  # the base numbers the same names otherwise
    model = decoder(tmp_path, id2label=other, label2id={name: i for i, name in other.items()})
    data = texts(tmp_path, side="left")  # training pads at the right
    tables = {"model": {"name": model, "pretrained": True}, "data": data}
    folder = exported(train, tmp_path, tables, "train.log_updates=true")
    assert names_of(folder) == ["no", "yes"]
    words = transformers.AutoTokenizer.from_pretrained(folder)
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts_ = ["the cat", "the cat sat on the mat"]
    with torch.no_grad():
        together = made(**words(texts_, padding=True, return_tensors="pt")).logits
        alone = [made(**words(text, return_tensors="pt")).logits for text in texts_]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    replayed = str(tmp_path / "replayed")
    assert run_command(["follow", str(tmp_path / "run"), "--out", replayed]) == 0
    assert run_command(["export", replayed, "--out", str(tmp_path / "again")]) == 0
    assert names_of(tmp_path / "again") == ["no", "yes"]


def test_a_model_without_such_a_configuration_is_exported_as_it_is():
    other = SimpleNamespace(num_labels=3, id2label={0: "a"})
    for config in (None, {"layers": 2}, other):
        _name_classes(SimpleNamespace(config=config), ["no", "yes"])
    _name_classes(SimpleNamespace(), ["no", "yes"])
    assert other.id2label == {0: "a"}


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_exported_image_classifier_takes_pictures_as_training_did(train, tiny, tmp_path, mode):
    torch.manual_seed(0)
    for number in range(40):
        folder = tmp_path / "photos" / ("owl", "cat")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        own_mode = "RGBA" if mode == "RGB" and number > 20 else mode  # some are transparent
        pixels = torch.randint(20 + number, (12, 12, len(own_mode)), dtype=torch.uint8).numpy()
        Image.fromarray(pixels.squeeze()).save(folder / f"{number:02}.png")
    model = {"name": f"hf:{own.model(tmp_path / 'vit', 'images')}"}
    tables = {"model": model, "data": {"task": "images", "source": str(tmp_path / "photos")}}
    folder = exported(train, tmp_path, tables)
    assert names_of(folder) == ["cat", "owl"]
    made = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    held_out = load_data(tiny(**tables).data).validation
    files = [tmp_path / "photos" / "cat" / "19.png", tmp_path / "photos" / "cat" / "39.png"]
    given = processor([Image.open(file) for file in files], return_tensors="pt")
    batch = held_out[torch.tensor([0, 1])]
    assert torch.allclose(given["pixel_values"], batch["pixel_values"], atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(made(**given).logits, made(**batch).logits, atol=1e-5)
