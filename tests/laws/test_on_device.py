"""The laws where tensors are: on the CPU in `make test`, and with TEST_DEVICE=cuda on a GPU (`make gpu`), all schemes.

This file needs torch and pytest alone, and stays in one process: a machine with a GPU may have no more.
"""

import pytest
import torch
from torch import nn

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.engine.reference import engine_for
from detonation.core.flat.tensors import digest
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.testing import check_scheme
from zoo import DEVICE, GRADIENT, KINDS, REGISTERED, SCHEMES, TALKING

CPU = torch.device("cpu")
ALL = DEVICE.type != "cpu"
"""On the CPU every scheme has these laws elsewhere: here one of each kind proves the file."""


def some(table):
    return [name for name in table if ALL or name in KINDS]


@pytest.mark.parametrize("name", REGISTERED)
def test_a_scheme_keeps_the_laws(name):
    """Laws 1, 2, 3, 4, 5, 9, 10 and 11."""
    check_scheme(REGISTERED[name], replicas=2 + ALL, steps=3 + ALL, device=DEVICE)


def trained(communicator, scheme, steps, base, scale=1.0, device=DEVICE, kernels=True):
    """The weights after some steps of a small model on gradients of this replica, and what it has sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 129), nn.Linear(129, 31, bias=False)).to(device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = base(model.parameters())
    if scheme is not None:
        optimizer = dt.replicate(optimizer, model, communicator, scheme, kernels=kernels)
    replica = communicator.replica if communicator else 0
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + replica)
        for parameter in model.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(device)
        optimizer.step()
    if scheme is not None:
        optimizer.synchronize()
    return [
        parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)
    ]


def sgd(lr=0.5):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def test_law_6_full_is_the_mean_of_the_gradients_and_one_replica_the_plain_optimizer():
    class Mean(torch.optim.SGD):
        """Plain SGD, of which both replicas' gradients are put in by hand."""

    full = simulate_replicas(lambda c: trained(c, dt.full(), 4, sgd()), 2)
    assert digest(full[0]) == digest(full[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 129), nn.Linear(129, 31, bias=False)).to(DEVICE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain = Mean(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        generators = [torch.Generator().manual_seed(100 * step + replica) for replica in range(2)]
        for parameter in model.parameters():
            drawn = [
                torch.randn(parameter.shape, generator=generator).to(DEVICE)
                for generator in generators
            ]
            parameter.grad = (drawn[0] + drawn[1]) / 2
        plain.step()
    moved = [
        parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)
    ]
    assert digest(moved) == digest(full[0])
    alone = trained(None, None, 4, sgd())
    for scheme in (dt.full(), dt.none()):
        assert digest(trained(LoopbackCommunicator(1), scheme, 4, sgd())) == digest(alone)


@pytest.mark.parametrize("name", some(GRADIENT))
def test_law_7_the_step_is_linear_in_the_signal(name):
    """Powers of two scale without rounding, in SGD too."""
    once, scaled = (
        simulate_replicas(lambda c, by=by: trained(c, GRADIENT[name], 3, sgd(), by), 2)[0]
        for by in (1.0, 4.0)
    )
    for small, large in zip(once, scaled, strict=True):
        torch.testing.assert_close(4 * small, large, rtol=2e-5, atol=2e-5)


def test_law_8_the_output_of_a_level_is_the_signal_of_the_next():
    def act(communicator):
        class Inner(LoopbackCommunicator):
            """A rack of one node: full synchronisation in it changes nothing."""

        torch.manual_seed(0)
        model = nn.Linear(67, 31).to(DEVICE)
        levels = [
            (Inner(1), dt.full()),
            (communicator, dt.demo(4, 16)),
            (communicator, dt.diloco(every=2)),
        ]
        optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, levels=levels)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + communicator.replica)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            optimizer.step()
        return digest(model.parameters()), optimizer.stats.bytes_sent_by_level

    (first, sent), (second, _) = simulate_replicas(act, 2)
    assert first == second and sent[0] == 0 and all(sent[1:])


@pytest.mark.parametrize("name", some(TALKING))
def test_two_runs_give_the_same_bits(name):
    """Fifty steps on a GPU: no atomics, and no order that depends on time."""
    steps = 50 if ALL else 4
    first, again = (
        simulate_replicas(
            lambda c: digest(trained(c, SCHEMES[name], steps, lambda p: dt.SignSGD(p, lr=1e-3))), 2
        )
        for _ in range(2)
    )
    assert first == again and first[0] == first[1]


@pytest.mark.parametrize(
    "name", some([name for name, scheme in GRADIENT.items() if scheme.feedback])
)
def test_the_engine_of_the_device_decodes_what_the_reference_does(name):
    """Against the same signals on a CPU in plain torch; where both select the same, fp32 may differ by rounding."""
    scheme = GRADIENT[name]
    layout = scheme.codec.layout({"w": (200, 96), "b": (77,)})
    generator = torch.Generator().manual_seed(3)
    signals = [torch.randn(slot.shape, generator=generator) for slot in layout.slots]
    updates = []
    for device, kernels in ((CPU, False), (DEVICE, True)):
        runtime = Runtime(device, seed=7, kernels=kernels)
        memory = Memory(layout, scheme.feedback, device)
        engine = engine_for(scheme.codec, layout, memory, runtime)
        selected = engine.encode([signal.to(device) for signal in signals], 0)
        messages = [scheme.codec.encode(selected)]
        shared = selected.indices if scheme.codec.selection.shared else None
        received = scheme.codec.received(messages, layout.rows, shared, scheme.aggregation)
        targets = [torch.empty(slot.shape, device=device) for slot in layout.slots]
        engine.write(received, targets)
        updates.append(torch.cat([target.cpu().double().flatten() for target in targets]))
    exact, found = updates
    # a coefficient at the edge of the k largest may change places with its neighbour: both are as large
    assert float((exact - found).norm() / exact.norm()) < 0.02 and torch.isfinite(found).all()


def test_numbers_that_a_gpu_must_not_round():
    """The basis is fp32 as it stands, whatever the caller allows: TF32 would be off by a thousandth."""
    basis = dt.demo(4, 64).codec.basis
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = basis.inverse(basis.forward(x))
    assert float((exact - x).abs().max()) < 2e-5
