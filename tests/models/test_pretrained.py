"""Models of transformers by directory: from the configuration or from weights, and what is refused in one line."""

import json
import sys

import pytest
import torch
import transformers

import own
from detonation.models import build_model
from detonation.models.pretrained import _config

KINDS = ["text", "translation", "images"]


def batch(kind):
    torch.manual_seed(1)
    if kind == "images":
        return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 1])}
    ids = torch.randint(3, 300, (3, 12))
    return {"input_ids": ids, "labels": ids} | (
        {"attention_mask": torch.ones_like(ids)} if kind != "text" else {}
    )


def equal(model, other):
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(a, b) for (name, a), (again, b) in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_gives_its_model_with_random_weights_or_its_own(tmp_path, kind):
    saved = own.CLASSES[kind](own.configuration(kind))
    saved.save_pretrained(tmp_path)
    torch.manual_seed(3)
    random = build_model(f"hf:{tmp_path}", {"task": kind})
    torch.manual_seed(3)
    assert equal(random, own.CLASSES[kind](own.configuration(kind))) and not equal(random, saved)
    trained = build_model(f"hf:{tmp_path}", {"task": kind, "pretrained": True})
    assert equal(trained, saved) and trained.training
    output = trained(**batch(kind))
    output.loss.backward()
    assert output.loss.dtype == torch.float32 and not {"past_key_values", "cache"} & {*output}
    assert (
        torch.allclose(output.loss, saved.train()(**batch(kind)).loss, atol=1e-5)
        or kind == "translation"
    )  # dropout


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_fp32_where_the_weights_are_not(tmp_path, kind):
    made = build_model(
        f"hf:{own.model(tmp_path, kind, weights=False)}", {"task": kind, "dtype": "bfloat16"}
    )
    values = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(kind).items()}
    assert (
        next(made.parameters()).dtype == torch.bfloat16
        and made(**values).loss.dtype == torch.float32
    )


def test_any_key_of_the_configuration_is_a_key_of_the_recipe(tmp_path):
    name = f"hf:{own.model(tmp_path, 'text', weights=False)}"
    made = build_model(
        name, {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 256, "pad_token_id": 300}
    )
    assert len(made.model.layers) == 1 and made.config.hidden_size == 32
    assert (
        made.config.pad_token_id is None
    )  # outside of the vocabulary, where no embedding could be
    assert build_model(name, {}).config.hidden_size == 16


def test_an_image_classifier_takes_the_sizes_of_the_data_and_a_new_head(tmp_path):
    name = f"hf:{own.model(tmp_path, 'images')}"
    made = build_model(
        name, {"task": "images", "pretrained": True, "classes": 5, "image_size": 8, "channels": 3}
    )
    again = build_model(name, {"task": "images", "pretrained": True})
    assert made.classifier.out_features == 5
    assert equal(made.vit, again.vit)
    grey = build_model(name, {"task": "images", "channels": 1, "image_size": 12})
    assert grey(torch.zeros(1, 1, 12, 12)).logits.shape == (1, 2)


def test_what_the_class_of_a_model_freezes_stays_frozen_with_its_own_weights(tmp_path):
    name = f"hf:{own.model(tmp_path, 'sines')}"
    for pretrained in (False, True):
        made = build_model(name, {"task": "translation", "pretrained": pretrained})
        frozen = [key for key, each in made.named_parameters() if not each.requires_grad]
        assert frozen == [f"model.{part}coder.embed_positions.weight" for part in ("en", "de")]


def test_where_the_sizes_alone_are_wanted_no_weights_are_read(tmp_path):
    own.model(tmp_path, "text", weights=False)
    with torch.device("meta"):
        made = build_model(f"hf:{tmp_path}", {"pretrained": True})
    assert all(parameter.is_meta for parameter in made.parameters())


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "text",
            {"task": "images"},
            "is a llama, which is no image classifier: the data are images",
        ),
        (
            "images",
            {"task": "text"},
            "is a vit, which is no causal language model: the data are text",
        ),
        ("text", {"hidden": 8}, "unknown key of hf:.* 'hidden', did you mean 'hidden_act'"),
        ("text", {"hidden_size": "wide"}, "does not take .*'hidden_size' expected int, got str"),
        (
            "text",
            {"hidden_size": 32, "pretrained": True},
            r"cannot be built|has no weights that fit",
        ),
        (
            "text",
            {"vocab": 500},
            "knows only 400 tokens, but the data have 500: set model.vocab_size to 500",
        ),
        ("text", {"vocab": 500, "pretrained": True}, "set data.tokenizer to that of the model"),
        (
            "text",
            {"vocab": 256, "pretrained": True},
            "has learned 400 tokens, but the data are bytes: set data.tokenizer",
        ),
        ("text", {"dtype": "fp8"}, "unknown model.dtype 'fp8'"),
        (
            "images",
            {"task": "images", "image_size": 16, "pretrained": True},
            "has no weights that fit vit.embeddings",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, kind, arguments, message):
    own.model(tmp_path, kind)
    with pytest.raises(ValueError, match=message) as raised:
        build_model(f"hf:{tmp_path}", arguments)
    assert "\n" not in str(raised.value)


def test_a_configuration_of_wrong_types_names_the_model(tmp_path):
    own.model(tmp_path, "text", weights=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(
        ValueError,
        match=r"hf:/.* has a config.json that does not fit: .*'hidden_size' expected int",
    ):
        build_model(f"hf:{tmp_path}", {})


def test_code_beside_the_weights_never_runs(tmp_path, monkeypatch):
    own.model(tmp_path, "text")
    config = json.loads((tmp_path / "config.json").read_text())
    strange = {
        **config,
        "model_type": "strange",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(strange))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked, either
    with pytest.raises(ValueError, match=r"no model that the hub gives us: .*custom code"):
        build_model(f"hf:{tmp_path}", {})
    assert not (tmp_path / "ran").exists()


def test_a_name_that_is_nowhere_is_one_line(tmp_path, monkeypatch):
    def unreachable(name, **options):
        raise OSError(
            "We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection."
        )

    with pytest.raises(
        ValueError, match=r"is no directory with a config.json, and no model that the hub gives us"
    ):
        build_model(f"hf:{tmp_path / 'none'}", {})
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(
        ValueError, match=r"We couldn't connect to 'https://huggingface.co'"
    ) as raised:
        build_model("hf:org/model", {})
    assert "\n" not in str(raised.value)
    _config.cache_clear()
    with pytest.raises(ValueError, match="'hf:' names no model"):
        build_model("hf:", {})
    with pytest.raises(
        ValueError,
        match=r"unknown model 'org/m'\. Valid: olmo2, olmoe, t5, vit; .* or hf:org/m for a model of",
    ):
        build_model("org/m", {})
