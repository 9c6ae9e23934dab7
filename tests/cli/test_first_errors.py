"""The mistakes of newcomers: each message has the value that was given, the reason and the remedy, in one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import detonation as dt
from commands import write_recipe
from detonation.cli.command import run_command
from detonation.cluster.network.loopback import LoopbackCommunicator
from worlds import caught

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
TOKEN = {"DETONATION_TOKEN": "0123456789abcdef"}


class Mistake(NamedTuple):
    """first: words by which the page finds the message. has: the value, the reason and the remedy in it."""

    make: Callable[[], str]
    first: str
    has: tuple[str, str, str]


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path, capsys):
    """A directory with the tiny recipe, and files that somebody prepared wrongly."""
    global printed
    printed = capsys
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_recipe(tmp_path / "tiny.toml")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)


FILES = {
    "empty.txt": b"",
    "short.txt": b"hello " * 20,
    "small.txt": b"hello " * 2000,
    "latin.jsonl": b'{"text": "\xe9"}\n',
    "broken.jsonl": b'{"text": "a"}\n{"text: 3\n',
    "body.jsonl": b'{"body": "a"}\n' * 100,
    "paper.pdf": b"x" * 9000,
    "open.toml": b"[train\nsteps=3",
    "bare.toml": b"[train]\nsteps=3\n",
}


def run(*arguments: object) -> Callable[[], str]:
    """The error of a command."""

    def make() -> str:
        try:
            code = run_command([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        assert code == 2
        return str(printed.readouterr().err)

    return make


def train(*arguments: object) -> Callable[[], str]:
    return run("train", "tiny.toml", *arguments)


def sets(*assignments: str) -> Callable[[], str]:
    return train("--set", *assignments)


def library(function: Callable[..., Any], *arguments: Any) -> Callable[[], str]:
    """The text of what a function raises."""

    def make() -> str:
        kind, text = caught(function, *arguments)
        assert kind != "nothing"
        return text

    return make


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def replicated(model=None, optimizer=None, axis=None, scheme=None, **options):
    model = nn.Linear(8, 8) if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    axis = LoopbackCommunicator(2) if axis is None else axis
    return dt.replicate(optimizer, model, axis, scheme or dt.full(), **{"kernels": False, **options})


def step(model, base=None, loss=lambda model: model(torch.ones(1, 8)).sum(), **options):
    optimizer = replicated(model, base, **options)
    loss(model).backward()
    optimizer.step()


def of_kind(dtype):
    replicated(nn.Linear(8, 8, dtype=dtype)).step()


def frozen():
    model = nn.Linear(8, 8).requires_grad_(False)
    replicated(model).step()


def sparse():
    step(nn.Embedding(8, 8, sparse=True), loss=lambda model: model(torch.tensor([1])).sum())


def not_a_number():
    step(nn.Linear(8, 8), loss=lambda model: model(torch.ones(1, 8)).sum() * float("nan"))


def inner_step():
    model = nn.Linear(8, 8)
    base = sgd(model)
    optimizer = replicated(model, base)
    assert optimizer is not base
    base.step()
    base.step()


def not_fetched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(Path("empty").absolute()))
        return train("--data", "shakespeare")()


def mesh_of(*arguments, **options):
    return library(lambda: dt.init_mesh(*arguments, **options))


MISTAKES = {
    "a flag with a letter missing": Mistake(
        train("--replcas", 3), "Perhaps you meant", ("--replcas", "Unrecognized options", "--replicas INT")
    ),
    "a verb that is none": Mistake(run("tran", "tiny.toml"), "Available subcommands", ("tran", "Unrec", "train,")),
    "a key misspelt": Mistake(sets("train.stps=3"), "Valid: ", ("'stps'", "did you mean", "'steps'")),
    "a key without its table": Mistake(sets("steps=3"), "--set takes", ("'steps=3'", "takes", "table.key=value")),
    "a scheme misspelt": Mistake(train("--scheme", "dem"), "Valid: ", ("'dem'", "did you mean", "'demo'")),
    "an argument of the scheme misspelt": Mistake(sets("scheme.tpk=3"), "Valid: ", ("'tpk'", "did you mean", "'topk'")),
    "another scheme's argument": Mistake(sets("scheme.every=3"), "Valid: ", ("'every'", "unknown", "Valid: aggregate")),
    "a model that is not there": Mistake(sets("model.name=gpt2"), "Valid: ", ("'gpt2'", "unknown", "hf:NAME")),
    "an optimizer misspelt": Mistake(sets("optimizer.name=Adm"), "Valid: ", ("'Adm'", "mean", "'Adam'")),
    "a text for a number": Mistake(
        sets("train.steps='many'"), "but must be", ("train.steps", "'many'", "whole number")
    ),
    "negative steps": Mistake(train("--steps", -5), "but must be", ("train.steps", "-5", "at least 1")),
    "no batch": Mistake(sets("train.batch_size=0"), "but must be", ("batch_size", "0", "at least 1")),
    "a negative learning rate": Mistake(train("--lr", -1), "but must be", ("optimizer.lr", "-1.0", "above 0")),
    "topk above chunk": Mistake(sets("scheme.topk=33"), "topk is", ("33", "must be from 1", "chunk (32)")),
    "a decay above 1": Mistake(sets("scheme.decay=2"), "decay is", ("2", "must be", "from 0 to 1")),
    "a beta out of range": Mistake(
        sets("optimizer.betas=[0.9,2.0]"), "does not accept", ("'betas': (0.9, 2.0)", "Invalid beta", "index 1: 2.0")
    ),
    "heads that do not divide": Mistake(
        sets("model.heads=3"), "does not divide", ("heads 3", "hidden_size 32", "an equal share")
    ),
    "no such recipe": Mistake(
        run("train", "none.toml"), "cannot read the recipe", ("'none.toml'", "No such file", "quick-lm")
    ),
    "a recipe with an error of syntax": Mistake(
        run("train", "open.toml"), "is not TOML", ("'open.toml'", "line 1, column 7", "correct it there")
    ),
    "a recipe that lacks a table": Mistake(
        run("train", "bare.toml"), "is missing: give", ("scheme.name", "is missing", "--set scheme.name=")
    ),
    "no such text": Mistake(train("--data", "no.txt"), "Valid: ", ("'no.txt'", "unknown", "a path that exists")),
    "an empty text": Mistake(train("--data", "empty.txt"), "needs at least", ("empty.txt", "has 0 bytes", "take less")),
    "a short text": Mistake(train("--data", "short.txt"), "needs at least", ("short.txt", "120 bytes", "take less")),
    "a context longer than the text": Mistake(
        sets("data.source=small.txt", "data.context=5000"), "needs at least", ("5000", "12000 bytes", "take less")
    ),
    "a context of one": Mistake(sets("data.context=1"), "context must be at least", ("1", "to predict", "at least 2")),
    "a batch larger than the data": Mistake(
        sets("data.source=small.txt", "train.batch_size=999"), "examples, but", ("999", "337", "take fewer")
    ),
    "rows that are not UTF-8": Mistake(train("--data", "latin.jsonl"), "is not UTF-8", ("latin.jsonl", "UTF-8", "con")),
    "a row that is not JSON": Mistake(
        train("--data", "broken.jsonl"), "is not JSON", ("broken.jsonl", "line 2", "Invalid control character")
    ),
    "rows with another column": Mistake(
        train("--data", "body.jsonl"), "has no column", ("column text", "there are body", "name one")
    ),
    "a file of another kind": Mistake(
        train("--data", "paper.pdf"), "cannot be read as text", ("paper.pdf", "a source holds", ".txt")
    ),
    "data that were not fetched": Mistake(
        not_fetched, "is not on this machine", ("shakespeare", "not on", "detonation fetch")
    ),
    "no such data set": Mistake(run("fetch", "mnit"), "Valid: ", ("'mnit'", "unknown", "fashion-mnist")),
    "no weights to begin with": Mistake(
        train("--init-from", "none"), "but must be", ("'none'", "must be", "a run or a model")
    ),
    "an interface that is not there": Mistake(
        train("--interface", "wg9"), "but this machine has", ("'wg9'", "this machine has", "lo")
    ),
    "a run directory that is a file": Mistake(
        train("--out", "tiny.toml"), "is a file: choose another", ("'tiny.toml'", "is a file", "another --out")
    ),
    "resume without a directory": Mistake(train("--resume"), "--resume needs --out", ("--resume", "needs", "--out")),
    "resume where nothing is saved": Mistake(
        train("--resume", "--out", "new"), "nothing to resume in", ("new", "no checkpoints", "leave --resume out")
    ),
    "a link without a unit": Mistake(train("--link", 100), "a link is", ("'100'", "must be a rate", "100mbit,5ms")),
    "an address without a port": Mistake(
        train("--publish", "localhost"), "the address is", ("'localhost'", "must be HOST:PORT", "127.0.0.1:7000")
    ),
    "a run to publish without a token": Mistake(
        train("--publish", "127.0.0.1:7"), "need a token", ("DETONATION_TOKEN", "need a token", "openssl rand")
    ),
    "a report of nothing": Mistake(
        run("report", "none"), "does not exist: give", ("none", "does not exist", "the directory of a run")
    ),
    "a check of nothing": Mistake(run("verify", "none"), "there is no directory", ("none", "no directory", "give")),
    "a check where nothing is saved": Mistake(
        run("verify", "."), "holds no checkpoint", (".", "no checkpoint", "give")
    ),
    "a replay of nothing": Mistake(
        run("follow", "none"), "holds no run", ("none", "No such file", "one that trained with --log")
    ),
    "a comparison of one": Mistake(
        run("compare", "tiny.toml"), "compare needs two runs", ("''", "needs two", "--schemes full,demo")
    ),
    "a plan without a network": Mistake(
        run("plan", "tiny.toml"), "plan needs --profile", ("plan", "needs", "--link RATE")
    ),
    "replicate called twice": Mistake(
        library(lambda: replicated(optimizer=replicated())), "is replicated already", ("the opt", "already", "levels=")
    ),
    "frozen parameters only": Mistake(
        library(frozen), "requires a gradient", ("no parameter", "requires a gradient", "at least one must")
    ),
    "weights in fp16": Mistake(
        library(of_kind, torch.float16), "so trained parameters", ("torch.float16", "through fp32", "autocast")
    ),
    "complex weights": Mistake(
        library(of_kind, torch.complex64), "so trained parameters", ("complex64", "through fp32", "fp32, bf16")
    ),
    "sparse gradients": Mistake(library(sparse), "is sparse, which", ("weight", "cannot be repl", "sparse=False")),
    "a gradient that is not finite": Mistake(
        library(not_a_number), "is not finite on replica", ("weight", "not finite", "lower lr, or clip")
    ),
    "a step of the optimizer inside": Mistake(
        library(inner_step), "inside was stepped", ("SGD", "moves this replica alone", "call step() of the optimizer")
    ),
    "LBFGS": Mistake(
        library(lambda: step(m := nn.Linear(8, 8), torch.optim.LBFGS(m.parameters()))),
        "LBFGS evaluates",
        ("LBFGS", "several times", "take another"),
    ),
    "the class of an optimizer": Mistake(
        library(lambda: replicated(optimizer=torch.optim.SGD)),
        "the optimizer is the class",
        ("SGD", "class", "make one"),
    ),
    "a model before its optimizer": Mistake(
        library(lambda: dt.replicate(m := nn.Linear(8, 8), sgd(m), LoopbackCommunicator(2), "full")),
        "takes an optimizer",
        ("Linear and SGD", "takes", "replicate(optimizer, model"),
    ),
    "the optimizer of another model": Mistake(
        library(lambda: step(nn.Linear(8, 8), sgd(nn.Linear(8, 8)))),
        "are not in the model",
        ("2 parameters", "not in the model", "replicate gets the model whose"),
    ),
    "the name of an axis": Mistake(
        library(lambda: replicated(axis="replicate")), "the axis is the name", ("'replicate'", "pass", 'mesh["repl')
    ),
    "a scheme that was not called": Mistake(
        library(lambda: replicated(scheme=dt.demo)), "the scheme is the function", ("demo", "function", "demo()")
    ),
    "a seed that is a text": Mistake(
        library(lambda: replicated(seed="a")), "seed is", ("'a'", "must be a whole number", "the same on all replicas")
    ),
    "a clip below 0": Mistake(library(lambda: replicated(clip=-1)), "clip is", ("-1", "must be above 0", "or None")),
    "an option misspelt": Mistake(library(lambda: replicated(sede=1)), "Valid: ", ("'sede'", "mean", "'seed'")),
    "a GPU on a machine without": Mistake(
        mesh_of(device="cuda"), "sees no GPU", ("'cuda'", "sees no GPU", "'cpu' needs none")
    ),
    "a mesh larger than the world": Mistake(
        mesh_of(3, 2, "cpu"), "ranks, the world has", ("3 replicas x 2 shards", "the world has 1", "omit one")
    ),
}


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gets_the_value_the_reason_and_the_remedy(mistake):
    text = mistake.make()
    assert [words for words in (mistake.first, *mistake.has) if words not in text] == [], text
    assert "Traceback" not in text
    assert text.startswith(" ") or text.rstrip("\n").count("\n") == 0  # tyro's own frames have several lines


def test_the_page_has_the_same_mistakes():
    section = PAGE.read_text().partition("## First mistakes\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    listed = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted({mistake.first for mistake in MISTAKES.values()})
