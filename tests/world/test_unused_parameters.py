"""Parameters that nobody used, in real worlds: over levels, in unequal nodes, on empty shards."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
import worlds
from detonation.core.flat.tensors import digest, local
from zoo import GRADIENT, HEADS, Heads, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def moved_parts(model, optimizer, step, heads):
    """The parts of the model that a step moves on this rank."""
    before = {part: digest(model.get_submodule(part).parameters()) for part in HEADS}
    model(batch(dist.get_rank(), step, 24), heads).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {p for p in HEADS if before[p] != digest(model.get_submodule(p).parameters())}


PLAN = [("a", "a", "b", "b"), ("a", "a", "a", "a"), ("b", "", "", ""), ("ab", "c", "b", "b")]
"""By step, the heads that each rank uses."""


def over_levels(mesh, schemes):
    racks = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("site", "rack"))
    model = built(Heads)
    levels = [(racks["rack"], schemes[0]), (racks["site"], schemes[1])]
    optimizer = dt.replicate(adamw(model), model, levels=levels)
    moved = [
        moved_parts(model, optimizer, step, heads[dist.get_rank()])
        for step, heads in enumerate(PLAN)
    ]
    return moved, digest(model.parameters())


EXPECTED = [{"trunk", *"".join(heads)} for heads in PLAN]


@pytest.mark.parametrize(
    "inner, outer", [("full", "demo"), ("demo", "full"), ("full", "demo-owner")]
)
def test_law_8_what_one_level_used_is_used_in_the_next(inner, outer):
    found = worlds.run(over_levels, 4, 1, [GRADIENT[inner], GRADIENT[outer]])
    assert all(moved == EXPECTED for moved, _ in found)
    assert len({weights for _, weights in found}) == 1


def of_unequal_nodes(_, name):
    """Nodes of two ranks and of one."""
    mesh = dt.init_mesh(shards=(2, 1), device="cpu")
    model = dt.shard(built(Heads), mesh)
    optimizer = dt.replicate(adamw(model), model, mesh["replicate"], GRADIENT[name])
    node = int(dist.get_rank() == 2)
    moved = [
        moved_parts(model, optimizer, step, heads[2 * node]) for step, heads in enumerate(PLAN)
    ]
    return moved, dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize("name", ["full", "demo", "demo-owner"])
def test_law_10_what_nobody_used_is_left_alone_by_nodes_of_different_sizes(name):
    expected = [{"trunk", *heads[0], *heads[2]} for heads in PLAN]
    for moved, equal in worlds.run_alone(of_unequal_nodes, 3, 1, name):
        assert moved == expected and equal


def of_shards(mesh, overlap):
    """A head whose only row is on the first shard."""
    model = built(Heads)
    model.register_parameter("single", torch.nn.Parameter(torch.ones(1, 24)))
    dt.shard(model, mesh)
    optimizer = dt.replicate(adamw(model), model, mesh["replicate"], dt.demo(topk=4, chunk=16))
    for step in range(3):
        loss = model(batch(mesh.get_rank(), step, 24), "ab")
        if overlap and step:
            with optimizer.overlap():
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        assert model.single.grad is None and model.d.weight.grad is None
        optimizer.zero_grad()
    state = optimizer.base.state
    return not state.get(model.single) and bool((local(model.single) == 1).all())


@pytest.mark.parametrize("overlap", [False, True])
def test_law_10_a_parameter_that_is_empty_on_some_shards_has_no_state_on_any(overlap):
    assert worlds.run(of_shards, 2, 2, overlap) == [True] * 4


def other_heads_in_a_node(mesh, first):
    """The error where the ranks of a node use other heads, from step `first` on."""
    model = dt.shard(built(Heads), mesh)
    safety = dt.Safety(verify_every=2)
    optimizer = dt.replicate(adamw(model), model, mesh["replicate"], dt.full(), safety=safety)
    rank = mesh.get_rank()
    for step in range(first):
        moved_parts(model, optimizer, step, "ab"[step % 2])
    try:
        moved_parts(model, optimizer, first, "ab"[rank])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("first", [0, 2])
def test_ranks_of_a_node_that_use_other_heads_are_refused_as_fsdp_mixes_their_gradients(first):
    texts = worlds.run(other_heads_in_a_node, 1, 2, first)
    for text, unused in zip(texts, "ba", strict=True):
        assert text.startswith(f"at step {first} the ranks of a node have gradients of different")
        assert (
            f"lacks ['{unused}.weight', '{unused}.bias', 'c.weight']" in text and "\n" not in text
        )
