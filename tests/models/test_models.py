"""Every model: initial loss near chance, gradients for all parameters, and checks of sizes."""

import math
import sys
import types

import pytest
import torch

from detonation import models
from detonation.data import batch, load_dataset

CASES = [
    ("olmo2", {}, 590_976, math.log(256)),
    ("olmo2", {"dropout": 0.1}, 590_976, math.log(256)),
    ("olmoe", {}, 1_772_672, math.log(256)),
    ("vit", {}, 205_066, math.log(10)),
    (
        "vit",
        {"image_size": 32, "patch_size": 4, "channels": 3, "classes": 100, "dropout": 0.1},
        213_924,
        math.log(100),
    ),
    ("t5", {}, 968_448, math.log(384)),
    ("t5", {"dropout": 0.1}, 968_448, math.log(384)),
]


def inputs(name, arguments, rows=4):
    """A random batch for the model."""
    torch.manual_seed(0)
    if name == "vit":
        size, channels = arguments.get("image_size", 28), arguments.get("channels", 1)
        labels = torch.randint(arguments.get("classes", 10), (rows,))
        return {"pixel_values": torch.randn(rows, channels, size, size), "labels": labels}
    ids = torch.randint(3, 256, (rows, 24))
    if name in ("olmo2", "olmoe"):
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(0)}


def built(name, arguments):
    torch.manual_seed(0)
    return models.build_model(name, arguments)


@pytest.mark.parametrize(("name", "arguments", "count", "chance"), CASES)
def test_forward_and_backward(name, arguments, count, chance):
    model = built(name, arguments)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    output = model(**inputs(name, arguments))
    assert output.loss.dtype == torch.float32 and output.loss.shape == ()
    assert chance - 0.3 < output.loss.item() < chance + (2.5 if name == "t5" else 0.3)
    output.loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name
    assert not {"past_key_values", "cache"} & {*output}


@pytest.mark.parametrize("name", ["olmo2", "vit", "t5"])
def test_the_loss_is_the_mean_in_nats(name):
    batch = inputs(name, {})
    model = built(name, {})
    output = model(**batch)
    logits, labels = output.logits, batch["labels"]
    if name == "olmo2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    assert output.loss.item() == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["olmo2", "vit", "t5"])
def test_weights_are_a_function_of_the_seed(name):
    first, same = built(name, {}), built(name, {})
    other = models.build_model(name, {})
    for a, b in zip(first.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(
        not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["olmo2", "vit", "t5"])
def test_the_loss_is_fp32_in_a_bf16_model(name):
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs(name, {}).items()}
    output = built(name, {}).bfloat16()(**batch)
    assert output.loss.dtype == torch.float32


def test_padding_and_masked_positions_change_nothing():
    model = built("t5", {})
    batch = inputs("t5", {})
    plain = model(**batch).loss
    wider = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 8)),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 8)),
        "labels": torch.nn.functional.pad(batch["labels"], (0, 8), value=-100),
    }
    assert model(**wider).loss.item() == pytest.approx(plain.item(), rel=1e-5)


def test_a_causal_model_does_not_see_ahead():
    model = built("olmo2", {}).eval()
    ids = inputs("olmo2", {})["input_ids"]
    changed = ids.clone()
    changed[:, 12:] = 7
    assert torch.allclose(
        model(input_ids=ids).logits[:, :12], model(input_ids=changed).logits[:, :12], atol=1e-5
    )


def test_a_model_of_ones_own_trains_in_training_mode_however_it_comes(monkeypatch):
    def pretrained():
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).eval()

    monkeypatch.setitem(sys.modules, "own_pretrained", types.SimpleNamespace(build=pretrained))
    assert all(
        module.training for module in models.build_model("own_pretrained:build", {}).modules()
    )


def test_the_embeddings_of_a_t5_are_its_output_matrix():
    tied, untied = built("t5", {}), built("olmo2", {})
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


@pytest.mark.long_cases("olmo2-text", "t5-translation")
@pytest.mark.parametrize(
    ("name", "task"), [("olmo2", "text"), ("vit", "images"), ("t5", "translation")]
)
def test_models_learn_from_their_data(name, task):
    data = load_dataset(task, {})
    model = built(name, dict(data.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(25):
        loss = model(**batch(data.train, seed=0, step=step, part=0, parts=1, size=8)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("olmo2", {"heads": 3}, "heads 3 does not divide hidden_size 128"),
        ("t5", {"heads": 5}, "heads 5 does not divide hidden_size 128"),
        ("vit", {"heads": 7}, "heads 7 does not divide hidden_size 64"),
        ("olmo2", {"hidden_size": 12, "heads": 4}, "are 3 wide: rotary positions need an even"),
        ("vit", {"patch_size": 5}, "patch_size 5 does not divide image_size 28"),
        ("vit", {"layers": 0}, "layers must be at least 1, not 0"),
        ("t5", {"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ("gpt2", {}, "unknown model 'gpt2'"),
        ("vit", {"hidden": 8}, "did you mean 'hidden_size'"),
    ],
)
def test_wrong_sizes_and_names_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build_model(name, arguments)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[models\]'"):
        models.build_model("vit", {})
