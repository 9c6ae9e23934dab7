"""Hooks of the base optimizer run as torch calls them, and logs, followers and checkpoints have what they change."""

import logging
from contextlib import suppress
from inspect import isfunction

import pytest
import torch
from test_written import TOKEN, advance, started
from torch.optim.optimizer import register_optimizer_step_post_hook

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.integrity.observer import StepObserver
from detonation.log.playback import Playback
from detonation.log.records import Tapes
from steps import following
from worlds import caught
from zoo import SCHEMES, Plain, batch, built

STEPS = 4


def nothing(*_):
    """Writes nothing between two steps."""


def parameters_of(base):
    return [p for group in base.param_groups for p in group["params"]]


@torch.no_grad()
def clamp(base, *_):
    for parameter in parameters_of(base):
        parameter.clamp_(-0.05, 0.05)


@torch.no_grad()
def halve(base, *_):
    for parameter in parameters_of(base):
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def signs(parameters, lr):
    return dt.SignSGD(parameters, lr=lr)


def seen(communicator, register):
    """What a hook saw of the gradients, and the signs of the update that the step applied."""
    model = built(Plain)
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters(), lr=0.01), model, communicator, SCHEMES["demo-sign"]
    )
    found = []
    remove = register(optimizer.base, lambda base, *_: found.append(
        [p.grad.clone() for p in parameters_of(base)]
    ))  # fmt: skip
    try:
        before = [p.detach().clone() for p in model.parameters()]
        advance(model, optimizer, communicator.replica, range(1), nothing)
        moved = [was - p for was, p in zip(before, model.parameters(), strict=True)]
    finally:
        remove.remove()
    return found[0], moved


def of_all(base, hook):
    """Registers a hook of every optimizer, which sees `base` alone."""
    return register_optimizer_step_post_hook(
        lambda each, *rest: hook(each) if each is base else None
    )


REGISTER = {
    "before": lambda base, hook: base.register_step_pre_hook(hook),
    "after": lambda base, hook: base.register_step_post_hook(hook),
    "of all": of_all,
}


@pytest.mark.parametrize("where", REGISTER)
def test_law_2_a_hook_sees_the_gradients_that_all_replicas_agreed_on(where):
    ranks = simulate_replicas(lambda c: seen(c, REGISTER[where]), 2)
    (first, moved), (second, _) = ranks
    assert all(map(torch.equal, first, second))
    for gradient, move in zip(first, moved, strict=True):
        assert torch.equal(gradient.sign(), move.sign())


def recorded(directory, scheme, base, register, record=dt.Replicated.record):
    model, optimizer = started(LoopbackCommunicator(2), scheme, base)
    register(optimizer.base)
    log = dt.UpdateLog(directory)
    record(optimizer, log)
    advance(model, optimizer, 0, range(STEPS), nothing)
    log.close()
    return model


