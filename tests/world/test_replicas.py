"""Real worlds of gloo ranks: replicas agree, bytes are what was predicted, awkward parameters train."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import detonation as dt
import worlds
from covering import covered, some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import local
from detonation.core.schemes import traffic
from zoo import KINDS, SCHEMES, WORLDS, Menagerie, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

STEPS = 4
OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta"]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def train(model, optimizer, rank, steps=STEPS, width=257):
    for step in range(steps):
        model(batch(rank, step, width)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def menagerie(mesh, scheme, sharded):
    """Trains every awkward parameter; returns what the test compares, for this rank."""
    model = built(Menagerie, scalar=not sharded)
    if sharded:
        dt.shard(model, mesh)
    start = [local(p).detach().clone() for p in model.parameters()]
    frozen = local(model.frozen).detach().clone()
    optimizer = dt.replicate(sgd(model), model, mesh["replicate"], scheme)
    train(model, optimizer, mesh.get_rank())
    optimizer.synchronize()
    moved = sum(
        float((local(p).detach() - old).abs().sum())
        for p, old in zip(model.parameters(), start, strict=True)
    )
    assert torch.equal(local(model.frozen).detach(), frozen)
    assert all(local(p).isfinite().all() for p in model.parameters())
    return (
        dt.fingerprint(model, mesh),
        optimizer.stats.bytes_sent,
        predicted(model, mesh, scheme),
        moved,
    )


def predicted(model, mesh, scheme):
    """Bytes by arithmetic alone, from the shapes of the local shards."""
    trained = {name: local(p).shape for name, p in model.named_parameters() if p.requires_grad}
    layout = scheme.codec.layout(trained)
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    replicas = mesh["replicate"].size()
    sent = sum(
        traffic.bytes_sent(scheme, layout, replicas, step, sizes=sizes) for step in range(STEPS)
    )
    if scheme.signal == "gradients":  # nobody uses one, and the bits of the first messages say so
        bits = -(-len(trained) // 8)
        sent += traffic.ring_bytes("all-gather", bits, replicas)
    fragments = zip(scheme.divide(layout, sizes), scheme.rounds, strict=True)
    for fragment, round in fragments if scheme.signal == "parameters" else []:
        everything = scheme.codec.selection.period if scheme.resume_from == "sent" else 1
        if everything > 1 or not round.sends(
            STEPS - 1
        ):  # synchronizing ends the open round, or averages all
            sent += everything * traffic.message_bytes(scheme, fragment, replicas)
    return sent


EVERYWHERE = [(name, *world) for world in WORLDS for name in (SCHEMES if world[0] > 1 else KINDS)]
"""One replica has nobody to tell anything."""
ONCE = [(name, *WORLDS[number % 3]) for number, name in enumerate(SCHEMES)] + [
    (name, 1, 2) for name in KINDS[::3]
]


@some("name, replicas, shards", EVERYWHERE, keep=ONCE)
def test_laws_2_4_10_replicas_agree_bytes_are_predicted_and_nothing_crashes(name, replicas, shards):
    scheme = SCHEMES[name]
    results = worlds.run(menagerie, replicas, shards, scheme, shards > 1)
    assert len({fingerprint for (fingerprint, _), *_ in results}) == 1
    alone = scheme.signal == "nothing" and replicas > 1
    assert all(equal is not alone for (_, equal), *_ in results)
    assert all(sent == foreseen for _, sent, foreseen, _ in results)
    assert (results[0][1] > 0) is (replicas > 1 and not alone)
    assert results[0][3] > 0


def every_step(mesh, scheme):
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(sgd(model), model, mesh["replicate"], scheme)
    equal = []
    for step in range(6):
        train(model, optimizer, mesh.get_rank() + 100 * step, steps=1, width=32)
        equal.append(dt.fingerprint(model, mesh)[1])
    return equal


@pytest.mark.parametrize(
    "scheme", [dt.demo(), dt.schemes.random(), dt.full()], ids=lambda s: s.name
)
def test_law_2_replicas_are_bitwise_equal_after_every_step(scheme):
    assert worlds.run(every_step, 2, 2, scheme)[0] == [True] * 6


def test_law_2_diloco_is_bitwise_equal_after_every_round_and_not_between():
    assert worlds.run(every_step, 2, 2, dt.diloco(every=3))[0] == [False, False, True] * 2


def test_law_2_sparta_is_bitwise_equal_once_settled_and_never_between():
    assert worlds.run(every_step, 2, 2, dt.schemes.sparta(rate=1 / 4))[0] == [False] * 6


def sparta_under_diloco(mesh):
    model = built(Plain)
    axis = mesh["replicate"]
    optimizer = dt.replicate(
        sgd(model),
        model,
        levels=[(axis, dt.schemes.sparta(rate=1 / 4)), (axis, dt.diloco(every=2))],
    )
    equal = []
    for step in range(4):
        train(model, optimizer, mesh.get_rank() + 100 * step, steps=1, width=32)
        equal.append(dt.fingerprint(model, mesh)[1])
    return equal


def test_law_8_sparta_and_diloco_on_one_axis():
    assert worlds.run(sparta_under_diloco, 2, 1) == [[False, True] * 2] * 2


def by_optimizers(mesh):
    return {name: by_optimizer(mesh, name) for name in OPTIMIZERS}


def by_optimizer(mesh, name):
    model = dt.shard(built(Plain), mesh)
    base = getattr(torch.optim, name)(model.parameters())
    start = [local(p).detach().clone() for p in model.parameters()]
    train(model, dt.replicate(base, model, mesh["replicate"], dt.demo()), mesh.get_rank(), width=32)
    assert any(
        not torch.equal(local(p), old) for p, old in zip(model.parameters(), start, strict=True)
    )
    return dt.fingerprint(model, mesh)[1]


def test_demo_takes_nine_torch_optimizers():
    assert worlds.run(by_optimizers, 2, 1) == [dict.fromkeys(OPTIMIZERS, True)] * 2


class Projections(nn.Module):
    """Tensor-parallel by columns and rows, as DTensors on the axis inside the node."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weights = built(Plain)
        up, down = weights.layers[0].weight.detach(), weights.layers[1].weight.detach()
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(1)]))
        self.scale = nn.Parameter(distribute_tensor(torch.ones(32), mesh, [Replicate()]))

    def forward(self, x):
        x = distribute_tensor(x, self.up.device_mesh, [Replicate()])
        return ((x @ self.up.T).tanh() @ self.down.T * self.scale).square().mean(1).full_tensor()


