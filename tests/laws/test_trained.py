"""Parameters are frozen and unfrozen in turns, under every scheme: replicas agree, what is frozen stays, and a run that
was resumed anywhere is the run that was not."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.schemes import buckets
from zoo import KINDS, SCHEMES, TALKING, Plain, batch, built

FROZEN = {
    0: ["layers.0"],
    2: ["layers.0.bias"],
    4: ["layers.1.bias", "layers.0.bias"],
    5: ["layers.1"],
    7: [],
}
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
    return model, dt.replicate(
        base(model.parameters()), model, communicator, scheme, seed=3, safety=safety
    )


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
        frozen = {
            name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
        }
        advance(model, optimizer, communicator.replica, [step])
        # at the change itself a round ends
        at_once = scheme.signal != "parameters" and scheme.name != "none"
        expected = frozen if at_once else {name: kept.get(name) for name in frozen}
        moved |= {
            n
            for n, was in expected.items()
            if was is not None and not torch.equal(was, model.get_parameter(n))
        }
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
        ends = simulate_replicas(
            lambda axis, at=dict(points): changing(axis, scheme, base, at), replicas
        )
        assert [moved for _, _, moved, _, _ in ends] == [set()] * replicas
        assert scheme.signal == "nothing" or len({agreed for _, agreed, _, _, _ in ends}) == 1
        assert {taken for *_, taken in ends} == {STEPS}
        for (
            step,
            frozen_as_at,
        ) in points:  # the script may know before it loads what is frozen next, or after it

            def resume(axis, step=step, frozen_as_at=frozen_as_at, ends=ends):
                model, optimizer = start(axis, scheme, base, frozen_as_at)
                model.load_state_dict(ends[axis.replica][3][step]["model"])
                optimizer.load_state_dict(ends[axis.replica][3][step]["optimizer"])
                advance(model, optimizer, axis.replica, range(step, STEPS))
                return everything(model, optimizer)

            assert simulate_replicas(resume, replicas) == [end for end, *_ in ends], (
                replicas,
                step,
                frozen_as_at,
            )


@pytest.mark.parametrize(
    "name", ["full", "demo", "demo-alpha", "decoupled-adamw", "diloco", "streaming"]
)
def test_buckets_change_no_bit_where_what_is_trained_changes(name, monkeypatch):
    scheme = SCHEMES[name]

    def ends():
        return simulate_replicas(lambda axis: changing(axis, scheme, BASES["AdamW"], ()), 2)

    whole = ends()
    monkeypatch.setattr(buckets, "SMALLEST", 2**10)
    layout = scheme.codec.layout({n: p.shape for n, p in built(Plain).named_parameters()})
    assert len(buckets.cut_into_buckets(layout, scheme, 64)) > 1
    assert ends() == whole


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


def test_other_groups_of_the_same_parameters_change_nothing():
    """Each replica groups and orders them as it likes; what stops is another lr."""

    def act(communicator, regroup):
        model = built(Plain)
        first, *rest = model.parameters()
        base = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
        optimizer = dt.replicate(base, model, communicator, dt.loco())
        for step in range(6):
            if regroup and step == 2:
                base.param_groups.reverse()
            if regroup and step == 4:
                base.param_groups[1]["params"].insert(0, base.param_groups[0]["params"].pop())
            with optimizer.overlap():
                model(batch(communicator.replica, step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(model.parameters())

    ends = [
        simulate_replicas(lambda axis, regroup=regroup: act(axis, regroup), 2)
        for regroup in (False, True)
    ]
    assert ends[0] == ends[1] and len({*ends[0]}) == 1


@pytest.mark.parametrize("scheme", [dt.demo(), dt.diloco(every=4)], ids=["demo", "diloco"])
def test_a_new_parameter_in_the_place_of_another_begins_anew(scheme):
    """Such as a new head of the same shape: with the anchor of the old one its weights would jump."""

    def act(communicator):
        model = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=1e-9), model, communicator, scheme
        )
        for step in range(13):
            if step == 5:
                model[1] = nn.Linear(16, 16)
                for parameter in model[1].parameters():
                    nn.init.constant_(parameter, 5.0)
                optimizer.param_groups[0]["params"][2:] = model[1].parameters()
            for parameter in model.parameters():
                parameter.grad = (
                    torch.ones_like(parameter) if step != 5 else torch.zeros_like(parameter)
                )
            optimizer.step()
            if step == 5:
                rests = [
                    tensor
                    for key, tensor in optimizer.local_state().items()
                    if key.endswith("residual.1.weight")
                ]
        return bool((model[1].weight - 5.0).abs().max() < 1e-5), [
            float(rest.abs().max()) for rest in rests
        ]

    assert all(stays and not any(rests) for stays, rests in simulate_replicas(act, 2))


@pytest.mark.parametrize("name", TALKING)
def test_law_10_a_rank_whose_shards_are_all_empty_takes_part(name):
    """As where a model has fewer rows than a node has ranks."""

    def act(communicator):
        model = nn.ParameterDict({"gone": torch.zeros(0, 128), "too": torch.zeros(0)})
        optimizer = dt.replicate(
            dt.SignSGD(model.parameters(), lr=0.1), model, communicator, TALKING[name]
        )
        for _ in range(2 * TALKING[name].round.every):
            for parameter in model.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return optimizer.step_count

    assert simulate_replicas(act, 2) == [2 * TALKING[name].round.every] * 2


def test_a_newcomer_may_take_an_lr_that_a_schedule_computes_with_numpy():
    def act(communicator):
        model = built(Plain)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda step: np.float64(0.5) ** step)
        optimizer = dt.replicate(base, model, communicator, dt.loco())
        advance(model, optimizer, communicator.replica, range(1))
        schedule.step()
        optimizer.welcome(newcomer=communicator.replica == 1)
        advance(model, optimizer, communicator.replica, range(1, 3))
        return digest(model.parameters())

    one, other = simulate_replicas(act, 2)
    assert one == other


class Shifted(nn.Module):
    """Its three shifts have one gradient: `torch.autograd.grad` returns one tensor for two of them, and one number
    for all coordinates of the third."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 128)
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(4, 128)) for _ in range(2))
        self.spread = nn.Parameter(torch.randn(512))

    def forward(self, x):
        return self.layer(x) + self.shifts[0] + self.shifts[1] + self.spread.sum()


