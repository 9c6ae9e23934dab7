"""`detonation init`: the recipe for what is found, which trains as it was written."""

import json
from pathlib import Path

import pytest
from PIL import Image

import own
from detonation.cli.command import run_command
from detonation.train.recipe.resolve import read_recipe


@pytest.fixture
def at(tmp_path, monkeypatch):
    """The current directory; tokens are kept in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("detonation.data.tokens.cache_dir", lambda: tmp_path / ".cache")
    return tmp_path


def begun(capfd, *arguments):
    """The recipe that init has written, and what it said."""
    assert run_command(["init", *arguments]) == 0
    out = arguments[arguments.index("--out") + 1] if "--out" in arguments else "recipe.toml"
    return read_recipe(Path(out)), capfd.readouterr().out


def trains(recipe, capfd):
    capfd.readouterr()
    assert run_command(["train", recipe, "--steps", "1", "--set", "train.validation_batches=1", "--json"]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def photos(folder):
    for number in range(40):
        inner = folder / f"class{number % 2}"
        inner.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9 + number % 5, 11), (number, 0, 0)).save(inner / f"{number}.jpg")


def test_nothing_found_is_a_small_model_on_the_shipped_text(at, capfd):
    recipe, said = begun(capfd)
    assert recipe["model"]["name"] == "olmo2" and recipe["data"] == {
        "task": "text",
        "source": "sotu-sample",
        "context": 256,
    }
    assert "data: sotu-sample, because nothing was found here (text, as bytes)\n" in said
    assert "no GPU: ranks train on the CPU\n" in said and said.endswith("next: detonation train recipe.toml\n")
    text = (at / "recipe.toml").read_text()
    assert run_command(["init"]) == 2
    assert (
        capfd.readouterr().err
        == "error: recipe.toml exists, and is left as it is: remove it, or choose another --out\n"
    )
    assert (at / "recipe.toml").read_text() == text and text.count("#") > 8


def test_a_model_a_tokenizer_and_rows_are_found_and_train(at, capfd):
    own.model(at / "stuff" / "llama", "text")
    own.tokenizer(at / "stuff" / "llama")
    own.json_lines(at / "stuff" / "notes.jsonl", count=400, field="body")
    recipe, said = begun(capfd, "stuff", "--out", "mine.toml")
    assert recipe["model"] == {"name": "hf:stuff/llama", "pretrained": True}
    data = {"source": "stuff/notes.jsonl", "column": "body", "tokenizer": "stuff/llama"}
    assert recipe["data"] == {"task": "text", **data, "context": 256} and "tokenizer: stuff/llama\n" in said
    summary = trains("mine.toml", capfd)
    assert summary["replicas_equal"] and summary["model"] == "hf:stuff/llama" and summary["optimizer"] == "SignSGD"


@pytest.mark.parametrize("own_model", [True, False])
def test_folders_of_images_are_found(at, capfd, own_model):
    photos(at / "photos")
    (at / "readme.txt").write_text("ten words about these photos\n" * 20)
    if own_model:
        own.model(at / "vit", "images", weights=False)
    recipe, _ = begun(capfd)
    assert recipe["data"] == {"task": "images", "source": "photos"}
    assert recipe["model"]["name"] == ("hf:vit" if own_model else "vit")


def test_few_words_get_a_short_context(at, capfd):
    (at / "texts").mkdir()
    for number in range(3):
        (at / "texts" / f"{number}.txt").write_text("a few words\n" * 40)
    recipe, _ = begun(capfd, "texts", "--out", "short.toml")
    assert recipe["data"]["context"] == 64 and recipe["train"]["batch_size"] == 4
    (at / "tiny").mkdir()
    (at / "tiny" / "a.txt").write_text("a")
    assert run_command(["init", "tiny", "--out", "no.toml"]) == 2
    assert "no recipe can start with what is in tiny: tiny/a.txt has 1 bytes" in capfd.readouterr().err
    assert not (at / "no.toml").exists()
    assert run_command(["init", "nowhere", "--out", "no.toml"]) == 2
    assert "there is no directory nowhere" in capfd.readouterr().err
