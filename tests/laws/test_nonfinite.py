"""A gradient that is not finite is named on all replicas, by every engine."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from worlds import caught
from zoo import Plain, batch, built

SCHEMES = {"full": dt.full(), "demo": dt.demo(topk=4, chunk=16), "late": dt.demo(delay=1)}
NAMES = [name for name, _ in Plain().named_parameters()]


def spoil(value, gradient):
    """The gradient with another last element."""
    spoilt = gradient.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


def poisoned(axis, scheme, how, name, value):
    """What is raised where replica 1 has a value that is not finite in one gradient."""
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, axis, scheme, kernels=how != "plain torch")
    for step in range(3):
        if step == 1 and axis.replica == 1:
            model.get_parameter(name).register_hook(partial(spoil, value))
        with optimizer.overlap() if how == "overlap" else nullcontext():
            model(batch(axis.replica, step, 32)).mean().backward()
        kind, text = caught(optimizer.step)
        if kind != "nothing":
            return kind, text
        optimizer.zero_grad()
    return "nothing", ""


@pytest.mark.parametrize("how", ["kernels", "plain torch", "overlap"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gradient_that_is_not_finite_is_named_on_all_replicas(scheme, how):
    for name, value in zip(NAMES, [torch.nan, torch.inf, -torch.inf] * 2, strict=False):
        for kind, text in simulate_replicas(
            lambda axis, name=name, value=value: poisoned(axis, SCHEMES[scheme], how, name, value),
            2,
        ):
            assert kind == "NonFiniteGradient", (kind, text)
            assert name in text and "replica 1" in text, (name, text)
