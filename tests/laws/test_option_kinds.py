"""The law of options: an lr of any kind gives a follower the bits of training."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.agreement.desync import numbers_of, options_of
from detonation.core.agreement.options import recorded_options, take_recorded
from detonation.core.flat.tensors import digest
from detonation.log.playback import Playback
from detonation.log.records import whole_records
from zoo import Plain, batch, built

KINDS = {
    "float32": np.float32,
    "array": lambda lr: np.array(lr, dtype=np.float32),
    "float64": np.float64,
    "tensor": torch.tensor,
    "double": lambda lr: torch.tensor(lr, dtype=torch.float64),
    "back": lambda lr: torch.tensor(lr) if lr < 0.03 else lr,
}


def started(make=None):
    model = built(Plain)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.37, foreach=False)
    base = adam
    if make:
        base = make(model.parameters())
    return model, dt.replicate(base, model, LoopbackCommunicator(2), dt.demo(topk=4, chunk=16))


def advance(model, optimizer, kind, steps=4):
    for step in range(steps):
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = KINDS[kind](0.01 * (step + 1.1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_replays_an_lr_that_gets_another_kind(kind, tmp_path):
    model, optimizer = started()
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    advance(model, optimizer, kind, 12)
    log.close()
    other, again = started()
    assert dt.replay(tmp_path, again) == 12
    assert digest(other.parameters()) == digest(model.parameters())


def test_numbers_of_numpy_are_compared_by_their_exact_value():
    base = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=np.float32(0.1))
    base.param_groups[0]["betas"] = np.float32(0.9), 0.95
    assert "lr=" in numbers_of(base)(base.param_groups[0])
    assert options_of(base, {})["lr of group 0"] == str(float(np.float32(0.1)))
    assert "float32" not in options_of(base, {})["betas of group 0"]


def test_a_step_computes_with_numbers_of_python():
    model, optimizer = started()
    optimizer.param_groups[0]["betas"] = np.float32(0.5), 0.95
    advance(model, optimizer, "float32")
    optimizer.step()
    group = optimizer.param_groups[0]
    assert group["lr"] == float(np.float32(0.01 * 4.1)) and type(group["lr"]) is float
    assert group["betas"] == (0.5, 0.95) and type(group["betas"][0]) is float


def test_a_recorded_group_is_the_group_of_training():
    betas = (np.float32(0.9), np.float64(0.95))
    told = {"params": [], "lr": torch.tensor(0.1), "betas": betas, "note": "x", "eps": 1e-8}
    group = {"params": [], "lr": 0.2, "betas": (0.9, 0.999), "eps": torch.tensor(1.0)}
    take_recorded(group, recorded_options(told))
    assert torch.equal(group["lr"], told["lr"]) and group["betas"] == (float(betas[0]), 0.95)
    assert type(group["eps"]) is float and group["note"] == "x"


def test_the_log_of_a_run_with_warmup_is_replayed_without_a_warning(tmp_path, caplog):
    model, optimizer = started()
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    for step in range(4):
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1:
            log.rotate()
    log.close()
    other, again = started()
    caplog.clear()
    assert dt.replay(tmp_path, again) == 4
    assert digest(other.parameters()) == digest(model.parameters())
    assert not [each.message for each in caplog.records if "rounds differently" in each.message]
    _, fresh = started()
    reached, why = Playback(tmp_path, fresh, 0).reach()
    assert (reached, why) == (4, "")


def test_a_log_tells_of_hooks_of_the_base_optimizer_once(tmp_path, caplog):
    def halve(base, *_):
        for parameter in base.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    model, optimizer = started(sgd)
    optimizer.base.register_step_pre_hook(halve)
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    advance(model, optimizer, "float64")
    log.close()
    told = [each.message for each in caplog.records if "hooks" in each.message]
    assert len(told) == 1 and "halve" in told[0]
    start = next(whole_records(tmp_path / "replica0-shard0-0.updates")).table()
    assert [name.rpartition(".")[2] for name in start["hooks"]] == ["halve"]
    other, again = started(sgd)
    again.base.register_step_pre_hook(halve)
    assert dt.replay(tmp_path, again) == 4
    assert digest(other.parameters()) == digest(model.parameters())


def test_an_option_of_another_kind_is_refused_by_its_name_and_value():
    """Where the optimizer is made, before anything is sent."""
    switches = ["no", 1, None, 0.0]
    numbers = [True, "1", [1.0]]
    wrong = {"kernels": switches, "balance": switches, "clip": numbers, "safety": [{}, "skip"]}
    for name, values in wrong.items():
        for value in values:
            model = built(Plain)
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(TypeError, match=f"{name} is {re.escape(repr(value))}, must be a?"):
                dt.replicate(base, model, LoopbackCommunicator(), dt.full(), **{name: value})


@pytest.mark.parametrize("kind", [torch.tensor, np.float32, np.int64])
def test_an_option_of_a_scheme_that_is_no_plain_number_is_refused_with_the_call_that_makes_it_one(
    kind,
):
    with pytest.raises(
        ValueError, match=r"^topk is .*3.*, must be .*: pass its \.item\(\), not a "
    ):
        dt.demo(topk=kind(3))


PAGE = Path(__file__).resolve().parents[2] / "docs/recipe-reference.md"
LINES = re.findall(r'^- `name = "(\w+)"`: .* Keys: (.*)\.$', PAGE.read_text(), re.MULTILINE)
DOCUMENTED = {name: keys for name, keys in LINES if name in dt.schemes.__all__}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_scheme_without_options_is_the_one_with_those_of_its_reference(name):
    """An option that is left out has the value of the page, not another one."""
    options = tomllib.loads("\n".join(re.findall(r"`(.*?)`", DOCUMENTED[name])))
    assert options and dt.scheme(name, {}) == dt.scheme(name, options)
