"""Which parameter is in which group is a setting like lr: replicas, logs and checkpoints compare it."""

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.link.link import Mismatch
from detonation.errors import Desync
from limits import LIMIT_S
from steps import following


def made(axis, swapped=False, verify_every=100):
    """Two layers, whose weights decay and whose biases do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, second, third, fourth = model.parameters()
    groups = [[first, third], [second, fourth]]
    if swapped:
        groups = [[first, second], [third, fourth]]
    base = torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": 0.5},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    safety = dt.Safety(verify_every=verify_every)
    return model, dt.replicate(base, model, axis, dt.loco(), safety=safety)


def step(model, optimizer, number):
    torch.manual_seed(number)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def move(optimizer, count=1):
    """Moves `count` parameters to the second group, and as many back for 2."""
    decayed, others = optimizer.param_groups
    others["params"].append(decayed["params"].pop(0))
    if count == 2:
        decayed["params"].append(others["params"].pop(0))


def test_replicas_with_other_groups_do_not_start():
    def act(axis):
        model, optimizer = made(axis, swapped=axis.replica == 1)
        step(model, optimizer, 0)

    with pytest.raises(Mismatch, match="parameters of group 0"):
        simulate_replicas(act, 2)


@pytest.mark.parametrize(
    ("count", "what"),
    [(1, "options of the parameter groups"), (2, "parameters of group")],
    ids=["more of them", "as many"],
)
def test_a_group_that_changes_on_one_replica_is_found(count, what):
    """Messages carry the sizes of groups; `verify` compares names."""

    def act(axis):
        model, optimizer = made(axis, verify_every=4)
        for number in range(6):
            if number == 2 and axis.replica == 1:
                move(optimizer, count)
            step(model, optimizer, number)

    with pytest.raises(Desync, match=what):
        simulate_replicas(act, 2)


@pytest.mark.parametrize("count", [1, 2])
def test_a_replay_refuses_a_group_that_training_changed(count, tmp_path):
    model, optimizer = made(LoopbackCommunicator(2))
    optimizer.record(dt.UpdateLog(tmp_path))
    for number in range(5):
        if number == 2:
            move(optimizer, count)
        step(model, optimizer, number)
    optimizer.record(None)
    _, again = made(LoopbackCommunicator(2))
    with pytest.raises(ValueError, match="in step 3 of training, parameter group 0 held other"):
        dt.replay(tmp_path, again)
    assert again.step_count == 2


def with_one_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    base = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    return model, dt.replicate(base, model, LoopbackCommunicator(2), dt.loco())


def add_a_group_and_synchronize(model, optimizer):
    """The step after it begins to train the group."""
    optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 3e-3})
    optimizer.synchronize()


def test_a_replay_ends_before_a_group_that_was_added_before_synchronize(tmp_path):
    model, optimizer = with_one_layer()
    optimizer.record(dt.UpdateLog(tmp_path))
    for number in range(4):
        if number == 2:
            add_a_group_and_synchronize(model, optimizer)
        step(model, optimizer, number)
    optimizer.record(None)
    _, again = with_one_layer()
    with pytest.raises(ValueError, match="was written with parameters 4, "):
        dt.replay(tmp_path, again)
    assert again.step_count == 2


def test_a_follower_gets_a_new_copy_after_a_group_was_added_before_synchronize():
    model, optimizer = with_one_layer()
    served, _ = with_one_layer()
    with following(model, optimizer, served, b"a token for tests only") as (_, follower):
        step(model, optimizer, 0)
        while follower.step < optimizer.step_count:
            step(model, optimizer, optimizer.step_count)
            follower.update(wait_s=0.1)
        add_a_group_and_synchronize(model, optimizer)
        started = optimizer.step_count
        while follower.step <= started:
            step(model, optimizer, optimizer.step_count)
            follower.update(wait_s=0.1)
        follower.update(to=optimizer.step_count, wait_s=LIMIT_S)
        assert all(map(torch.equal, model.parameters(), served.parameters()))


def test_an_option_that_only_one_group_has_is_compared():
    def act(axis):
        torch.manual_seed(0)
        one, two = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        model = nn.ParameterList([one, two])
        groups = [{"params": [one], "muon_beta2": 0.9}, {"params": [two], "muon_beta2": None}]
        optimizer = dt.replicate(dt.Muon(groups, lr=0.1), model, axis, dt.loco())
        for number in range(6):
            if number == 2 and axis.replica == 1:
                optimizer.param_groups[0]["muon_beta2"] = 0.5
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    with pytest.raises(Desync, match="options of the parameter groups"):
        simulate_replicas(act, 2)


def loaded(mesh, folder, saved, now):
    """The option after loading a checkpoint in which it was `saved`."""

    def muon(beta2):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])
        base = dt.Muon(model.parameters(), lr=0.1, muon_beta2=beta2)
        return model, dt.replicate(base, model, mesh["replicate"], dt.full())

    model, optimizer = muon(saved)
    model[0].grad = torch.ones(4, 4)
    optimizer.step()
    dt.save_checkpoint(folder, model, optimizer)
    model, optimizer = muon(now)
    dt.load_checkpoint(folder, model, optimizer)
    return optimizer.param_groups[0]["muon_beta2"]


@pytest.mark.parametrize(("saved", "now"), [(None, 0.9), (0.9, None)])
def test_a_saved_option_replaces_none_and_none_replaces_an_option(saved, now, tmp_path):
    assert worlds.run(loaded, 1, 1, tmp_path, saved, now) == [saved]
