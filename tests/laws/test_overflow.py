"""A step in which the gradients of all replicas overflowed under a GradScaler is left out, as by torch."""

from functools import partial

import pytest
import torch

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from zoo import GRADIENT, Plain, batch, built

SKIP = dt.Safety(non_finite="skip")
BAD = {1, 2, 5}
"""Steps in which all replicas overflow."""
STEPS = 7
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "signs": partial(dt.SignSGD, lr=1e-2, weight_decay=0.1),
}
MODEL = built(Plain)


def copied():
    model = Plain()
    model.load_state_dict(MODEL.state_dict())
    return model


def scaled(model, optimizer, replica, step, bad, scaler):
    loss = model(batch(replica, step, 32)).mean()
    if bad:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


@pytest.mark.parametrize("base", ["adamw", "sgd"])
def test_law_6_full_leaves_the_step_out_as_one_process_does(base):
    def act(communicator):
        model = copied()
        optimizer = dt.replicate(
            OPTIMIZERS[base](model.parameters()), model, communicator, dt.full(), safety=SKIP
        )
        scaler = scaler_of()
        for step in range(STEPS):
            scaled(model, optimizer, communicator.replica, step, step in BAD, scaler)
        return [p.detach().clone() for p in model.parameters()]

    first, second = simulate_replicas(act, 2)
    model = copied()
    optimizer = OPTIMIZERS[base](model.parameters())
    for step in [step for step in range(STEPS) if step not in BAD]:
        found = []
        for replica in range(2):
            loss = model(batch(replica, step, 32)).mean()
            found.append(torch.autograd.grad(loss, [*model.parameters()]))
        for parameter, *both in zip(model.parameters(), *found, strict=True):
            parameter.grad = (both[0] + both[1]) / 2
        optimizer.step()
    for one, other, alone in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one, alone)


def everything(model, optimizer):
    state = dt.replica_state(optimizer)
    inner = [v for each in optimizer.state.values() for v in each.values()]
    kept = [state[key] for key in sorted(state) if key != "step"]
    return digest([*model.parameters(), *inner, *kept])


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_law_10_a_step_in_which_all_overflow_changes_nothing(name, first):
    def act(communicator):
        model = copied()
        base = OPTIMIZERS["signs" if "sign" in name else "adamw"](model.parameters())
        optimizer = dt.replicate(base, model, communicator, GRADIENT[name], safety=SKIP)
        scaler = scaler_of()
        if not first:
            scaled(model, optimizer, communicator.replica, 0, False, scaler)
        optimizer.set_up()
        before = everything(model, optimizer)
        scaled(model, optimizer, communicator.replica, 1, True, scaler)
        after = everything(model, optimizer)
        scaled(model, optimizer, communicator.replica, 2, communicator.replica == 1, scaler)
        return before == after, digest(model.parameters())

    (same, weights), (other_same, other_weights) = simulate_replicas(act, 2)
    assert same and other_same and weights == other_weights


def test_a_step_without_a_scaler_after_an_overflow_is_a_step():
    def act(communicator):
        model = copied()
        base = OPTIMIZERS["adamw"](model.parameters())
        optimizer = dt.replicate(base, model, communicator, dt.full(), safety=SKIP)
        scaled(model, optimizer, communicator.replica, 0, True, scaler_of())
        before = digest(model.parameters())
        model(batch(communicator.replica, 1, 32)).mean().backward()
        optimizer.step()
        return before != digest(model.parameters())

    assert simulate_replicas(act, 2) == [True, True]
