"""Recipes: what a file, a tuned variant and --set come to, and what they must not contain."""

import tomllib
from datetime import date
from pathlib import Path

import pytest
import tomli_w

from detonation.core.schemes.scheme import SCHEMES
from detonation.train.loop.world import require_same_command
from detonation.train.recipe.resolve import Request, parse_sets, read_recipe, resolve
from detonation.train.recipe.tables import from_table, to_table

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TIERS = Path(__file__).parents[2] / "recipes" / "three-tiers.toml"
BASE = {
    "model": {"name": "olmo2", "layers": 1},
    "data": {"task": "text", "source": "sotu-sample"},
    "scheme": {"name": "demo", "topk": 2},
    "optimizer": {"name": "SignSGD", "lr": 0.001, "momentum": 0.5},
    "train": {"steps": 5, "batch_size": 2},
    "tuned": {
        "diloco": {
            "scheme": {"every": 7},
            "optimizer": {"name": "AdamW", "lr": 0.01},
            "train": {"steps": 9},
        },
        "random": {"optimizer": {"lr": 0.1}},
    },
}


def said(*sets):
    return resolve(BASE, parse_sets(sets))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize(
    "path", [path for path in RECIPES if path != TIERS], ids=lambda path: path.stem
)
def test_every_recipe_resolves_for_every_scheme_and_round_trips(path, scheme):
    config = resolve(read_recipe(path), {"scheme": {"name": scheme}})
    assert config.scheme.name == scheme
    assert from_table(tomllib.loads(tomli_w.dumps(to_table(config)))) == config


def test_there_are_ten_recipes():
    assert [path.stem for path in RECIPES] == [
        "finetune-minilm",
        "moe-lm",
        "olmo2-1b",
        "quick-lm",
        "t5-base-opus",
        "t5-small-opus",
        "t5-translation",
        "three-tiers",
        "vit-b-cifar100",
        "vit-fashion",
    ]


def test_toml_writes_what_toml_reads():
    table = {
        "seed": 1,
        "a": {
            "text": 'quote " \\ \n\tä \x7f',
            "yes": True,
            "list": [1, 2.5, "x"],
            "odd key": 1e-300,
        },
    }
    assert tomllib.loads(tomli_w.dumps(table)) == table


def test_the_base_scheme_keeps_its_arguments():
    assert said().scheme.arguments == {"topk": 2}
    assert said("scheme.name=demo", "scheme.chunk=8").scheme.arguments == {"topk": 2, "chunk": 8}


def test_another_scheme_drops_them_and_brings_what_it_is_tuned_to():
    config = said("scheme.name=diloco")
    assert config.scheme.arguments == {"every": 7}
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.arguments) == (
        "AdamW",
        0.01,
        {},
    )
    assert config.train.steps == 9


def test_a_tuned_optimizer_of_the_same_name_is_laid_over_the_base_one():
    optimizer = said("scheme.name=random").optimizer
    assert (optimizer.name, optimizer.lr, optimizer.arguments) == (
        "SignSGD",
        0.1,
        {"momentum": 0.5},
    )


def test_the_command_line_has_the_last_word():
    config = said(
        "scheme.name=diloco",
        "scheme.every=3",
        "train.steps=1",
        "optimizer.lr=1",
        "seed=4",
        "mesh.shards=1",
    )
    assert (config.scheme.arguments, config.train.steps, config.seed) == ({"every": 3}, 1, 4)
    assert (config.optimizer.name, config.optimizer.lr, config.mesh.shards) == ("AdamW", 1.0, 1)


