"""docs/extending.md runs as it stands: its module, its recipe by the command line, and its test of the laws."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import detonation as dt
from detonation.cli.command import run_command
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.agreement import self_tests
from detonation.core.codec.aggregate import AGGREGATIONS
from detonation.core.codec.indices import narrow
from detonation.core.codec.precision import PRECISIONS
from detonation.core.engine.reference import engine_for
from detonation.core.memory import Memory
from detonation.core.optim import BaseStep
from detonation.core.runtime import Runtime
from detonation.core.schemes.scheme import SCHEMES
from detonation.engines.triton.coding import why_not_triton
from detonation.extend import StepTest, register_step_test
from detonation.testing import check_scheme

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A directory with the files of the page, as a user has them; its registrations are undone."""
    for name in ("mine.py", "rule.py", "mine.toml", "test_mine.py"):
        (tmp_path / name).write_text(FILES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in ("mine", "rule"):
        sys.modules.pop(module, None)
    for table, names in (
        (SCHEMES, ("largest", "haar", "halved")),
        (PRECISIONS, ("3bit",)),
        (AGGREGATIONS, ("median",)),
    ):
        for name in names:
            table.pop(name, None)


def test_the_recipe_of_the_page_trains(beside, capsys):
    assert (
        run_command(
            ["train", "mine.toml", "--replicas", "2", "--shards", "1", "--out", "run", "--json"]
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["replicas_equal"] is True and summary["scheme"] == "mine:haar"
    assert summary["val_loss"] < 0.59  # 0.607 if no weight moves
    assert summary["scheme_arguments"] == {"topk": 8, "chunk": 64, "decay": 0.99}


def test_the_test_of_the_page_holds(beside):
    scope: dict[str, object] = {}
    exec(FILES["test_mine.py"], scope)
    scope["test_my_schemes_obey_the_laws"]()


def test_a_registered_scheme_is_offered_by_name(beside, capsys):
    import mine  # noqa: F401

    assert run_command(["train"]) == 0
    assert "largest" in capsys.readouterr().out


@pytest.mark.parametrize("kernels", [True, False])
def test_every_engine_follows_another_rule_of_selection_or_leaves_it_to_torch(beside, kernels):
    from rule import halved

    codec = halved().codec
    layout = codec.layout({"weight": (40, 64)})
    memory = Memory(layout, halved().feedback, torch.device("cpu"))
    engine = engine_for(codec, layout, memory, Runtime(torch.device("cpu"), 0, kernels))
    selected = engine.encode([torch.randn(40, 64, generator=torch.Generator().manual_seed(0))], 0)
    indices = narrow(selected.indices)
    assert ((indices < 32).sum(1) == 2).all() and ((indices >= 32).sum(1) == 2).all()
    assert why_not_triton(codec) == "no kernel selects by Halves"
    check_scheme(halved())


def test_the_self_test_makes_an_optimizers_own_steps_once_its_test_is_registered():
    """Two processes that compute `Halving` differently are told apart by its own steps alone."""

    def hash_of(optimizer):
        runtime = Runtime(torch.device("cpu"), 0, kernels=False)
        return self_tests.selftest(dt.demo(), runtime, BaseStep(optimizer))[
            self_tests.STEP_SELFTEST
        ]

    class Halving(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data.mul_(0.5)

    own = Halving([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    by_operations = hash_of(own)
    register_step_test(Halving, StepTest(rows=8))
    try:
        assert hash_of(own) != by_operations
        assert own.param_groups[0]["params"][0] == 1
    finally:
        del self_tests._TESTED[Halving]
    assert hash_of(own) == by_operations


def test_a_model_in_whose_output_fsdp_finds_no_tensors_is_refused(beside, capsys):
    page = (beside / "mine.py").read_text()
    hidden = page.replace("return Output(", "return SimpleNamespace(")
    (beside / "mine.py").write_text("from types import SimpleNamespace\n" + hidden)
    command = ["train", "mine.toml", "--replicas", "2", "--shards", "1", "--out", "run"]
    assert run_command(command) == 2
    assert "no weight of model mine:Line got a gradient" in capsys.readouterr().err


def test_a_first_step_without_gradients_is_warned_of(caplog):
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters())
    optimizer = dt.replicate(sgd, model, LoopbackCommunicator(2), dt.full())
    for _ in range(2):
        optimizer.step()
    (line,) = [each for each in caplog.messages if "in the first step" in each]
    assert line.startswith("no parameter has a gradient in the first step")
