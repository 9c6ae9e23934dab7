"""The surroundings of a step change nothing in it: neither autocast nor torch's default dtype."""

import pytest
import torch
from torch import nn

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from zoo import TALKING

NAMES = [
    "full",
    "demo",
    "demo-tiles",
    "demo-bitmap-2bit",
    "random",
    "random-majority",
    "diloco",
    "streaming",
    "eager-int8",
]
ODD = {"chunk-48": dt.demo(topk=24, chunk=48), "demo-owner": TALKING["demo-owner"]}
SCHEMES = {name: TALKING[name] for name in NAMES} | ODD


def run(scheme, kernels, autocast=False):
    """Weights, bytes and refused messages after four steps of two replicas."""

    def act(communicator):
        generator = torch.Generator().manual_seed(communicator.replica)
        model = nn.Linear(128, 64, bias=False, dtype=torch.float32)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 128 * 64, dtype=torch.float32).view(64, 128))
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=0.1), model, communicator, scheme, kernels=kernels
        )
        for _ in range(4):
            model.weight.grad = torch.randn(64, 128, generator=generator, dtype=torch.float32)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                optimizer.step()
        return model.weight.detach().clone(), optimizer.stats.bytes_sent, optimizer.stats.refused

    return simulate_replicas(act, 2)[0]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_neither_autocast_nor_the_default_dtype_reaches_into_a_step(name, kernels):
    weights, sent, refused = run(SCHEMES[name], kernels)
    under = [run(SCHEMES[name], kernels, autocast=True)]
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            under.append(run(SCHEMES[name], kernels))
        finally:
            torch.set_default_dtype(torch.float32)
    for other, other_sent, other_refused in under:
        assert torch.equal(other, weights) and (other_sent, other_refused) == (sent, refused) and not refused
