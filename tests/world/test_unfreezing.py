"""Parameters that change during training: added, sharded, overlapped, in levels; and ranks that disagree on them."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

import detonation as dt
import worlds
from covering import covered, some
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest, local
from detonation.core.integrity.fault_counts import Desync
from detonation.core.link.link import Mismatch
from detonation.core.schemes import buckets
from steps import step_on
from worlds import caught
from zoo import SCHEMES, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

CHECKED = dt.Safety(verify_every=1)


def freeze(model, *prefixes):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix) for prefix in prefixes))


def start(axis, scheme, mesh=None, frozen=("layers.0",), **options):
    model = dt.shard(built(Plain), mesh) if mesh else built(Plain)
    freeze(model, *frozen)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, dt.replicate(base, model, axis, scheme, safety=CHECKED, **options)


def advance(model, optimizer, rank, steps, overlap=False):
    for step in steps:
        loss = model(batch(rank, step, 32)).mean()
        step_on(optimizer, loss, overlap)
        optimizer.zero_grad()


APART = {
    **{
        name: SCHEMES[name]
        for name in ("full", "demo", "demo-owner", "diloco", "streaming", "sparta")
    },
    "streaming-owner": dt.schemes.streaming_diloco(every=4, fragments=3, delay=2, link="owner"),
    "muloco-owner": dt.muloco(every=3, link="owner"),
}


def changing_apart(axis, scheme, who, when, frozen, overlap=False):
    """Some replicas freeze or unfreeze before step `when`."""
    model, optimizer = start(axis, scheme)
    advance(model, optimizer, axis.replica, range(when), overlap)
    if axis.replica in who:
        freeze(model, *frozen)
    return caught(advance, model, optimizer, axis.replica, range(when, when + 9), overlap)


@covered(
    "name, overlap, who, when, frozen",
    APART,
    [False, True],
    [(1,), (0, 2)],  # of two replicas and of three
    [2, 3, 4],
    [(), ("layers.0", "layers.1.bias")],
)
def test_ranks_that_disagree_all_hear_who_changed_what(
    name, overlap, who, when, frozen, monkeypatch
):
    monkeypatch.setattr(buckets, "SMALLEST", 4096)
    monkeypatch.setattr(buckets, "BUCKETS", 32)
    replicas = 1 + max(who)
    errors = simulate_replicas(
        lambda axis: changing_apart(axis, APART[name], who, when, frozen, overlap), replicas
    )
    (kind, text), *others = errors
    assert others == [(kind, text)] * (replicas - 1), errors
    changed = "layers.1.bias" if frozen else "layers.0.weight"
    # the owner that raises first may have heard one of the two alone
    owned = (" 2", "s 0, 2") if "owner" in name else ("s 0, 2",)
    said = [f"replica{heard} began" in text for heard in ((" 1",) if replicas == 2 else owned)]
    assert kind == Desync.__name__ and any(said)
    assert f"began or ceased to train {changed}, but the other replicas did not" in text


def changing_otherwise(axis):
    """Both change, to different sets."""
    model, optimizer = start(axis, dt.demo(topk=4, chunk=16))
    advance(model, optimizer, axis.replica, range(2))
    freeze(model, "layers.0.bias") if axis.replica else freeze(model)
    return caught(advance, model, optimizer, axis.replica, range(2, 4))


def test_replicas_that_change_differently_are_told_the_difference():
    for kind, text in simulate_replicas(changing_otherwise, 2):
        assert kind == Mismatch.__name__
        assert (
            "replica 1 has layers.0.bias (trained)=nothing, replica 0 has layers.0.bias (trained)=(64,)"
            in text
        )
        assert "Before step 2 freeze" in text


def unequal_joining(axis):
    model, optimizer = start(axis, dt.demo(topk=4, chunk=16))
    advance(model, optimizer, axis.replica, range(2))
    freeze(model)
    model.layers[0].bias.data += axis.replica
    return caught(advance, model, optimizer, axis.replica, range(2, 4))


def test_a_parameter_that_joins_must_be_equal():
    for kind, text in simulate_replicas(unequal_joining, 2):
        assert kind == Mismatch.__name__ and "replica 1 has layers.0.bias (weights)=" in text


def adding(axis, scheme):
    """A layer is added to the model, and to the optimizer, in the middle of the run."""
    model, optimizer = start(axis, scheme, frozen=())
    advance(model, optimizer, axis.replica, range(3))
    sent, before = optimizer.stats.bytes_sent, optimizer.stats.bytes_sent
    model.layers.append(nn.Linear(32, 32))
    with torch.no_grad():
        for parameter in model.layers[2].parameters():
            parameter.fill_(0.1)
    model.forward = lambda x: (
        model.layers[2](model.layers[1](model.layers[0](x).tanh())).square().mean(1)
    )
    optimizer.add_param_group({"params": model.layers[2].parameters(), "lr": 1e-2})
    advance(model, optimizer, axis.replica, range(3, 8))
    sent = optimizer.stats.bytes_sent
    optimizer.synchronize()
    moved = all(bool((p != 0.1).any()) for p in model.layers[2].parameters())
    return digest(model.parameters()), moved, sent > before


@pytest.mark.parametrize("name", ["full", "demo", "demo-owner", "diloco"])
def test_parameters_can_be_added_at_any_step(name):
    for replicas in (2, 3):
        found = simulate_replicas(lambda axis: adding(axis, SCHEMES[name]), replicas)
        assert found == [(found[0][0], True, True)] * replicas


def unlike_hybrid(mesh):
    """`full` with layers that freeze and unfreeze is torch's hybrid sharding."""
    model, optimizer = start(mesh["replicate"], dt.full(), mesh, frozen=())
    plain = built(Plain)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step, frozen in enumerate(
        [["layers.0"], [], ["layers.1", "layers.0.bias"], ["layers.0"], []]
    ):
        freeze(model, *frozen)
        freeze(plain, *frozen)
        advance(model, optimizer, mesh.get_rank(), [step])
        sum(
            plain(batch(rank, step, 32)).mean() / mesh.size() for rank in range(mesh.size())
        ).backward()
        adamw.step()
        adamw.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((mine.full_tensor() - its).detach().abs().max()) for mine, its in pairs)


