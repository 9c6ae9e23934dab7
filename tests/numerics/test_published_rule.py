"""`demo` as published against the rule of DeMo's package, in plain torch."""

import math

import pytest
import torch

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas

SHAPES, STEPS, TOPK, SIDE, DECAY, LR = [(32, 48), (64, 32)], 8, 5, 16, 0.9, 0.1


def gradient(replica, step, number):
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + number)
    return torch.randn(SHAPES[number], generator=generator)


def weights_of(scheme, replicas):
    def act(communicator):
        model = torch.nn.ParameterList([torch.ones(shape) for shape in SHAPES])
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=LR), model, communicator, scheme
        )
        for step in range(STEPS):
            for number, parameter in enumerate(model):
                parameter.grad = gradient(communicator.replica, step, number)
            optimizer.step()
        return [parameter.detach() for parameter in model]

    return simulate_replicas(act, replicas)[0]


def published(replicas):
    """The momentum of each replica gives its largest DCT coefficients away; the mean of those that gave one moves all.

    Without the package's sign of the update, which would hide how large it is.
    """
    n = torch.arange(float(SIDE))
    waves = torch.stack(
        [torch.cos(math.pi * (n + 0.5) * k / SIDE) * math.sqrt((2 if k else 1) / SIDE) for k in n]
    )
    weights = [torch.ones(shape) for shape in SHAPES]
    momenta = [[torch.zeros(shape) for shape in SHAPES] for _ in range(replicas)]
    for step in range(STEPS):
        for number, (height, width) in enumerate(SHAPES):

            def tiles(matrix, down=height // SIDE, across=width // SIDE):
                return matrix.view(down, SIDE, across, SIDE).transpose(1, 2)

            indices, values = [], []
            for replica, own in enumerate(momenta):
                own[number].mul_(DECAY).add_(gradient(replica, step, number))
                coefficients = (waves @ tiles(own[number]) @ waves.T).reshape(-1, SIDE * SIDE)
                indices.append(coefficients.abs().topk(TOPK).indices)
                values.append(coefficients.gather(1, indices[-1]))
                sent = torch.zeros_like(coefficients).scatter_(1, indices[-1], values[-1])
                tiles(own[number]).sub_(waves.T @ sent.view(tiles(own[number]).shape) @ waves)
            mean = torch.zeros_like(coefficients).scatter_reduce_(
                1, torch.cat(indices, 1), torch.cat(values, 1), "mean", include_self=False
            )
            tiles(weights[number]).sub_(
                LR * (waves.T @ mean.view(tiles(weights[number]).shape) @ waves)
            )
    return weights


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_demo_with_a_mean_over_senders_is_the_rule_of_the_package(replicas):
    scheme = dt.demo(
        TOPK, SIDE, tiles=True, decay=DECAY, aggregate="mean_nonzero", link="all-gather"
    )
    theirs = published(replicas)
    for mine, plain in zip(weights_of(scheme, replicas), theirs, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
    paper = weights_of(dt.demo(topk=TOPK, chunk=SIDE, tiles=True, decay=DECAY), replicas)
    assert not torch.allclose(paper[0], theirs[0], atol=1e-2)
