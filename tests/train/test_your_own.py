"""A scheme, a model, a data set and an optimizer of one's own: from a module beside the recipe, or a package."""

import json
import sys

import pytest
import tomli_w
from safetensors.torch import load_model

from detonation.cli.command import run_command
from detonation.core.schemes.scheme import SCHEMES, Scheme, register

MODULE = '''
"""Parts of a run, as a user writes them."""

from typing import Any, NamedTuple

import torch
from torch import nn

from detonation.core.schemes.gradients import demo
from detonation.data.dataset import Data

NUMBER = 3


def half(topk: int = 2, chunk: int = 32):
    return demo(topk=topk, chunk=chunk)


class Points:
    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, indices):
        labels = indices % 2
        return {"points": labels[:, None] * torch.ones(1, 4) + indices[:, None] / self._count, "labels": labels}


def points(count: int = 64, held_out: int = 16) -> Data:
    return Data("points", "points", "images", Points(count), Points(held_out), model={"classes": 2})


class Output(NamedTuple):
    loss: Any
    logits: Any = None


class Line(nn.Module):
    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, width), nn.Linear(width, classes)

    def forward(self, points, labels):
        logits = self.head(torch.relu(self.inner(points)))
        return Output(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


class Bare(Line):
    def forward(self, points, labels):
        return super().forward(points, labels).logits


class Silent(Line):
    def forward(self, points, labels):
        return Output(loss=None)


class Each(Line):
    def forward(self, points, labels):
        return Output(loss=super().forward(points, labels).logits.sum(1))


class Scaled(Line):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.scale = nn.Parameter(torch.tensor(1.0))


def sgd(params, lr, momentum: float = 0.5):
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def nothing(*arguments, **keywords):
    return {}
'''

TABLES = {
    "model": {"name": "own_parts:Line", "width": 6},
    "data": {"task": "own_parts:points"},
    "scheme": {"name": "own_parts:half", "topk": 4},
    "optimizer": {"name": "own_parts:sgd", "lr": 0.1},
    "train": {"steps": 3, "batch_size": 4, "validation_batches": 2},
    "mesh": {"replicas": 2, "shards": 1},
    "tuned": {
        "full": {"optimizer": {"name": "AdamW", "lr": 0.01}},
        "own_parts:half": {"train": {"steps": 2}},
    },
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The recipe in the directory of the module, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_parts.py").write_text(MODULE)
    (tmp_path / "own.toml").write_text(tomli_w.dumps(TABLES))
    yield "own.toml"
    sys.modules.pop("own_parts", None)


@pytest.fixture
def registered():
    """A scheme that this process has registered."""

    @register
    def quarter(topk: int = 1) -> Scheme:
        return SCHEMES["demo"](topk=topk)

    yield quarter
    del SCHEMES["quarter"]


def test_a_run_of_ones_own_parts_and_its_resumption(recipe, tmp_path, capfd):
    assert run_command(["train", recipe, "--out", "run", "--stop-after", "1"]) == 0
    assert run_command(["train", recipe, "--out", "run", "--resume", "--json"]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (summary["scheme"], summary["scheme_arguments"]) == (
        "own_parts:half",
        {"topk": 4, "chunk": 32},
    )
    assert (summary["model"], summary["data"], summary["optimizer"]) == (
        "own_parts:Line",
        "points",
        "own_parts:sgd",
    )
    assert (summary["steps"], summary["num_parameters"]) == (
        2,
        4 * 6 + 6 + 6 * 2 + 2,
    )  # as [tuned] has it
    assert summary["replicas_equal"] and summary["val_accuracy"] <= 1
    assert run_command(["export", "run", "--out", "model", "--trust-code"]) == 0
    said = capfd.readouterr().out
    assert "no model of transformers: load its state dict with safetensors.torch.load_model" in said
    made = sys.modules["own_parts"].Line(2, 6)
    assert load_model(made, "model/model.safetensors") == (set(), [])
    assert (
        run_command(["train", recipe, "--out", "next", "--init-from", "model", "--steps", "1"]) == 0
    )
    assert "weights of model\n" in capfd.readouterr().out
    assert sys.path[-1] == "" or "" in sys.path[1:]  # the current directory hides no package


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Bare", "a Tensor whose .loss is None"),
        ("Silent", "a Output whose .loss is None"),
        ("Each", "a Output whose .loss has the shape [4]"),
    ],
)
def test_a_model_that_returns_no_loss_is_one_line(recipe, capfd, model, found):
    assert run_command(["simulate", recipe, "--set", f"model.name=own_parts:{model}"]) == 2
    line = f"model own_parts:{model} returns {found}: return an object with .loss (a one-element tensor) and .logits\n"
    assert capfd.readouterr().err.endswith(line)


def test_a_model_with_a_scalar_is_one_line(recipe, capfd):
    assert run_command(["train", recipe, "--set", "model.name=own_parts:Scaled"]) == 2
    line = "error: the shape of scale is (), but must be (1,) or larger: FSDP2 shards no scalar\n"
    assert capfd.readouterr().err == line


