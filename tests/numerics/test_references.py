"""Schemes against torch's own hybrid sharding and against each other. Laws 6, 7 and sharding invariance."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import detonation as dt
import worlds
from detonation.core.flat.tensors import local
from zoo import Heads, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

STEPS = 10


def train(mesh, scheme, make, steps=STEPS):
    """Full weights after training `ReferenceEngine`, by name. Never by sign: where replicas cancel, that is noise."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(make(model.parameters()), model, mesh["replicate"], scheme)
    for step in range(steps):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def gradients(model, ranks, step):
    """What a replica made of these ranks has as its gradient: the mean over their batches."""
    model.zero_grad()
    sum(model(batch(rank, step, 32)).mean() / len(ranks) for rank in ranks).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def close(mine, plain, **tolerance):
    for name, p in plain.items():
        torch.testing.assert_close(mine[name], p, **tolerance)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def full_against_hsdp(mesh):
    mine = train(mesh, dt.full(), adamw)
    model = built(Plain)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # a 2-D mesh: torch's own hybrid sharding
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(
        mine, {name: p.full_tensor() for name, p in model.named_parameters()}, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2)])
def test_law_6_full_is_torch_hybrid_sharding(replicas, shards):
    worlds.run(full_against_hsdp, replicas, shards)


def mixed_against_hsdp(mesh, precision):
    """Local weights, ours and torch's, where the policy reduces gradients in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found = []
    for ours in (True, False):
        model = built(Plain)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh["shard"] if ours else mesh, mp_policy=policy)
        optimizer = adamw(model.parameters())
        if ours:
            optimizer = dt.replicate(optimizer, model, mesh["replicate"], dt.full(precision))
        for step in range(STEPS):
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([local(p).detach() for p in model.parameters()])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("precision, equal", [("bf16", True), ("fp32", False)])
def test_law_6_full_in_bf16_is_hybrid_sharding_that_reduces_in_bf16(precision, equal, shards):
    assert worlds.run(mixed_against_hsdp, 2, shards, precision) == [equal] * (2 * shards)


def unused_against_hsdp(mesh, make):
    """Heads that all use in turn, one that nobody uses: whether all is equal to torch's."""
    found = []
    for ours in (True, False):
        model = built(Heads)
        for part in model.children():
            fully_shard(part, mesh=mesh["shard"] if ours else mesh)
        fully_shard(model, mesh=mesh["shard"] if ours else mesh)
        optimizer = make(model.parameters())
        base = optimizer
        if ours:
            optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
        for step, heads in enumerate(["a", "a", "b", "a", "ab", "", "b"]):
            model(batch(mesh.get_rank(), step, 24), heads).backward()
            optimizer.step()
            optimizer.zero_grad()
        tensors = [local(p).detach() for p in model.parameters()]
        for parameter in model.parameters():
            state = base.state.get(parameter, {})
            tensors += [local(state[key]) for key in sorted(state)]
        found.append(tensors)
    assert len(found[0]) == len(found[1])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


UNUSED = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("make", UNUSED.values(), ids=UNUSED)
@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2)])
def test_law_6_full_is_hybrid_sharding_bit_for_bit_where_parameters_are_unused(
    replicas, shards, make
):
    assert all(worlds.run(unused_against_hsdp, replicas, shards, make))


def none_against_fsdp(mesh):
    mine = train(mesh, dt.none(), adamw)
    ranks = mesh.mesh[mesh.get_local_rank("replicate")].tolist()
    model = built(Plain)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        gradients(model, ranks, step)
        optimizer.step()
    close(mine, dict(model.named_parameters()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2), (1, 2)])
def test_law_6_none_is_fsdp_alone(replicas, shards):
    worlds.run(none_against_fsdp, replicas, shards)


def one_replica(mesh):
    """With one node every lossless scheme is the plain optimizer, by the same code."""
    plain = train(mesh, dt.none(), adamw)
    close(train(mesh, dt.full(), adamw), plain, atol=0, rtol=0)
    close(train(mesh, dt.schemes.random(rate=1, decay=0), adamw), plain, atol=0, rtol=0)
    close(
        train(mesh, dt.diloco(every=2, outer_lr=1, outer_momentum=0), adamw),
        plain,
        atol=1e-6,
        rtol=1e-6,
    )


def test_law_6_one_replica_is_the_plain_optimizer():
    worlds.run(one_replica, 1, 2)


def outer_degenerate_cases(mesh):
    """Without rounding error feedback has nothing to keep, and averaging with nobody changes nothing."""
    outer = {"every": 3, "outer_lr": 0.7, "outer_momentum": 0.5}
    diloco = train(mesh, dt.diloco(**outer), adamw, steps=12)
    close(
        train(mesh, dt.muloco(**outer, precision="fp32"), adamw, steps=12), diloco, atol=0, rtol=0
    )
    close(
        train(mesh, dt.schemes.sparta(), adamw), train(mesh, dt.none(), adamw), atol=1e-6, rtol=1e-6
    )


def test_law_6_one_replica_of_muloco_and_sparta():
    worlds.run(outer_degenerate_cases, 1, 2)


def sparta_of_everything(mesh):
    close(
        train(mesh, dt.schemes.sparta(rate=1), sgd),
        train(mesh, dt.full(), sgd),
        atol=1e-6,
        rtol=1e-6,
    )


def test_law_6_sparta_of_everything_is_synchronous_sgd():
    worlds.run(sparta_of_everything, 2, 2)


def diloco_every_step(mesh):
    mine = train(mesh, dt.diloco(every=1, outer_lr=1, outer_momentum=0), sgd)
    close(mine, train(mesh, dt.full(), sgd), atol=1e-6, rtol=1e-6)


def test_law_6_diloco_at_every_step_is_synchronous_sgd():
    worlds.run(diloco_every_step, 2, 2)


def flexdemo_with_equal_batches(mesh, scheme):
    """The shards of a weight of 64 x 32 hold whole rows of 16, so the same chunks are seen on any number of shards."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(sgd(model.parameters()), model, mesh["replicate"], scheme)
    for step in range(STEPS):
        model(batch(mesh.get_local_rank("replicate"), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().tolist() for name, p in model.named_parameters()}


def test_flexdemo_on_two_shards_is_demo_on_one():
    scheme = dt.demo(topk=2, chunk=16, decay=0.9)
    two = worlds.run(flexdemo_with_equal_batches, 2, 2, scheme)[0]
    one = worlds.run(flexdemo_with_equal_batches, 2, 1, scheme)[0]
    close(
        {k: torch.tensor(v) for k, v in two.items()},
        {k: torch.tensor(v) for k, v in one.items()},
        atol=1e-6,
        rtol=1e-6,
    )


def step_of(mesh, scheme, lr):
    model = dt.shard(built(Plain), mesh)
    start = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=lr), model, mesh["replicate"], scheme
    )
    model(batch(mesh.get_rank(), 0, 32)).mean().backward()
    optimizer.step()
    return {name: local(p).detach() - start[name] for name, p in model.named_parameters()}


def lr_means_one_thing(mesh, scheme):
    once, four_times = step_of(mesh, scheme, 0.25), step_of(mesh, scheme, 1.0)
    for name, moved in once.items():
        torch.testing.assert_close(4 * moved, four_times[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "scheme",
    [dt.full(), dt.demo(), dt.schemes.random(rate=1 / 4), dt.schemes.striding()],
    ids=lambda s: s.name,
)
def test_law_7_the_step_is_linear_in_lr(scheme):
    worlds.run(lr_means_one_thing, 2, 1, scheme)
