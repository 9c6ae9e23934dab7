"""Stages of a pipeline: ranks of a replica that hold other parameters, each with an optimizer of its own."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import detonation as dt
import worlds
from detonation.cluster.survive.port import place_in_replica, place_of_replica
from detonation.core.flat.tensors import digest
from limits import LIMIT_S

SCHEME = dt.demo(topk=2, chunk=8)


def staged(mesh, axes=("replicate", "pipe")):
    """A mesh of replicas and stages, and this rank's stage: the two stages have other shapes."""
    pipes = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    torch.manual_seed(0)
    return pipes, nn.Linear(8, 4 + pipes.get_local_rank("pipe"))


def steps_of(model, optimizer, steps):
    for step in steps:
        numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8, generator=numbers)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_an_elastic_axis(mesh):
    pipes, model = staged(mesh)
    axis = dt.elastic(pipes, timeout_s=LIMIT_S)
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, axis, SCHEME)
    steps_of(model, optimizer, range(2))
    optimizer.synchronize()
    axis.close()
    return axis.size(), digest(model.parameters())


def test_an_elastic_axis_needs_no_axis_of_a_certain_name_inside_a_replica():
    found = worlds.run_alone(on_an_elastic_axis, 2, 2)
    assert found[:2] == found[2:] and found[0] != found[1]
    assert {size for size, _ in found} == {2}


def places(mesh, names):
    """This rank's place in a mesh of all replicas, and in the mesh of one replica."""
    pipes = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    own, replicas = place_of_replica(pipes)
    alone = pipes[tuple(name for name in names if name != "replicate")]
    return own, replicas, place_in_replica(pipes, False), place_in_replica(alone, True)


def test_all_axes_but_that_of_the_replicas_are_inside_a_replica():
    found = worlds.run(places, 2, 2, ("replicate", "shard", "pipe"))
    assert found == [(r, 2, (s, 2), (s, 2)) for r in (0, 1) for s in (0, 1)]
    found = worlds.run(places, 2, 2, ("pipe", "shard", "replicate"))
    assert found == [(r, 2, (s, 2), (s, 2)) for s in (0, 1) for r in (0, 1)]


def test_a_mesh_without_an_axis_of_replicas_is_refused():
    with pytest.raises(ValueError, match=r"axes \('pipe',\), must have \"replicate\": name the"):
        dt.elastic(SimpleNamespace(mesh_dim_names=("pipe",)))


def saved_by_hand(mesh, folder):
    """What save_checkpoint says to a stage; and whether states that each rank keeps itself continue the same bits."""
    pipes, model = staged(mesh)
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, pipes["replicate"], SCHEME)
    steps_of(model, optimizer, range(3))
    with pytest.raises(dt.errors.NotSaved) as refused:
        dt.save_checkpoint(folder, model, optimizer)
    states = model.state_dict(), base.state_dict(), dt.replica_state(optimizer)
    of_model, of_base, of_replica = copy.deepcopy(states)
    steps_of(model, optimizer, range(3, 6))

    _, again = staged(mesh)
    again.load_state_dict(of_model)
    base = torch.optim.AdamW(again.parameters(), lr=0.1)
    base.load_state_dict(of_base)
    optimizer = dt.replicate(base, again, pipes["replicate"], SCHEME)
    dt.load_replica_state(optimizer, of_replica)
    steps_of(again, optimizer, range(3, 6))
    equal = digest(model.parameters()) == digest(again.parameters())
    return str(refused.value), equal, optimizer.step_count


def test_stages_are_not_saved_as_a_checkpoint_and_resume_from_states_of_each_rank(tmp_path):
    for text, equal, steps in worlds.run(saved_by_hand, 2, 2, tmp_path):
        assert "4 ranks save a state of 2 replicas x 1 shards" in text
        assert "; stages of a pipeline cannot be saved in this way: save the states of" in text
        assert equal and steps == 6
    assert not [*tmp_path.iterdir()]


def joined_as_a_node(mesh):
    pipes, model = staged(mesh)
    axes = {"axis": pipes["replicate"], "scheme": SCHEME, "intra_node": pipes["pipe"]}
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, **axes)
    try:
        optimizer.set_up()
    except dt.errors.Mismatch as error:
        return str(error)


def test_stages_as_an_axis_inside_the_node_are_refused():
    for text in worlds.run(joined_as_a_node, 2, 2):
        assert "replica 0 local rank 1 has weight (shape)=" in text
        assert text.endswith("; leave intra_node out if the ranks of a node hold other parameters")