def test_another_optimizer_keeps_nothing_of_the_first():
    with pytest.raises(ValueError, match=r"optimizer\.lr is missing"):
        said("optimizer.name=SGD")
    assert said("optimizer.name=SGD", "optimizer.lr=0.1").optimizer.arguments == {}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["train.stps=3"],
            r"unknown key of \[train\] 'stps', did you mean 'steps'\? Valid: accumulate",
        ),
        (["trian.steps=3"], r"unknown table of the recipe 'trian', did you mean 'train'\?"),
        (["train.steps=0"], r"train\.steps is 0, but must be at least 1, or train.epochs above 0"),
        (
            ["train.steps=0", "train.epochs=1e308"],
            r"train\.epochs is 1e\+308, but must be below 1e9",
        ),
        (["train.steps=many"], r"train\.steps is 'many', but must be a whole number"),
        (["train.steps=true"], r"train\.steps is True, but must be a whole number"),
        (["train.autocast=fp8"], r"train\.autocast is 'fp8', but must be '' or 'bf16'"),
        (["train.clip=-1"], r"train\.clip is -1\.0, but must be at least 0"),
        (
            ["train.non_finite=ignore"],
            r"train\.non_finite is 'ignore', but must be 'stop' or 'skip'",
        ),
        (
            ["train.on_desync=average"],
            r"train\.on_desync is 'average', but must be 'stop' or 'repair'",
        ),
        (
            ["train.verify_every=-1"],
            r"train\.verify_every is -1, but must be at least 0 \(0 = never\)",
        ),
        (
            ["train.on_desync=repair", "train.verify_every=0"],
            r"train\.verify_every is 0, but must be at least 1 to rep",
        ),
        (["optimizer.lr=0"], r"optimizer\.lr is 0\.0, but must be a finite number above 0"),
        (["optimizer.lr=nan"], r"optimizer\.lr is nan"),
        (["schedule.name=cosin"], r"unknown schedule 'cosin', did you mean 'cosine'\?"),
        (["schedule.floor=2"], r"schedule\.floor is 2\.0, but must be within \[0, 1\]"),
        (["mesh.replicas=0"], r"mesh\.replicas is 0, but must be at least 1"),
        (["seed=-1"], r"seed is -1, but must be within"),
        (["seed"], r"--set takes table\.key=value or seed=value, got 'seed'"),
        (["a.b.c=1"], r"--set takes table\.key=value"),
        (["steps=1"], r"--set takes table\.key=value or seed=value, got 'steps=1'"),
        (
            ["model.mode=2024-01-01"],
            r"model\.mode has 2024-01-01, which TOML reads as a date or a time: quote the value",
        ),
        (
            ["data.since=[08:30:00]"],
            r"data\.since has 08:30:00, which TOML reads as a date or a time: quote the value",
        ),
        (
            ["data.source=caf\udce9.txt"],
            r"data\.source is 'caf\\udce9\.txt', which is not valid UTF-8: rename it",
        ),
    ],
)
def test_bad_settings_are_named(sets, message):
    with pytest.raises(ValueError, match=message):
        said(*sets)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({**BASE, "modell": {}}, "unknown recipe key 'modell', did you mean 'model'"),
        ({**BASE, "tuned": {"demo": {"model": {}}}}, r"unknown table of \[tuned\.demo\] 'model'"),
        ({**BASE, "train": 3}, "train is 3, but must be a table"),
        (
            {**BASE, "tuned": {}, "scheme": {"name": "demo", "at": [{"day": date(2024, 1, 1)}]}},
            r"scheme\.at has 2024-01-01, which TOML reads as a date or a time: quote the value",
        ),
        ({key: value for key, value in BASE.items() if key != "model"}, r"model\.name is missing"),
    ],
)
def test_bad_recipes_are_named(recipe, message):
    with pytest.raises(ValueError, match=message):
        resolve(recipe, {})


def test_a_recipe_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(ValueError, match="cannot read the recipe"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "marked.toml").write_text("seed = 3", encoding="utf-8-sig")  # as Windows does
    assert read_recipe(tmp_path / "marked.toml") == {"seed": 3}
    (tmp_path / "bad.toml").write_text("a = = b")
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(tmp_path / "bad.toml")


def test_a_folder_with_the_name_of_a_recipe_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quick-lm").mkdir()
    assert read_recipe(Path("quick-lm"))["model"]["name"] == "olmo2"


def test_a_variant_tuned_for_no_scheme_is_not_ignored(tmp_path):
    (tmp_path / "recipe.toml").write_text("[tuned.dilocco.train]\nsteps = 3\n")
    with pytest.raises(
        ValueError, match=r"unknown scheme in \[tuned\] 'dilocco', did you mean 'diloco'\?"
    ):
        Request(tmp_path / "recipe.toml").layers(None).config()


class Heard:
    """Answers as rank 0 does, whose settings are those of `config`."""

    def __init__(self, config):
        self.told = ""
        require_same_command(self, config, {})

    def gather(self, text):
        self.told = self.told or text
        return [self.told, text]


def test_other_examples_are_explained_by_a_setting_of_the_data(tiny, tmp_path):
    rank_0 = Heard(tiny())
    with pytest.raises(ValueError, match=r"^data.context is 16 on rank 1, 32 on rank 0: give all"):
        require_same_command(rank_0, tiny("data.context=16"), {})
    (tmp_path / "other.txt").write_text("some other text. " * 200)
    elsewhere = tiny(f"data.source={tmp_path / 'other.txt'}")
    with pytest.raises(ValueError, match=r": copy the same data to all machines, and give"):
        require_same_command(rank_0, elsewhere, {})
