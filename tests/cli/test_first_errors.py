"""The mistakes of newcomers: each message has the value that was given, the reason and the remedy, in one line."""

import errno
import importlib
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import detonation as dt
from commands import Command, free_port, write_recipe
from detonation.cli.command import run_command
from detonation.cli.verbs import explain
from detonation.cluster.launch import run_under_launcher
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.position import LaunchPosition, launch_position
from detonation.cluster.processes import refusal, rendezvous
from detonation.cluster.processes.failure import WorldError
from detonation.train.output import directory
from detonation.train.output.trackers import check_trackers
from detonation.train.recipe.resolve import fill_mesh
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
    return dt.replicate(
        optimizer, model, axis, scheme or dt.full(), **{"kernels": False, **options}
    )


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
        return train("--data", "sotu")()


def mesh_of(*arguments, **options):
    return library(lambda: dt.init_mesh(*arguments, **options))


class Unlike(LoopbackCommunicator):
    """Two replicas of which the second says `theirs` where the first says what the pattern `ours` finds."""

    def __init__(self, ours: str, theirs: str) -> None:
        super().__init__(2)
        self.ours, self.theirs = ours.encode(), theirs.encode()

    def all_gather(self, tensor):
        other = re.sub(self.ours, self.theirs, bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
        return lambda: [
            tensor,
            torch.frombuffer(bytearray(other), dtype=torch.uint8)
            .view(tensor.dtype)
            .view_as(tensor),
        ]


def unlike(ours: str, theirs: str, scheme: Any = None) -> Callable[[], str]:
    """The first step of replicas that were started differently."""
    return library(lambda: step(nn.Linear(8, 8), axis=Unlike(ours, theirs), scheme=scheme))


def resumed(
    model: Callable[[], nn.Module], scheme: Any = None, base: Any = sgd, replicas: int = 1
) -> Callable[[], str]:
    """A checkpoint of a linear layer under `full` that is loaded into something else."""

    def make() -> str:
        saved = nn.Linear(8, 8)
        kept = scheme if scheme == dt.none() else dt.full()
        dt.save_checkpoint(
            "saved", saved, replicated(saved, axis=LoopbackCommunicator(1), scheme=kept)
        )
        into = model()
        optimizer = replicated(into, base(into), LoopbackCommunicator(replicas), scheme)
        return library(dt.load_checkpoint, "saved", into, optimizer)()

    return make


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def meeting(rank: int = 1, **environment: str) -> Callable[[], str]:
    """The rendezvous of one of two ranks, of whom the other never comes."""

    def make() -> str:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(rendezvous, "_RENDEZVOUS_TIMEOUT_S", 0.1)
            return library(rendezvous.rendezvous_store, LaunchPosition(rank, 2, 0, 1))()

    return make


def port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return meeting(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.getsockname()[1]))()


def no_such_host():
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        return meeting(0, MASTER_ADDR="hed.example.org", MASTER_PORT="29500")()


def full_disk():
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "write_whole", no_space)
        return library(directory.write_text, Path("run/config.toml"), "")()


def without(package: str, make: Callable[[], str]) -> Callable[[], str]:
    """What happens where `package` is not installed."""

    def made() -> str:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            return make()

    return made


def integration(name: str) -> Callable[[], str]:
    def make() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(sys.modules, f"detonation.integrations.{name}", raising=False)
            return library(importlib.import_module, f"detonation.integrations.{name}")()

    return make


