"""Parameters are frozen and unfrozen in turns, under every scheme: replicas agree, what is frozen stays, and a run that
was resumed anywhere is the run that was not."""

import copy

import pytest
import torch
from torch import nn

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from zoo import KINDS, SCHEMES, Plain, batch, built

FROZEN = {0: ["layers.0"], 2: ["layers.0.bias"], 4: ["layers.1.bias", "layers.0.bias"], 5: ["layers.1"], 7: []}
"""By step, the prefixes of what is frozen from then on: some joins, some leaves, and both at once."""
STEPS = 9
BASES = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "SignSGD": lambda params: dt.SignSGD(params, lr=1e-3, weight_decay=0.1),
}


def freeze(model, step):
    """Lets the model require gradients as it does at `step`."""
    frozen = FROZEN[max(first for first in FROZEN if first <= step)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix) for prefix in frozen))


def start(communicator, scheme, base, step=0):
    model = built(Plain)
    freeze(model, step)
    safety = dt.Safety(verify_every=1)
    return model, dt.replicate(base(model.parameters()), model, communicator, scheme, seed=3, safety=safety)


def advance(model, optimizer, replica, steps):
    for step in steps:
        freeze(model, step)
        model(batch(replica, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(model, optimizer):
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def everything(model, optimizer):
    state = dt.replica_state(optimizer)
    return digest(model.parameters()), {key: digest([tensor]) for key, tensor in state.items()}


def changing(communicator, scheme, base, points):
    """Digests at the end, names that moved while frozen, and the states after the steps `points`."""
    model, optimizer = start(communicator, scheme, base)
    states, moved, kept = {}, set(), {}
    for step in range(STEPS):
        freeze(model, step)
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        advance(model, optimizer, communicator.replica, [step])
        # at the change itself a round ends
        at_once = scheme.signal != "parameters" and scheme.name != "none"
        expected = frozen if at_once else {name: kept.get(name) for name in frozen}
        moved |= {n for n, was in expected.items() if was is not None and not torch.equal(was, model.get_parameter(n))}
        kept = {name: model.get_parameter(name).detach().clone() for name in frozen}
        if step + 1 in points:
            states[step + 1] = saved(model, optimizer)
    end = everything(model, optimizer)
    optimizer.synchronize()
    return end, digest(model.parameters()), moved, states, optimizer.step_count


@pytest.mark.parametrize(("base", "name"), [("AdamW", n) for n in SCHEMES])
def test_law_10_what_is_trained_may_change(base, name):
    scheme, base = SCHEMES[name], BASES[base]
    resumed = {2: [(2, 1), (5, 5)], 3: [(4, 3)]} if name in KINDS else {2: [(5, 4)]}
    for replicas, points in resumed.items():
        ends = simulate_replicas(lambda axis, at=dict(points): changing(axis, scheme, base, at), replicas)
        assert [moved for _, _, moved, _, _ in ends] == [set()] * replicas
        assert scheme.signal == "nothing" or len({agreed for _, agreed, _, _, _ in ends}) == 1
        assert {taken for *_, taken in ends} == {STEPS}
        for step, frozen_as_at in points:  # the script may know before it loads what is frozen next, or after it

            def resume(axis, step=step, frozen_as_at=frozen_as_at, ends=ends):
                model, optimizer = start(axis, scheme, base, frozen_as_at)
                model.load_state_dict(ends[axis.replica][3][step]["model"])
                optimizer.load_state_dict(ends[axis.replica][3][step]["optimizer"])
                advance(model, optimizer, axis.replica, range(step, STEPS))
                return everything(model, optimizer)

            assert simulate_replicas(resume, replicas) == [end for end, *_ in ends], (replicas, step, frozen_as_at)


def test_law_1_what_stays_keeps_its_memory_when_another_parameter_leaves():
    def end(beside):
        model = nn.ParameterDict({name: torch.zeros(4, 16) for name in "ab"})
        model["b"].requires_grad_(beside)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(base, model, LoopbackCommunicator(2), dt.demo(topk=2, chunk=16))
        for step in range(4):
            model["b"].requires_grad_(beside and step < 2)
            for parameter in model.values():
                drawn = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
                parameter.grad = drawn if parameter.requires_grad else None
            optimizer.step()
        return model["a"].detach()

    assert torch.equal(end(beside=True), end(beside=False))