@pytest.mark.parametrize("base", [torch.optim.AdamW, signs])
@pytest.mark.parametrize("name", ["full", "demo", "demo-sign"])
def test_law_15_a_log_has_what_a_hook_after_a_step_writes(name, base, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        model = recorded(
            tmp_path, SCHEMES[name], base, lambda each: each.register_step_post_hook(clamp)
        )
    assert (
        len(
            [
                each
                for each in caplog.records
                if "outside of optimizer.step() wrote weights" in each.message
            ]
        )
        == 1
    )
    other, again = started(LoopbackCommunicator(2), SCHEMES[name], base)
    assert dt.replay(tmp_path, again) == STEPS
    assert digest(other.parameters()) == digest(model.parameters())


def test_law_15_a_log_beside_another_observer_has_what_a_hook_after_a_step_writes(tmp_path):
    def record_through_tapes(optimizer, log):
        optimizer.record(Tapes([log]))

    model = recorded(
        tmp_path,
        SCHEMES["demo"],
        torch.optim.AdamW,
        lambda base: base.register_step_post_hook(clamp),
        record_through_tapes,
    )
    other, again = started(LoopbackCommunicator(2), SCHEMES["demo"])
    assert dt.replay(tmp_path, again) == STEPS
    assert digest(other.parameters()) == digest(model.parameters())


def test_several_observers_hear_all_that_one_hears():
    heard = {name for name, value in vars(StepObserver).items() if isfunction(value)}
    assert heard <= vars(Tapes).keys()


def test_law_15_a_follower_has_what_a_hook_after_a_step_writes():
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    optimizer.base.register_step_post_hook(clamp)
    served = built(Plain)
    with following(model, optimizer, served, TOKEN):
        advance(model, optimizer, 0, range(STEPS), nothing)
    assert digest(served.parameters()) == digest(model.parameters())


def test_law_15_a_hook_that_writes_the_state_ends_a_replay(tmp_path):
    def reset(base, *_):
        for state in base.state.values():
            state["exp_avg"].zero_()

    recorded(
        tmp_path, SCHEMES["demo"], torch.optim.AdamW, lambda b: b.register_step_post_hook(reset)
    )
    _, again = started(LoopbackCommunicator(2), SCHEMES["demo"])
    with pytest.raises(
        ValueError, match="after step 1, training continued with weights or optimizer state"
    ):
        dt.replay(tmp_path, again)


def test_law_15_a_replay_without_the_hook_before_a_step_is_refused_by_its_name(tmp_path):
    model = recorded(
        tmp_path, SCHEMES["demo"], torch.optim.AdamW, lambda b: b.register_step_pre_hook(halve)
    )
    other, again = started(LoopbackCommunicator(2), SCHEMES["demo"])
    with pytest.raises(ValueError, match=r"before step 1, .* hooks .*: halve; register functions"):
        dt.replay(tmp_path, again)
    again.base.register_step_pre_hook(halve)
    assert dt.replay(tmp_path, again) == STEPS
    assert digest(other.parameters()) == digest(model.parameters())


def test_a_replay_of_several_ranks_ends_before_the_hook(tmp_path):
    recorded(
        tmp_path, SCHEMES["full"], torch.optim.AdamW, lambda b: b.register_step_pre_hook(halve)
    )
    _, optimizer = started(LoopbackCommunicator(2), SCHEMES["full"])
    reached, why = Playback(tmp_path, optimizer, 0).reach()
    assert reached == 0 and "halve" in why


def saved_and_loaded(mesh, folder):
    """Which hooks a save and a load called, and how they refuse hooks that change a state dict."""
    model = built(Plain)
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
    called = []
    for name, each in (("whole", optimizer), ("base", base)):
        each.register_state_dict_pre_hook(lambda _, name=name: called.append(f"saves {name}"))
        each.register_load_state_dict_post_hook(lambda _, name=name: called.append(f"loads {name}"))
    model(batch(0, 0, 32)).mean().backward()
    optimizer.step()
    dt.save_checkpoint(folder, model, optimizer)
    dt.load_checkpoint(folder, model, optimizer)
    base.register_load_state_dict_pre_hook(marks)
    loads = caught(lambda: dt.load_checkpoint(folder, model, optimizer))
    optimizer.register_state_dict_post_hook(marks)
    return called, loads, caught(lambda: dt.save_checkpoint(folder, model, optimizer))


def test_a_checkpoint_calls_hooks_or_refuses_them_by_name(tmp_path):
    for called, loads, saves in worlds.run(saved_and_loaded, 2, 1, tmp_path):
        assert called == ["saves whole", "saves base", "loads base", "loads whole"]
        assert loads[0] == "ValueError" and "loads no state dict" in loads[1]
        assert saves[0] == "ValueError" and "saves no state dict" in saves[1]
        assert "marks" in loads[1] and "marks" in saves[1]
    assert len([*tmp_path.iterdir()]) == 1


def marks(_, state):
    """Changes a state dict."""
    return {**state, "mark": 1}


def lone_step():
    """An optimizer of one replica, with a gradient."""
    weight = torch.nn.Parameter(torch.ones(64))
    base = dt.SignSGD([weight], lr=0.1)
    optimizer = dt.replicate(
        base, torch.nn.ParameterList([weight]), LoopbackCommunicator(), dt.demo()
    )
    weight.grad = torch.ones(64)
    return optimizer


def test_a_profiler_sees_the_range_of_each_step():
    optimizer = lone_step()
    optimizer.step()
    with torch.profiler.profile() as seen:
        optimizer.step()
    ranges = {each.key for each in seen.key_averages()}
    assert {"Optimizer.step#Replicated.step", "Optimizer.step#SignSGD.step"} <= ranges


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_leaves_the_gradient_mode_as_it_was(fails):
    optimizer = lone_step()
    seen = []
    optimizer.register_step_post_hook(lambda *given: seen.append(torch.is_grad_enabled()))

    def closure():
        assert torch.is_grad_enabled()
        if fails:
            raise ArithmeticError

    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), suppress(ArithmeticError):
            optimizer.step(closure)
        assert torch.is_grad_enabled()
    assert seen == ([] if fails else [True, False])
