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
from zoo import TALKING, Plain, batch, built

SCHEMES = {"full": dt.full(), "demo": dt.demo(topk=4, chunk=16)}
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


POISONED_AT = {"loco": 3, "diloco": 2, "streaming": 4}
"""A step whose message has what is not finite, by scheme; that of two may arrive later."""


def told(communicator, scheme, poisoned, changed=100, alone=False, verify_every=0):
    """The error of a gradient or weight that is not finite from step `poisoned` on, and its step.

    changed: the step at which all replicas freeze another parameter; or the first one alone.
    """
    model = built(Plain)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    safety = dt.Safety(verify_every=verify_every)
    optimizer = dt.replicate(sgd, model, communicator, scheme, safety=safety)
    for step in range(poisoned + 5):
        freezes = step >= changed and not (alone and communicator.replica)
        model.layers[0].bias.requires_grad_(not freezes)
        model(batch(communicator.replica, step, 32)).mean().backward()
        if step == poisoned and communicator.replica == 1:
            weight = model.layers[1].weight
            (weight.grad if scheme.signal == "gradients" else weight.detach())[0, 0] = torch.nan
        try:
            optimizer.step()
        except dt.errors.NonFiniteGradient as error:
            return optimizer.step_count, str(error)
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("name", POISONED_AT)
def test_law_2_a_change_of_what_is_trained_delays_no_reason_to_stop(name):
    """All replicas hear of it at the step at which its message arrives, and with the same words."""
    scheme, poisoned = TALKING[name], POISONED_AT[name]

    def ends(changed, alone=False):
        one, other = simulate_replicas(lambda c: told(c, scheme, poisoned, changed, alone), 2)
        assert one == other is not None
        return one

    usual = ends(changed=100)
    assert usual[0] >= poisoned
    assert [ends(changed) for changed in range(usual[0], usual[0] + 2)] == [usual] * 2
    if scheme.signal == "parameters" and scheme.round.delay:
        # a message that arrives at the step at which one replica announces a change alone
        assert ends(usual[0], alone=True) == usual


@pytest.mark.parametrize("name", ["diloco", "streaming", "sparta", "muloco"])
def test_law_15_a_comparison_in_which_nothing_differs_hides_no_weight_that_is_not_finite(name):
    """A weight that the loop spoils is told at the same step, with comparisons and without."""
    for poisoned in (2, 3):
        usual, compared = (
            simulate_replicas(
                lambda c, each=each, at=poisoned: told(c, TALKING[name], at, verify_every=each), 2
            )
            for each in (0, 1)
        )
        assert usual == compared and usual[0] == usual[1] is not None