def test_full_with_parameters_that_change_is_hybrid_sharding():
    assert max(worlds.run(unlike_hybrid, 2, 2)) < 1e-6


def unfreezing(mesh, how):
    """Shards, overlap, several levels and whole parameters: everyone trains it, and the replicas agree."""
    overlap = how == "overlap"
    if how == "levels":
        levels = [
            (mesh["shard"], dt.demo(topk=4, chunk=16)),
            (mesh["replicate"], dt.diloco(every=3)),
        ]
        model, optimizer = start(None, None, levels=levels)
    elif how == "intra_node":
        model, optimizer = start(
            mesh["replicate"], dt.demo(topk=4, chunk=16), intra_node=mesh["shard"]
        )
    else:
        scheme = dt.diloco(every=3) if how == "diloco" else dt.demo(topk=4, chunk=16)
        model, optimizer = start(mesh["replicate"], scheme, mesh)
    data = mesh.get_local_rank("replicate") if how == "intra_node" else mesh.get_rank()
    was = local(model.layers[0].weight).detach().clone()
    advance(model, optimizer, data, range(2), overlap)
    still = torch.equal(was, local(model.layers[0].weight))
    freeze(model, "layers.1.bias")
    advance(model, optimizer, data, range(2, 4), overlap)
    frozen = local(model.layers[1].bias).detach().clone()
    advance(model, optimizer, data, range(4, 6), overlap)
    still &= torch.equal(frozen, local(model.layers[1].bias))
    optimizer.synchronize()
    found, agree = dt.fingerprint(model, mesh)
    return still, not torch.equal(was, local(model.layers[0].weight)), agree, found


