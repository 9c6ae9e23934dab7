"""The order in which a tensor lies in memory (its strides) changes no bit of training, of a resumed run, of a replay or
of a follower: fused steps read memory in its order, and sums in another order round differently."""

import copy

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas

BASES = {
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "muon": lambda parameters: dt.Muon(parameters, lr=1e-2),
}
TOKEN = b"0123456789abcdef0123"


class Mixed(nn.Module):
    """A convolution in channels_last, and a matrix whose rows and columns are exchanged in memory."""

    def __init__(self, other=True):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(4, 8, 3, padding=1)
        self.matrix = nn.Parameter(torch.randn(6, 8).t())
        self.last = nn.Linear(6, 3)
        if other:
            self.convolution.to(memory_format=torch.channels_last)
        else:
            self.matrix = nn.Parameter(self.matrix.detach().contiguous())

    def forward(self, x):
        return self.last(self.convolution(x).mean((2, 3)) @ self.matrix)


def steps(model, optimizer, numbers, replica=0):
    for number in numbers:
        torch.manual_seed(100 * number + replica)
        x = torch.randn(4, 4, 6, 6).to(memory_format=torch.channels_last)
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(base="fused adamw", other=True, **options):
    model = Mixed(other)
    optimizer = dt.replicate(
        BASES[base](model.parameters()), model, LoopbackCommunicator(2), dt.loco(), **options
    )
    return model, optimizer


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def resumed(mesh, folder, base):
    """Whether a run that goes on equals one that is loaded."""

    def start():
        model = Mixed()
        base_optimizer = BASES[base](model.parameters())
        return model, dt.replicate(base_optimizer, model, mesh["replicate"], dt.loco())

    model, optimizer = start()
    steps(model, optimizer, range(3), mesh.get_rank())
    dt.save_checkpoint(folder, model, optimizer)
    loaded, its_optimizer = start()
    dt.load_checkpoint(folder, loaded, its_optimizer)
    steps(model, optimizer, range(3, 6), mesh.get_rank())
    steps(loaded, its_optimizer, range(3, 6), mesh.get_rank())
    return equal(model, loaded)


@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_keeps_the_order_of_the_optimizers_state(base, tmp_path):
    assert worlds.run(resumed, 2, 1, tmp_path, base) == [True, True]


def test_a_follower_steps_in_the_order_of_training(tmp_path):
    model, optimizer = alone()
    steps(model, optimizer, range(3))
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    served = Mixed()
    follower = dt.follow(served, feed.address, token=TOKEN, wait=False)
    number = 3
    while follower.step < 6:
        steps(model, optimizer, [number])
        number += 1
        follower.update(wait_s=0.02)
    feed.close()
    follower.update(to=optimizer.step_count)
    assert equal(model, served)


@pytest.mark.parametrize("base", ["fused adamw", "muon"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_replay_in_another_order_gives_the_same_bits(base, clip, tmp_path):
    model, optimizer = alone(base, clip=clip)
    optimizer.record(dt.UpdateLog(tmp_path))
    steps(model, optimizer, range(5))
    optimizer.record(None)
    again, its_optimizer = alone(base, other=False, clip=clip)
    assert dt.replay(tmp_path, its_optimizer) == 5
    assert equal(model, again)


@pytest.mark.parametrize("base", BASES)
def test_gradients_in_any_order_move_all_replicas_alike(base):
    """One replica assigns gradients in another order than its parameters have, another one has none."""

    def act(axis):
        model = Mixed()
        optimizer = dt.replicate(BASES[base](model.parameters()), model, axis, dt.full(), clip=0.05)
        for number in range(3):
            for at, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * number + at)
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.contiguous() if axis.replica == 0 else None
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy(model)

    first, second = simulate_replicas(act, 2)
    assert equal(first, second)