MISTAKES = {
    "a flag with a letter missing": Mistake(
        train("--replcas", 3),
        "Perhaps you meant",
        ("--replcas", "Unrecognized options", "--replicas INT"),
    ),
    "a verb that is none": Mistake(
        run("tran", "tiny.toml"), "Valid: ", ("'tran'", "did you mean", "'train'")
    ),
    "a key misspelt": Mistake(
        sets("train.stps=3"), "Valid: ", ("'stps'", "did you mean", "'steps'")
    ),
    "a key without its table": Mistake(
        sets("steps=3"), "--set takes", ("'steps=3'", "takes", "table.key=value")
    ),
    "a scheme misspelt": Mistake(
        train("--scheme", "dem"), "Valid: ", ("'dem'", "did you mean", "'demo'")
    ),
    "an argument of the scheme misspelt": Mistake(
        sets("scheme.tpk=3"), "Valid: ", ("'tpk'", "did you mean", "'topk'")
    ),
    "another scheme's argument": Mistake(
        sets("scheme.every=3"), "Valid: ", ("'every'", "unknown", "Valid: aggregate")
    ),
    "a model that is not there": Mistake(
        sets("model.name=gpt2"), "Valid: ", ("'gpt2'", "unknown", "hf:NAME")
    ),
    "an optimizer misspelt": Mistake(
        sets("optimizer.name=Adm"), "Valid: ", ("'Adm'", "mean", "'Adam'")
    ),
    "a text for a number": Mistake(
        sets("train.steps='many'"), "but must be", ("train.steps", "'many'", "whole number")
    ),
    "negative steps": Mistake(
        train("--steps", -5), "but must be", ("train.steps", "-5", "at least 1")
    ),
    "no batch": Mistake(
        sets("train.batch_size=0"), "but must be", ("batch_size", "0", "at least 1")
    ),
    "a negative learning rate": Mistake(
        train("--lr", -1), "but must be", ("optimizer.lr", "-1.0", "above 0")
    ),
    "topk above chunk": Mistake(
        sets("scheme.topk=33"), "topk is", ("33", "must be from 1", "chunk (32)")
    ),
    "a decay above 1": Mistake(sets("scheme.decay=2"), "decay is", ("2", "must be", "from 0 to 1")),
    "a beta out of range": Mistake(
        sets("optimizer.betas=[0.9,2.0]"),
        "does not accept",
        ("'betas': (0.9, 2.0)", "Invalid beta", "index 1: 2.0"),
    ),
    "heads that do not divide": Mistake(
        sets("model.heads=3"), "does not divide", ("heads 3", "hidden_size 32", "an equal share")
    ),
    "no such recipe": Mistake(
        run("train", "none.toml"),
        "cannot read the recipe",
        ("'none.toml'", "No such file", "quick-lm"),
    ),
    "a recipe with an error of syntax": Mistake(
        run("train", "open.toml"),
        "is not TOML",
        ("'open.toml'", "line 1, column 7", "correct the file there"),
    ),
    "a recipe that lacks a table": Mistake(
        run("train", "bare.toml"),
        "is missing: give",
        ("scheme.name", "is missing", "--set scheme.name="),
    ),
    "no such text": Mistake(
        train("--data", "no.txt"), "Valid: ", ("'no.txt'", "unknown", "a path that exists")
    ),
    "an empty text": Mistake(
        train("--data", "empty.txt"),
        "needs at least",
        ("empty.txt", "has 0 bytes", "reduce the context"),
    ),
    "a short text": Mistake(
        train("--data", "short.txt"),
        "needs at least",
        ("short.txt", "120 bytes", "reduce the context"),
    ),
    "a context longer than the text": Mistake(
        sets("data.source=small.txt", "data.context=5000"),
        "needs at least",
        ("5000", "12000 bytes", "reduce the context"),
    ),
    "a context of one": Mistake(
        sets("data.context=1"), "context must be at least", ("1", "to predict", "at least 2")
    ),
    "a batch larger than the data": Mistake(
        sets("data.source=small.txt", "train.batch_size=999"),
        "examples, but",
        ("999", "337", "set a smaller"),
    ),
    "rows that are not UTF-8": Mistake(
        train("--data", "latin.jsonl"), "is not UTF-8", ("latin.jsonl", "UTF-8", "con")
    ),
    "a row that is not JSON": Mistake(
        train("--data", "broken.jsonl"),
        "is not JSON",
        ("broken.jsonl", "line 2", "Invalid control character"),
    ),
    "rows with another column": Mistake(
        train("--data", "body.jsonl"),
        "has no column",
        ("column text", "its columns, body", "name one"),
    ),
    "a file of another kind": Mistake(
        train("--data", "paper.pdf"),
        "cannot be read as text",
        ("paper.pdf", "cannot be read as text", ".txt"),
    ),
    "data that were not fetched": Mistake(
        not_fetched, "is not on this machine", ("sotu", "not on", "detonation fetch")
    ),
    "no such data set": Mistake(
        run("fetch", "mnit"), "Valid: ", ("'mnit'", "unknown", "fashion-mnist")
    ),
    "no weights to begin with": Mistake(
        train("--init-from", "none"), "but must be", ("'none'", "must be", "a run or a model")
    ),
    "an interface that is not there": Mistake(
        train("--interface", "wg9"), "but this machine has", ("'wg9'", "this machine has", "lo")
    ),
    "a run directory that is a file": Mistake(
        train("--out", "tiny.toml"),
        "is a file: choose another",
        ("'tiny.toml'", "is a file", "another --out"),
    ),
    "resume without a directory": Mistake(
        train("--resume"), "--resume needs --out", ("--resume", "needs", "--out")
    ),
    "resume where nothing is saved": Mistake(
        train("--resume", "--out", "new"),
        "nothing to resume in",
        ("new", "no checkpoints", "leave --resume out"),
    ),
    "a link without a unit": Mistake(
        train("--link", 100), "a link is", ("'100'", "must be a rate", "100mbit,5ms")
    ),
    "an address without a port": Mistake(
        train("--publish", "localhost"),
        "the address is",
        ("'localhost'", "must be HOST:PORT", "127.0.0.1:7000"),
    ),
    "a run to publish without a token": Mistake(
        train("--publish", "127.0.0.1:7"),
        "need a token",
        ("DETONATION_TOKEN", "need a token", "openssl rand"),
    ),
    "a report of nothing": Mistake(
        run("report", "none"),
        "holds no finished run",
        ("none", "no finished run", "give the directory of a finished run"),
    ),
    "a check of nothing": Mistake(
        run("verify", "none"), "there is no directory", ("none", "no directory", "give")
    ),
    "a check where nothing is saved": Mistake(
        run("verify", "."), "holds no checkpoint", (".", "no checkpoint", "give")
    ),
    "a replay of nothing": Mistake(
        run("follow", "none"),
        "holds no run",
        ("none", "No such file", "a run that trained with --log, or the HOST:PORT"),
    ),
    "a comparison of one": Mistake(
        run("compare", "tiny.toml"),
        "compare needs two runs",
        ("''", "needs two", "--schemes full,demo"),
    ),
    "a plan without a network": Mistake(
        run("plan", "tiny.toml"), "plan needs --profile", ("plan", "needs", "--link RATE")
    ),
    "replicate called twice": Mistake(
        library(lambda: replicated(optimizer=replicated())),
        "is replicated already",
        ("the opt", "already", "levels="),
    ),
    "frozen parameters only": Mistake(
        library(frozen),
        "requires a gradient",
        ("no parameter", "requires a gradient", "set requires_grad"),
    ),
    "weights in fp16": Mistake(
        library(of_kind, torch.float16),
        "so trained parameters",
        ("torch.float16", "computed in fp32", "autocast"),
    ),
    "complex weights": Mistake(
        library(of_kind, torch.complex64),
        "so trained parameters",
        ("complex64", "computed in fp32", "fp32, bf16"),
    ),
    "sparse gradients": Mistake(
        library(sparse), "is sparse, which", ("weight", "cannot be repl", "sparse=False")
    ),
    "a gradient that is not finite": Mistake(
        library(not_a_number),
        "is not finite on replica",
        ("weight", "not finite", "lower lr, or clip"),
    ),
    "a step of the optimizer inside": Mistake(
        library(inner_step),
        "step() of the inner",
        ("SGD", "moves this replica alone", "call step() of the optimizer"),
    ),
    "LBFGS": Mistake(
        library(lambda: step(m := nn.Linear(8, 8), torch.optim.LBFGS(m.parameters()))),
        "LBFGS evaluates",
        ("LBFGS", "several times", "take another"),
    ),
    "the class of an optimizer": Mistake(
        library(lambda: replicated(optimizer=torch.optim.SGD)),
        "the optimizer is the class",
        ("SGD", "class", "make an optimizer"),
    ),
    "a model before its optimizer": Mistake(
        library(
            lambda: dt.replicate(m := nn.Linear(8, 8), sgd(m), LoopbackCommunicator(2), "full")
        ),
        "takes an optimizer",
        ("Linear and SGD", "takes", "replicate(optimizer, model"),
    ),
    "the optimizer of another model": Mistake(
        library(lambda: step(nn.Linear(8, 8), sgd(nn.Linear(8, 8)))),
        "are not in the model",
        ("2 parameters", "not in the model", "make the optimizer from the parameters of the"),
    ),
    "the name of an axis": Mistake(
        library(lambda: replicated(axis="replicate")),
        "the axis is the name",
        ("'replicate'", "pass", 'mesh["repl'),
    ),
    "a scheme that was not called": Mistake(
        library(lambda: replicated(scheme=dt.demo)),
        "the scheme is the function",
        ("demo", "function", "demo()"),
    ),
    "a seed that is a text": Mistake(
        library(lambda: replicated(seed="a")),
        "seed is",
        ("'a'", "must be a whole number", "the same on all replicas"),
    ),
    "a clip below 0": Mistake(
        library(lambda: replicated(clip=-1)), "clip is", ("-1", "must be above 0", "or None")
    ),
    "an option misspelt": Mistake(
        library(lambda: replicated(sede=1)), "Valid: ", ("'sede'", "mean", "'seed'")
    ),
    "a GPU on a machine without": Mistake(
        mesh_of(device="cuda"), "sees no GPU", ("'cuda'", "sees no GPU", "pass device='cpu'")
    ),
    "another learning rate on a replica": Mistake(
        unlike('"0.1"', '"0.2"'),
        "replicas differ: ",
        ("lr of group 0=0.2", "replica 0 has lr", "the same settings"),
    ),
    "another scheme on a replica": Mistake(
        unlike('"scheme": "demo"', '"scheme": "dema"', dt.demo()),
        "replicas differ: ",
        ("scheme=dema", "replica 0 has scheme=demo", "with the same settings"),
    ),
    "another torch on a replica": Mistake(
        unlike(re.escape(torch.__version__), torch.__version__[:-1] + "x"),
        "replicas differ: ",
        ("replica 1 has torch", f"replica 0 has torch={torch.__version__}", "versions"),
    ),
    "other weights on a replica": Mistake(
        unlike(r'(weight \(weights\)": ").', r"\1?"),
        "replicas differ: ",
        ("weight (weights)=?", "replica 0 has weight", "same_weights(model, axis)"),
    ),
    "a world that is not replicas x shards": Mistake(
        library(fill_mesh, {"shards": 2}, LaunchPosition(0, 3, 0, 1)),
        "but the launcher started",
        ("1 replicas x 2 shards", "started 3", "leave replicas and shards out"),
    ),
    "a rank beyond the world": Mistake(
        library(launch_position, {"RANK": "5", "WORLD_SIZE": "2"}),
        "the launcher says rank",
        ("rank 5", "from 0 to 1", "correct RANK"),
    ),
    "a world of words": Mistake(
        library(launch_position, {"RANK": "0", "WORLD_SIZE": "two"}),
        "the launcher's environment has",
        ("WORLD_SIZE='two'", "set WORLD_SIZE", "a whole number"),
    ),
    "no master": Mistake(
        meeting(), "not set: set", ("MASTER_ADDR and MASTER_PORT", "not set", "the host of rank 0")
    ),
    "a port that is none": Mistake(
        meeting(MASTER_ADDR="127.0.0.1", MASTER_PORT="http"),
        "MASTER_PORT is",
        ("'http'", "set it", "65535"),
    ),
    "a master whose name is wrong": Mistake(
        no_such_host,
        "MASTER_ADDR is",
        ("'hed.example.org'", "no host has that name", "name the host of rank 0"),
    ),
    "a port in use": Mistake(
        port_in_use, "is in use: give", ("port ", "is in use", "another MASTER_PORT")
    ),
    "a master that nobody reaches": Mistake(
        lambda: meeting(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))(),
        "has not met the other ranks",
        ("rank 1 of 2", "at 127.0.0.1:", "open that port"),
    ),
    "an interface in the environment that is not there": Mistake(
        library(lambda: rendezvous.use_interface({"GLOO_SOCKET_IFNAME": "wg9"})),
        "but this machine has",
        ("GLOO_SOCKET_IFNAME is 'wg9'", "this machine has", "lo"),
    ),
    "a directory that cannot be made": Mistake(
        library(lambda: directory.RunDirectory(Path("tiny.toml/run"))),
        "cannot write",
        ("tiny.toml/run", "Not a directory", "choose another --out"),
    ),
    "a full disk": Mistake(
        full_disk, "cannot write", ("run/config.toml", "No space left", "free some space")
    ),
    "a checkpoint of a wider model": Mistake(
        resumed(lambda: nn.Linear(8, 16)),
        "resume the same model",
        ("weight", "has shape (8, 8) in saved", "(16, 8) here"),
    ),
    "a checkpoint of other layers": Mistake(
        resumed(lambda: nn.Sequential(nn.Linear(8, 8))),
        "resume the same model",
        ("saved", "0.weight", "other parameters"),
    ),
    "a checkpoint of another scheme": Mistake(
        resumed(linear, dt.demo()),
        "resume with the same",
        ("'scheme': 'full'", "this run has", "'demo'"),
    ),
    "a checkpoint of another optimizer": Mistake(
        resumed(linear, base=lambda model: dt.SignSGD(model.parameters(), lr=0.1)),
        "resume with the same",
        ("written with optimizer SGD", "this run has", "SignSGD"),
    ),
    "more replicas that exchange nothing": Mistake(
        resumed(linear, dt.none(), replicas=2),
        "no common weights",
        ("by 1 replicas, not 2", "exchanges nothing", "resume with 1"),
    ),
    "no transformers": Mistake(
        without("transformers", train()),
        "pip install",
        ("needs", "transformers", "'.[models]'"),
    ),
    "no datasets": Mistake(
        without("datasets", train("--data", "hf:a/b")),
        "pip install",
        ("datasets", "needs", "'.[hub]'"),
    ),
    "no tracker": Mistake(
        without("trackio", library(check_trackers, ["trackio"])),
        "pip install",
        ("logger trackio", "needs", "install trackio"),
    ),
    "no accelerate": Mistake(
        without("accelerate", integration("huggingface")),
        "pip install",
        ("accelerate", "import", "'.[hf]'"),
    ),
    "no lightning": Mistake(
        without("lightning", integration("lightning")),
        "pip install",
        ("lightning", "need", "'.[lightning]'"),
    ),
    "a mesh larger than the world": Mistake(
        mesh_of(3, 2, "cpu"),
        "ranks, but the world has",
        ("3 replicas x 2 shards", "the world has 1", "torchrun --nproc-per-node 6"),
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
    assert (
        text.startswith(" ") or text.rstrip("\n").count("\n") == 0
    )  # tyro's own frames have several lines


@pytest.mark.parametrize(
    ("path", "remedy"), [("there/model", True), ("there", True), ("data/a.txt", False)]
)
def test_an_output_that_cannot_be_written_names_the_flag(path, remedy, capsys):
    verb = SimpleNamespace(json=False, debug=False, out=Path("there/model"))
    assert explain(verb, FileNotFoundError(errno.ENOENT, "No such file or directory", path)) == 1
    line = f"error: No such file or directory: {path}" + ": choose another --out" * remedy
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("local", [0, 1])
def test_what_a_rank_knows_alone_is_said_before_it_waits_for_others_and_once_on_a_machine(local):
    def check():
        raise ValueError("topk is 99")

    said = []
    with pytest.raises(WorldError, match="topk is 99") as caught_:
        run_under_launcher(LaunchPosition(0, 2, local, 2), pytest.fail, said.append, check)
    assert [str(error) for error in said] == ["topk is 99"] * (local == 0)
    assert caught_.value.reported and caught_.value.failure.bad_input


def test_one_of_three_ranks_says_at_once_that_two_shards_do_not_divide_them(tmp_path, monkeypatch):
    monkeypatch.setattr(refusal, "FRESH_S", 1.0)  # nobody else comes
    place = {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = Command(tmp_path, "train", tmp_path / "tiny.toml", "--shards", 2, env=place)
    assert command.wait() == 2
    assert command.errors.startswith(
        "error: 1 replicas x 2 shards are 2 processes, but the launcher started 3: "
    )


def test_the_page_has_the_same_mistakes():
    section = PAGE.read_text().partition("## First mistakes\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    listed = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted({mistake.first for mistake in MISTAKES.values()})
