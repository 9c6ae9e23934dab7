"""A group of one is the scheme itself, not another algorithm: what it computes does not depend on being alone."""

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from zoo import TALKING

SHAPES = [(31, 257), (31,), (64, 31)]


def trained(scheme, replicas):
    """The weights of one of `replicas` that all see the same gradients, and the bytes that it sent."""

    def act(communicator):
        generator = torch.Generator().manual_seed(5)
        model = torch.nn.ParameterList(
            [torch.randn(shape, generator=generator) for shape in SHAPES]
        )
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=0.1), model, communicator, scheme
        )
        for _ in range(8):
            for parameter in model:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        optimizer.synchronize()
        return [parameter.detach() for parameter in model], optimizer.stats.bytes_sent

    return simulate_replicas(act, replicas)[0]


def depends_on_the_group(scheme):
    """Owners round again, each for blocks of its own rows."""
    return scheme.link == "owner"


@pytest.mark.parametrize(
    "name", [name for name, scheme in TALKING.items() if not depends_on_the_group(scheme)]
)
def test_law_6_one_replica_equals_two_that_see_the_same(name):
    (alone, sent), (two, _) = trained(TALKING[name], 1), trained(TALKING[name], 2)
    assert sent == 0
    for mine, theirs in zip(alone, two, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_one_replica_reads_a_message_of_any_length():
    def act(communicator):
        weight = torch.nn.ParameterList(
            [torch.ones(9)]
        )  # 2 rows of 8: values of 32 bytes, and 2 of indices
        sgd = torch.optim.SGD(weight.parameters(), lr=1.0)
        optimizer = dt.replicate(sgd, weight, communicator, dt.demo(topk=4, chunk=8))
        weight[0].grad = torch.ones(9)
        optimizer.step()
        return weight[0].detach()

    (moved,) = simulate_replicas(act, 1)
    torch.testing.assert_close(
        moved[:8], torch.zeros(8)
    )  # the DCT of a constant is one coefficient


@pytest.mark.parametrize("size", [64, 65, 101])
@pytest.mark.parametrize(
    "scheme", [dt.loco("sign", link="owner"), dt.demo(precision="2bit", link="owner")]
)
def test_an_owner_may_be_alone(scheme, size):
    """One replica is a view of its own message, whose memory does not lie where a number may begin."""
    model = torch.nn.Linear(size, size)
    base = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(1), scheme)
    before = digest(model.parameters())
    for _ in range(2):
        model(torch.ones(1, size)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert digest(model.parameters()) != before and not optimizer.stats.refused