def test_schemes_of_ones_own_are_compared_simulated_and_planned(recipe, registered, capfd):
    schemes = ["--schemes", "full,quarter,own_parts:half", "--out", "all", "--json"]
    assert run_command(["compare", recipe, *schemes, "--set", "train.steps=1"]) == 0
    runs = json.loads(capfd.readouterr().out.splitlines()[-1])["runs"]
    assert [run["scheme"] for run in runs] == ["full", "quarter", "own_parts:half"]
    assert runs[0]["bytes_sent_per_step"] > runs[1]["bytes_sent_per_step"]
    assert run_command(["simulate", recipe, "--out", "sim", "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["scheme"] == "own_parts:half"
    assert run_command(["plan", recipe, "--link", "1mbit", "--step-time", "0.1", "--json"]) == 0
    found = {option["scheme"]: option for option in json.loads(capfd.readouterr().out)["options"]}
    assert (
        found["quarter"]["loss_source"] == found["own_parts:half"]["loss_source"] == "not measured"
    )
    assert found["own_parts:half"]["arguments"]["topk"] == 4 and found["quarter"]["seconds"] > 0.1


def test_train_lists_registered_schemes(registered, capsys):
    assert run_command(["train"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "schemes: decoupled_adamw, demo, diloco" in shown
    assert ", quarter, random, " in shown


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            "scheme.name=no_parts:half",
            "no_parts:half: no module named no_parts; it must be installed or be in this directory",
        ),
        ("scheme.name=own_parts:hlf", "own_parts:hlf: module own_parts has no function 'hlf'"),
        ("scheme.name=own_parts:NUMBER", "own_parts:NUMBER is 3, must be a function"),
        (
            "scheme.name=own_parts:",
            "'own_parts:' does not name a function, must be package.module:function",
        ),
        (
            "scheme.tpk=3",
            "unknown argument of scheme own_parts:half 'tpk', did you mean 'topk'? Valid: chunk, topk",
        ),
        ("scheme.topk=x", "scheme.topk is 'x', but must be a whole number"),
        ("model.name=no_parts:Line", "no_parts:Line: no module named no_parts"),
        ("model.name=own_parts:Lin", "own_parts:Lin: module own_parts has no function 'Lin'"),
        ("model.name=own_parts:NUMBER", "own_parts:NUMBER is 3, must be a function"),
        (
            "model.name=own_parts:nothing",
            "model own_parts:nothing returns a dict, but must return a torch.nn.Module",
        ),
        (
            "model.name=Lin",
            "unknown model 'Lin'. Valid: olmo2, olmoe, t5, vit; or package.module:function",
        ),
        (
            "model.name=torch.nn:Identity",
            "model torch.nn:Identity cannot take the batches of the data points: missing a required argument: 'input'",
        ),
        ("model.width=wide", "model.width is 'wide', but must be a whole number"),
        ("data.task=no_parts:points", "no_parts:points: no module named no_parts"),
        (
            "data.task=own_parts:pionts",
            "own_parts:pionts: module own_parts has no function 'pionts'",
        ),
        ("data.task=own_parts:NUMBER", "own_parts:NUMBER is 3, must be a function"),
        (
            "data.task=own_parts:nothing",
            "data own_parts:nothing returns a dict, but must return a detonation.data.Data",
        ),
        (
            "data.held_out=0",
            "data own_parts:points has no held-out examples: give at least one for validation",
        ),
        ("optimizer.name=no_parts:sgd optimizer.lr=1", "no_parts:sgd: no module named no_parts"),
        (
            "optimizer.name=own_parts:sdg optimizer.lr=1",
            "own_parts:sdg: module own_parts has no function 'sdg'",
        ),
        (
            "optimizer.name=own_parts:NUMBER optimizer.lr=1",
            "own_parts:NUMBER is 3, must be a function",
        ),
        (
            "optimizer.name=own_parts:nothing optimizer.lr=1",
            "optimizer own_parts:nothing returns a dict, but must return a ",
        ),
        (
            "optimizer.momentun=0",
            "unknown argument of optimizer own_parts:sgd 'momentun', did you mean 'momentum'?",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(recipe, tmp_path, capsys, sets, line):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run_command(["train", recipe, "--set", *sets.split()]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {line}")
        and len(printed.err.splitlines()) == 1
    )
    assert [
        name for name in sorted(path.name for path in tmp_path.iterdir()) if name != "__pycache__"
    ] == before


@pytest.mark.long  # no branch of its own
def test_a_scheme_in_tuned_must_exist_unless_it_spells_a_module(recipe, tmp_path, capsys):
    for name, code in {"halff": 2, "no_parts:half": 0}.items():
        (tmp_path / "own.toml").write_text(tomli_w.dumps({**TABLES, "tuned": {name: {}}}))
        assert (
            run_command(
                ["train", recipe, "--out", name.replace(":", "."), "--set", "train.steps=1"]
            )
            == code
        )
    assert "error: unknown scheme in [tuned] 'halff'" in capsys.readouterr().err
