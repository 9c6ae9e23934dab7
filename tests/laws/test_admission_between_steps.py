"""Law 2 where a loop acts between two steps, and a replica joins meanwhile: all are equal from its first step on."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import detonation as dt
from detonation.cluster.survive.agreement import next_axis_store
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from steps import bases, together
from zoo import Plain, batch, built

REPLICAS, AFTER = 2, 4
TOKEN = b"0123456789abcdef"
SCHEMES = {
    "full": dt.full,
    "demo": lambda: dt.demo(topk=4, chunk=16),
    "diloco": lambda: dt.diloco(every=3),
}


class Net(nn.Module):
    """One part is trained, one is frozen, and one has another optimizer; and it has statistics."""

    def __init__(self):
        super().__init__()
        self.trained = built(Plain)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.other = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(32, affine=False)

    def forward(self, values):
        return self.trained(self.norm(values)).mean()


MODEL = Net()


@torch.no_grad()
def clamp(model, optimizer):
    for parameter in model.trained.parameters():
        parameter.clamp_(-0.1, 0.1)


@torch.no_grad()
def average(model, optimizer):
    model.frozen.weight.lerp_(torch.full((4, 4), float(optimizer.step_count)), 0.1)


@torch.no_grad()
def train_other(model, optimizer):
    model.other.weight.mul_(0.99)


def complete(model, optimizer):
    optimizer.synchronize()


def complete_and_clamp(model, optimizer):
    optimizer.synchronize()
    clamp(model, optimizer)


def train(model, optimizer, axis, between):
    """Trains until some steps after that before which, or after which, all are in."""
    door = dt.Admission(model, optimizer, token=TOKEN)
    came = None
    while came is None or optimizer.step_count < came + AFTER:
        for act in (lambda: take_step(model, optimizer, axis), lambda: between(model, optimizer)):
            begun = optimizer.step_count
            act()
            if came is None and optimizer.levels[0][0].size() > REPLICAS:
                came = begun
        door.after_step()
    optimizer.synchronize()
    axis.close()
    return digest([*model.parameters(), *model.buffers()]), optimizer.step_count, axis.size()


def take_step(model, optimizer, axis):
    model(batch(axis.replica, optimizer.step_count, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()


def member(store, replica, scheme, between):
    own = next_axis_store(store, replica, REPLICAS)
    axis = SurvivingCommunicator(
        Membership(own, replica, REPLICAS, 0, 1, 30.0, 1, print, confirm_s=30.0), 30.0
    )
    model = copy.deepcopy(MODEL)
    optimizer = dt.replicate(bases(model.trained.parameters()), model, axis, scheme)
    return train(model, optimizer, axis, between)


def newcomer(store, between):
    model = copy.deepcopy(MODEL)
    optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN)
    return train(model, optimizer, axis, between)


def ends(scheme, between):
    store = HashStore()
    members = [
        lambda replica=replica: member(store, replica, SCHEMES[scheme](), between)
        for replica in range(REPLICAS)
    ]
    return together(*members, lambda: newcomer(store, between))


@pytest.mark.parametrize("between", [clamp, average, train_other, complete, complete_and_clamp])
@pytest.mark.parametrize("scheme", ["full", "demo"])
def test_law_2_a_newcomer_has_what_the_loop_wrote_and_completed_before_its_step(scheme, between):
    (end, *others) = ends(scheme, between)
    assert others == [end, end] and end[-1] == REPLICAS + 1


@pytest.mark.parametrize("between", [average, train_other, complete])
def test_law_2_a_newcomer_comes_in_between_rounds_of_which_some_were_completed(between):
    (end, *others) = ends("diloco", between)
    assert others == [end, end] and end[-1] == REPLICAS + 1


def test_law_2_a_newcomer_comes_in_at_a_step_and_not_within_a_change_of_settings():
    """It would not take part in what all compare there."""

    def change(model, optimizer):
        if optimizer.step_count % 10 == 0:
            topk = 8 if optimizer.step_count % 20 else 4
            optimizer.reconfigure(dt.demo(topk=topk, chunk=16))

    (end, *others) = ends("demo", change)
    assert others == [end, end] and end[-1] == REPLICAS + 1
