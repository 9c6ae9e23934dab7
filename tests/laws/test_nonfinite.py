"""A gradient that is not finite is named on all replicas, by every engine."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.compute import kernel_library
from detonation.core.compute.nonfinite import SIGNAL_LIMIT, inspected
from detonation.core.runtime import Runtime
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


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BAD = [None, None, None, torch.nan, torch.inf, -torch.inf, 2 * SIGNAL_LIMIT]
SIGNALS = st.lists(
    st.tuples(
        st.sampled_from(DTYPES), st.integers(0, 40), st.sampled_from(BAD), st.sampled_from([1, 2])
    ),
    max_size=5,
)


@given(each=SIGNALS, seed=st.integers(0, 9))
def test_the_first_signal_that_is_not_finite_is_found_in_every_type(each, seed):
    generator = torch.Generator().manual_seed(seed)
    signals = []
    for dtype, count, bad, stride in each:
        signal = torch.randn(stride * count, generator=generator).to(dtype)[::stride]
        if bad is not None and count:
            signal[seed % count] = bad
        signals.append(signal)
    outside = [not (signal.double().abs() <= SIGNAL_LIMIT).all() for signal in signals]
    expected = outside.index(True) + 1 if any(outside) else 0
    runtime = Runtime(torch.device("cpu"))
    assert inspected(signals, runtime).status == expected
    with patch.object(kernel_library, "load_library", lambda: None):
        assert inspected(signals, runtime).status == expected
