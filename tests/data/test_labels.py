"""Texts with labels: their ids, their numbers, what is held out, and a classifier that learns them."""

import json

import pytest
import torch

from detonation.data import batch, load_dataset
from detonation.data.labels import passages
from detonation.models import build_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A small encoder and its tokenizer, as a directory of transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture
def source(tmp_path):
    """Forty texts of three labels; every tenth has a word that the others lack."""
    path = tmp_path / "texts.jsonl"
    rows = [
        {
            "text": f"{'j' if i % 10 == 9 else 'a'} {'abc'[i % 3]} {' d' * (i % 5)} {i}",
            "label": "xyz"[i % 3],
        }
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_every_tenth_text_is_held_out_and_labels_are_numbered_in_order(encoder, source):
    data = load_dataset(
        "text", {"source": str(source), "label": "label", "tokenizer": encoder, "context": 6}
    )
    assert (len(data.train), len(data.validation), dict(data.model)) == (
        36,
        4,
        {"vocab": len(WORDS), "classes": 3},
    )
    assert data.validation.names == ["x", "y", "z"]
    found = data.validation[torch.arange(4)]
    assert found["labels"].tolist() == [9 % 3, 19 % 3, 29 % 3, 39 % 3]
    assert (found["input_ids"][:, 1] == WORDS.index("j")).all()


def test_a_batch_is_as_wide_as_its_longest_text_and_no_wider_than_the_context(encoder, source):
    data = load_dataset(
        "text", {"source": str(source), "label": "label", "tokenizer": encoder, "context": 6}
    )
    drawn = batch(data.train, seed=0, step=0, part=0, parts=1, size=36)
    assert drawn["input_ids"].shape == drawn["attention_mask"].shape == (36, 6)
    short = data.train[torch.tensor([0, 4])]  # [CLS] a a 0 [SEP], and one with four more words
    assert short["attention_mask"].sum(1).tolist() == [5, 6]
    assert short["input_ids"][0, 5] == WORDS.index("[PAD]")


def test_texts_that_occur_in_training_are_not_held_out(encoder, tmp_path):
    path = tmp_path / "texts.csv"
    rows = [("the same" if i in (3, 9) else f"text {i}", i % 2) for i in range(20)]
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    data = load_dataset("text", {"source": str(path), "label": "label", "tokenizer": encoder})
    assert (len(data.train), len(data.validation)) == (18, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": ""}, "data.tokenizer is '', but texts with labels need a tokenizer"),
        ({"context": 1}, "context must be at least 2 ids, not 1"),
        ({"source": "texts"}, "source 'texts' does not exist|unknown source"),
        ({"streaming": True}, "data.streaming is true, but texts with labels cannot be streamed"),
        ({"label": "kind"}, "row 1 has no column kind: name one of its columns, text"),
        ({"split": "train"}, "split does not apply to source"),
    ],
)
def test_a_mistake_is_named(encoder, source, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(
            "text", {"source": str(source), "label": "label", "tokenizer": encoder, **arguments}
        )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "text,label\ngood,yes\nshort row\n"),
        ("t.csv", "text,label\ngood,yes\nempty,\n"),
        ("t.jsonl", '{"text": "good", "label": 0}\n{"text": "bad", "label": null}\n'),
    ],
)
def test_a_text_without_a_label_is_named(encoder, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(
        ValueError, match=rf"{name}, row 2 has a text without a value in column label"
    ):
        load_dataset(
            "text", {"source": str(tmp_path / name), "label": "label", "tokenizer": encoder}
        )


def test_texts_and_labels_of_other_types_are_named(encoder, tmp_path):
    source = tmp_path / "t.jsonl"
    arguments = {"source": str(source), "label": "label", "tokenizer": encoder}
    for row, message in [
        ({"text": 5, "label": 1}, r"t\.jsonl, row 1 has 5 in column text, must be text"),
        (
            {"text": "a", "label": [1]},
            r"t\.jsonl, row 1 has \[1\] in column label, must be one label",
        ),
    ]:
        source.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=message):
            load_dataset("text", arguments)


def test_texts_of_which_each_is_repeated_are_told_so(encoder, tmp_path):
    (tmp_path / "t.csv").write_text("text,label\n" + "a b,x\na b,y\n" * 20)
    arguments = {"source": str(tmp_path / "t.csv"), "label": "label", "tokenizer": encoder}
    with pytest.raises(ValueError, match="no text to hold out: each tenth text also occurs"):
        load_dataset("text", arguments)


def test_one_label_is_none(encoder, tmp_path):
    (tmp_path / "t.csv").write_text("text,label\n" + "a b,x\n" * 20)
    with pytest.raises(ValueError, match="it needs at least 10 texts and 2 labels"):
        load_dataset(
            "text", {"source": str(tmp_path / "t.csv"), "label": "label", "tokenizer": encoder}
        )


def test_a_pretrained_encoder_gets_a_new_head_and_keeps_its_weights(encoder, source):
    data = load_dataset(
        "text", {"source": str(source), "label": "label", "tokenizer": encoder, "context": 6}
    )
    model = build_model(f"hf:{encoder}", {"task": "labels", "pretrained": True, **data.model})
    from transformers import BertModel

    kept = BertModel.from_pretrained(encoder).embeddings.word_embeddings.weight
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        loss = model(**batch(data.train, seed=0, step=step, part=0, parts=1, size=18)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_passages_are_whole_sentences_of_sixty_words_or_more():
    sentence = " ".join(["word"] * 24) + " end."
    assert [len(passage.split()) for passage in passages(" ".join([sentence] * 7))] == [75, 75]


def test_addresses_of_the_speakers_are_held_out_whole(encoder):
    data = load_dataset("text", {"source": "sotu-speakers", "tokenizer": encoder, "context": 8})
    assert len(data.train.names) == 18
    assert 0.1 < len(data.validation) / len(data.train) < 0.2