@pytest.mark.parametrize("how", ["demo", "overlap", "diloco", "levels", "intra_node"])
def test_parameters_join_and_leave_in_every_kind_of_world(how):
    first, *others = worlds.run(unfreezing, 2, 2, how)
    assert first[:3] == (True, True, True) and [rank[:3] for rank in others] == [first[:3]] * 3


@pytest.mark.long  # the bits of each scheme; the case `overlap` above is the path
def test_overlap_with_parameters_that_change_has_the_same_bits():
    assert worlds.run(unfreezing, 2, 2, "overlap") == worlds.run(unfreezing, 2, 2, "demo")


def disagreeing(mesh, scheme):
    """Both ranks of replica 1 freeze; all four ranks stop with the same words."""
    model, optimizer = start(mesh["replicate"], scheme, mesh, frozen=())
    rank = mesh.get_rank()
    advance(model, optimizer, rank, range(2))
    if mesh.get_local_rank("replicate") == 1:
        freeze(model, "layers.0.bias")
    return caught(advance, model, optimizer, rank, range(2, 9))


@pytest.mark.long_cases("diloco")
@some("name", ["full", "demo", "demo-owner", "diloco"], keep=["demo-owner", "diloco"])
def test_shards_of_replicas_that_disagree_all_stop(name):
    errors = set(worlds.run_alone(disagreeing, 2, 2, SCHEMES[name]))
    ((kind, text),) = errors
    assert (
        kind == Desync.__name__
        and "replica 1 began or ceased to train layers.0.bias, but the other" in text
    )


def one_shard_disagrees(mesh):
    """After backward: FSDP2 itself does not see it."""
    model, optimizer = start(mesh["replicate"], dt.demo(topk=4, chunk=16), mesh, frozen=())
    advance(model, optimizer, mesh.get_rank(), range(2))
    model(batch(mesh.get_rank(), 2, 32)).mean().backward()
    if mesh.get_local_rank("shard") == 1:
        freeze(model, "layers.0.bias")
    return caught(optimizer.step)


@pytest.mark.long  # no branch of its own
def test_shards_that_disagree_all_stop():
    for kind, text in worlds.run_alone(one_shard_disagrees, 2, 2):
        assert (
            kind == Desync.__name__
            and "began or ceased to train layers.0.bias, but the other replicas did not" in text
        )


@torch.no_grad()
def evaluate(model, reshards):
    """Leaves copies in the place of the shards, unless `reshards`."""
    model(batch(7, 7, 32))
    if reshards:
        model.reshard()


def sequential(mesh):
    """All parameters are those of the root, which FSDP2 keeps gathered."""
    first, last = built(Plain).layers
    return dt.shard(nn.Sequential(first, nn.Tanh(), last), mesh)


def turned_after_an_evaluation(mesh, name, frozen, by_group, reshards):
    """Which parts moved in each step, and the end, where the first layer is frozen or unfrozen after evaluations."""
    model = sequential(mesh)
    model[0].requires_grad_(not frozen)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], SCHEMES[name], safety=CHECKED)
    shards, moved = optimizer.param_groups[0]["params"], []
    for step in range(8):
        if step in (3, 6):  # 3: the evaluation comes first, 6: it comes between
            evaluate(model, reshards)
            for parameter in shards[:2] if by_group else model[0].parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        if step == 6:
            dt.fingerprint(model, mesh)
        before = [local(p).detach().clone() for p in shards]
        advance(model, optimizer, mesh.get_rank(), [step])
        moved.append(
            [not torch.equal(local(p), was) for p, was in zip(shards, before, strict=True)]
        )
    return moved, digest(shards)


@pytest.mark.long_cases("demo-False-True", "diloco-True-False")
@covered("name, frozen, by_group", ["full", "demo", "diloco"], [False, True], [False, True])
def test_what_is_set_after_an_evaluation_counts(name, frozen, by_group):
    ends = worlds.run(turned_after_an_evaluation, 2, 2, name, frozen, by_group, False)
    assert ends == worlds.run(turned_after_an_evaluation, 2, 2, name, frozen, by_group, True)
    if name == "full":
        turns = [frozen] * 3 + [not frozen] * 3 + [frozen] * 2
        assert [steps[1] for steps in ends[0][0]] == [not each for each in turns]


