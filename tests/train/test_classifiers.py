"""Classifiers of people's own data: which id is padding, and what an export says about classes and images."""

import json

import pytest
import torch
import transformers

import own
from detonation.models import build_model
from detonation.train.loop.checks import load_data

END = 280


def texts(folder, padded=True):
    """The table [data] of texts of two classes and unlike lengths. padded: the tokenizer has an id of padding, 1."""
    words = own.tokenizer(folder / "words")
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
    [(1, None, 1), (1, 1, 1), (None, END, END), (None, None, 0)],
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


def test_a_tokenizer_that_pads_with_another_id_than_the_model_is_one_line(tiny, tmp_path):
    tables = {
        "model": {"name": decoder(tmp_path, pad_token_id=END), "pretrained": True},
        "data": texts(tmp_path),
    }
    with pytest.raises(
        ValueError, match=r"hf:.* pads with id 280, but data.tokenizer pads with id 1: set"
    ) as raised:
        tiny(**tables)
    assert "\n" not in str(raised.value)
    assert tiny("model.pad_token_id=1", **tables).model.arguments["pad_token_id"] == 1