def tensor_parallel(mesh):
    model = Projections(mesh["shard"])
    optimizer = dt.replicate(
        sgd(model), model, mesh["replicate"], dt.full(), intra_node=mesh["shard"]
    )
    train(model, optimizer, mesh.get_local_rank("replicate"), width=32)
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    plain = Projections(init_single())
    reference = sgd(plain)
    for step in range(STEPS):
        sum(plain(batch(replica, step, 32)).mean() / 2 for replica in range(2)).backward()
        reference.step()
        reference.zero_grad()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(whole[name], p.full_tensor().detach(), atol=1e-6, rtol=1e-5)
    return dt.fingerprint(model, mesh)[1], optimizer.stats.bytes_sent


def init_single() -> DeviceMesh:
    """A mesh of this rank alone."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([r]) for r in range(torch.distributed.get_world_size())]
    return DeviceMesh.from_group(groups[rank], "cpu", mesh=torch.tensor([rank]))


def test_tensor_parallel_parameters_train_as_one_model():
    """Each shard sends its half of two matrices of 2,048, and half of the scale of 32, which both hold whole.

    With each message go three numbers a replica.
    """
    sent = 4 * STEPS * (2048 + 6 + (32 + 6) // 2)
    assert worlds.run(tensor_parallel, 2, 2) == [(True, sent)] * 4


def levels(mesh, schemes):
    """Two tiers of network, one shard: ranks 0-1 and 2-3 share a rack."""
    racks = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("site", "rack"))
    model = built(Plain)
    tiers = [(racks["rack"], schemes[0]), (racks["site"], schemes[1])]
    optimizer = dt.replicate(sgd(model), model, levels=tiers)
    train(model, optimizer, mesh.get_rank(), steps=4, width=32)
    return (
        dt.fingerprint(model, mesh),
        {k: v.tolist() for k, v in model.state_dict().items()},
        optimizer.stats.bytes_sent,
    )


def test_law_8_levels_chain_and_each_counts_its_bytes():
    (two_levels, weights, sent), *_ = worlds.run(levels, 4, 1, [dt.full(), dt.full()])
    (_, one_level, _), *_ = worlds.run(one_full_level, 4, 1)
    layout = dt.full().codec.layout({name: p.shape for name, p in Plain().named_parameters()})
    assert two_levels[1] and sent == 4 * 2 * traffic.message_bytes(dt.full(), layout, 2)
    for name, weight in one_level.items():
        torch.testing.assert_close(
            torch.tensor(weights[name]), torch.tensor(weight), atol=1e-6, rtol=1e-5
        )


def one_full_level(mesh):
    model = built(Plain)
    optimizer = dt.replicate(sgd(model), model, mesh["replicate"], dt.full())
    train(model, optimizer, mesh.get_rank(), steps=4, width=32)
    return (
        dt.fingerprint(model, mesh),
        {k: v.tolist() for k, v in model.state_dict().items()},
        optimizer.stats.bytes_sent,
    )


@pytest.mark.parametrize("outer", [dt.demo(), dt.diloco(every=2)], ids=lambda s: s.name)
def test_law_8_full_in_the_rack_and_something_else_across(outer):
    results = worlds.run(levels, 4, 1, [dt.full(), outer])
    assert all(equal for (_, equal), *_ in results)


INNER = {"local-sgd": dt.schemes.local_sgd(every=2), "sparta": dt.schemes.sparta(rate=1 / 4)}
OUTER = {
    "diloco": dt.diloco(every=4, outer_momentum=0.0),
    "late": dt.schemes.streaming_diloco(
        4, fragments=1, delay=2, keep=0.0, outer_momentum=0.0, precision="fp32"
    ),
}


def agreed_by_levels(mesh, still, inner, outer):
    """The weights after an outer round has landed, and those after `still` steps in which nobody moves.

    `sparta`, which makes nobody equal, is a level on the axis of the outer one.
    """
    racks = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("site", "rack"))
    axes, found = ["site" if inner.name == "sparta" else "rack", "site"], []
    for synchronizes in (False, True):
        model = built(Plain)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(
            base, model, levels=[(racks[axes[0]], inner), (racks[axes[1]], outer)]
        )
        for step in range(4 + still):
            base.param_groups[0]["lr"] = 0.1 * (step < 4)
            train(model, optimizer, mesh.get_rank() + 100 * step, steps=1, width=32)
            if step == 3:
                agreed = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        if synchronizes:
            optimizer.synchronize()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return agreed.tolist(), [weights.tolist() for weights in found]


@covered("still, inner, outer", [0, 1, 2], INNER, OUTER)
def test_law_8_what_an_outer_round_agreed_on_stays(inner, outer, still):
    for agreed, found in worlds.run(agreed_by_levels, 4, 1, still, INNER[inner], OUTER[outer]):
        for weights in found:
            torch.testing.assert_close(
                torch.tensor(weights), torch.tensor(agreed), atol=1e-6, rtol=0
            )


@pytest.mark.parametrize(
    "inner",
    [
        dt.diloco(every=2),
        dt.diloco(2, outer_momentum=0.0),
        dt.schemes.local_sgd(2, "int8"),
        dt.schemes.sparseloco(2),
    ],
)
def test_rounds_that_would_undo_the_rounds_around_them_are_refused(inner):
    model = built(Plain)
    axis = LoopbackCommunicator(2)
    with pytest.raises(ValueError, match=f"{inner.name} is an inner level of rounds"):
        dt.replicate(sgd(model), model, levels=[(axis, inner), (axis, dt.diloco(every=4))])


def placed(mesh):
    torch.manual_seed(mesh.get_rank())  # every rank starts elsewhere
    model = Plain()
    dt.shard(model, mesh)
    before = [local(p).detach().clone() for p in model.parameters()]
    dt.same_weights(model, mesh["replicate"])
    assert all(
        torch.equal(local(p), old) for p, old in zip(model.parameters(), before, strict=True)
    )
    torch.manual_seed(0)
    first = dict(Plain().named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor().detach(), first[name].detach(), atol=0, rtol=0)
    return dt.fingerprint(model, mesh)


def test_shard_gives_every_replica_the_weights_of_the_first_rank():
    results = worlds.run(placed, 2, 2)
    assert len(set(results)) == 1 and results[0][1]


def swapped_after_sharding(mesh):
    """Accelerate and the HF Trainer build the optimizer first, shard, then swap its parameters."""
    model = built(Plain)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for p in base.param_groups[0]["params"]]
    fully_shard(model, mesh=mesh["shard"])
    sharded = dict(model.named_parameters())
    base.param_groups[0]["params"] = [sharded[name] for name in order]
    train(model, optimizer, mesh.get_rank(), width=32)
    return dt.fingerprint(model, mesh)[1], optimizer.step_count


def test_an_optimizer_built_before_sharding_works():
    assert worlds.run(swapped_after_sharding, 2, 2) == [(True, STEPS)] * 4
