"""`hf:` sources with a stand-in for the `datasets` package, which needs the network."""

import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import own
from detonation.data import load_dataset


class Rows:
    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)
        self.features = dict.fromkeys(columns)

    def named(self, column, *names):
        """Says which classes the numbers in a column mean."""
        self.features[column] = SimpleNamespace(names=list(names))
        return self

    def __getitem__(self, name):
        return self.columns[name]


@pytest.fixture
def hub(monkeypatch):
    """Answers `load_dataset(path, name, split=...)` from a table, and records the calls."""
    answers, calls = {}, []

    def load_dataset(path, name=None, *, split):
        calls.append((path, name, split))
        return answers[split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return SimpleNamespace(answers=answers, calls=calls)


def test_text(hub):
    hub.answers["train[:1%]"] = Rows(id=[1, 2], body=["some words " * 20, "and more " * 20])
    data = load_dataset(
        "text",
        {"source": "hf:org/corpus:en", "split": "train[:1%]", "column": "body", "context": 16},
    )
    assert hub.calls == [("org/corpus", "en", "train[:1%]")]
    assert data.name == "corpus"
    assert bytes(data.train.ids[0].tolist()) == b"some words some "
    with pytest.raises(ValueError, match="no column text: name one of id, body"):
        load_dataset("text", {"source": "hf:org/corpus:en", "split": "train[:1%]"})


def test_images(hub):
    for split in ("train", "test"):
        pictures = [Image.new("L", (4, 4), value) for value in (0, 100, 200)]
        hub.answers[split] = Rows(img=pictures, label=[0, 2, 1])
    data = load_dataset("images", {"source": "hf:mnist"})
    assert hub.calls == [("mnist", None, "train"), ("mnist", None, "test")]
    assert data.model == {"image_size": 4, "channels": 1, "classes": 3}
    assert data.train[torch.tensor([1])]["labels"].tolist() == [2]
    assert data.exported["labels"] == ["0", "1", "2"]


def test_the_names_of_classes_are_those_that_the_hub_gives_their_numbers(hub, tmp_path):
    names = ["sad", "glad", "mad", "never seen"]
    for split in ("train", "test"):
        pictures = [Image.new("L", (4, 4), value) for value in (0, 100, 200)]
        hub.answers[split] = Rows(img=pictures, label=[0, 2, 1]).named("label", *names)
    assert load_dataset("images", {"source": "hf:faces"}).exported["labels"] == names[:3]
    texts = [f"text {i}" for i in range(60)]
    numbers = [i % 12 for i in range(60)]
    names = [f"mood {i}" for i in reversed(range(12))]
    hub.answers["train"] = Rows(text=texts, label=numbers).named("label", *names)
    words = str(own.tokenizer(tmp_path))
    data = load_dataset("text", {"source": "hf:moods", "label": "label", "tokenizer": words})
    drawn = data.train[torch.tensor([10])]["labels"].item()  # row 11, as row 9 is held out
    assert data.exported["labels"][drawn] == "mood 0"


def test_translation(hub):
    hub.answers["train"] = Rows(
        translation=[{"en": f"one {i}", "fr": f"un {i}"} for i in range(20)]
    )
    data = load_dataset(
        "translation", {"source": "hf:opus_books:en-fr", "source_length": 8, "target_length": 8}
    )
    assert hub.calls == [("opus_books", "en-fr", "train")]
    assert len(data.train) == 18 and len(data.validation) == 2


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[hub\]'"):
        load_dataset("text", {"source": "hf:org/corpus"})
    with pytest.raises(ValueError, match="'hf:' names no data set"):
        load_dataset("text", {"source": "hf:"})