class Asked(nn.Sequential):
    """Trains by a method of its own, as those of `register_fsdp_forward_method`, before which no hooks run."""

    def loss(self, x):
        for layer in self:
            x = layer(x)
        return x.mean()


def trained_by_a_method(mesh, frozen, reshards):
    """Whether the first layer moved in each step, and the end; after evaluations it is frozen or unfrozen."""
    first, last = built(Plain).layers
    model = dt.shard(Asked(first, nn.Tanh(), last), mesh)
    register_fsdp_forward_method(model, "loss")
    model[0].requires_grad_(not frozen)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.full(), safety=CHECKED)
    shard, moved = optimizer.param_groups[0]["params"][0], []
    for step in range(8):
        if step in (3, 6):
            evaluate(model, reshards)
            for parameter in model[0].parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        before = local(shard).detach().clone()
        model.loss(batch(mesh.get_rank(), step, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(local(shard), before))
    return moved, digest(optimizer.param_groups[0]["params"])


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_set_after_an_evaluation_counts_where_a_method_of_its_own_trains(frozen):
    ends = worlds.run(trained_by_a_method, 2, 2, frozen, False)
    assert ends == worlds.run(trained_by_a_method, 2, 2, frozen, True)
    turns = [frozen] * 3 + [not frozen] * 3 + [frozen] * 2
    assert [not each for each in ends[0][0]] == turns


def adversaries(mesh, evaluates, toggles):
    """Two networks that are frozen in turns, by themselves or, as Lightning does, by the groups of their optimizers."""
    nets, optimizers = [sequential(mesh), sequential(mesh)], []
    for net in nets:
        base = torch.optim.AdamW(net.parameters(), lr=1e-3)
        optimizers.append(dt.replicate(base, net, mesh["replicate"], dt.loco(), safety=CHECKED))
    made, judge = nets
    shards = [optimizer.param_groups[0]["params"] for optimizer in optimizers]

    def require(which, value):
        for parameter in shards[which] if toggles else nets[which].parameters():
            parameter.requires_grad_(value)

    moved = []
    for step in range(4):
        noise, real = batch(mesh.get_rank(), step, 32), batch(mesh.get_rank(), 9 + step, 32)
        for mine, other in ((0, 1), (1, 0)):
            if evaluates:
                evaluate(nets[other], False)
            before = [[local(p).detach().clone() for p in each] for each in shards]
            require(other, False)
            fake = judge(made(noise)).mean()
            (fake if mine == 0 else judge(real).mean() - fake).backward()
            optimizers[mine].step()
            assert all(p.grad is None for p in shards[other])
            optimizers[mine].zero_grad()
            require(other, True)
            moved.append(
                [not torch.equal(local(s[0]), b[0]) for s, b in zip(shards, before, strict=True)]
            )
    return moved


@pytest.mark.parametrize(("evaluates", "toggles"), [(False, False), (True, False), (True, True)])
def test_networks_that_are_frozen_in_turns_train(evaluates, toggles):
    for moved in worlds.run(adversaries, 2, 1, evaluates, toggles):
        assert moved == [[True, False], [False, True]] * 4


def made_late(mesh, evaluates):
    """An optimizer and a group of it are made after evaluations."""
    model = sequential(mesh)
    if evaluates:
        evaluate(model, False)
    optimizer = dt.replicate(
        torch.optim.AdamW(model[0].parameters(), lr=1e-3), model, mesh["replicate"], dt.loco()
    )
    advance(model, optimizer, mesh.get_rank(), range(2))
    if evaluates:
        evaluate(model, False)
    optimizer.add_param_group({"params": model[2].parameters()})
    advance(model, optimizer, mesh.get_rank(), range(2, 4))
    return digest(p for group in optimizer.param_groups for p in group["params"])


def test_an_optimizer_and_a_group_may_be_made_after_an_evaluation():
    assert worlds.run(made_late, 2, 2, True) == worlds.run(made_late, 2, 2, False)