def given_gradients(communicator, scheme, base, own_memory):
    model = built(Shifted)
    parameters = [*model.parameters()]
    optimizer = dt.replicate(base(parameters), model, communicator, scheme, clip=0.1)
    for step in range(6):
        loss = model(batch(communicator.replica, step, 32)).square().mean()
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = (
                gradient.clone(memory_format=torch.contiguous_format) if own_memory else gradient
            )
        optimizer.step()
    return digest(parameters)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", [name for name in TALKING if TALKING[name].signal == "gradients"])
def test_gradients_that_share_memory_train_as_gradients_that_do_not(name, base):
    found = [
        simulate_replicas(lambda c, own=own: given_gradients(c, TALKING[name], BASES[base], own), 2)
        for own in (True, False)
    ]
    assert found[0] == found[1]


def test_a_phase_of_training_that_is_over_hides_no_frozen_weights():
    """Its optimizer is in a reference cycle, which ends later on other ranks."""
    model = built(Plain)
    first, *others = model.parameters()
    gc.disable()
    try:
        old = dt.replicate(
            torch.optim.SGD([first], lr=0.1), model, LoopbackCommunicator(2), dt.full()
        )
        cycle = [old]
        cycle.append(cycle)
        del old, cycle
        first.requires_grad_(False)
        new = dt.replicate(
            torch.optim.SGD(others, lr=0.1), model, LoopbackCommunicator(2), dt.full()
        )
        assert [*map(id, new._trained.frozen.values())] == [id(first)]
    finally:
        gc.enable()


def test_an_optimizer_that_a_later_one_replaces_hides_no_frozen_weights():
    """A rank may still hold the old one."""
    model = built(Plain)
    first, *others = model.parameters()
    old = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, LoopbackCommunicator(2), dt.full()
    )
    first.requires_grad_(False)
    new = dt.replicate(torch.optim.SGD(others, lr=0.1), model, LoopbackCommunicator(2), dt.full())
    assert [*map(id, new._trained.frozen.values())] == [id(first)]
    del old
