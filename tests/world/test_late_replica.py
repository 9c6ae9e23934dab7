"""A replica that computes for long, in a real world: the others go on after their patience, and nobody diverges."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d

import detonation as dt
import worlds
from detonation.core.flat.tensors import digest, local
from limits import LIMIT_S
from zoo import Plain, batch, built

STEPS = 10


def trained(mesh):
    """Replica 1 computes two of its gradients until replica 0 has taken that step, or the next one, too."""
    store = distributed_c10d._get_default_store()
    ahead = [0, 1]
    model = dt.shard(built(Plain), mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(adam, model, mesh["replicate"], dt.demo(), patience=0.02)
    replica, idle = mesh["replicate"].get_local_rank(), []
    for step in range(STEPS):
        if optimizer.idle:
            idle.append(step)
        else:
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
            if replica and step >= 2 and ahead:
                store.wait([f"{mesh['shard'].get_local_rank()} took {step + ahead.pop()}"], timedelta(seconds=LIMIT_S))
        optimizer.step()
        optimizer.zero_grad()
        store.set(f"{mesh.get_rank()} took {step}", "1")
    optimizer.verify()
    return digest([local(p) for p in model.parameters()]), idle, optimizer.stats.late


@pytest.mark.parametrize("shards", [1, 2])
def test_the_others_go_on_without_a_late_gradient(shards):
    ranks = worlds.run_alone(trained, 2, shards)
    for shard in range(shards):
        weights, idle, late = zip(*ranks[shard::shards], strict=True)
        assert len(set(weights)) == 1 and late[0] == late[1]
        assert late[0][1] >= 3  # a loaded machine may make anybody late once more, also in the last step
        assert late[0][1] - len(idle[1]) == (late[0][1] > len(idle[1]))


def saved(mesh, folder):
    """A checkpoint of a moment in which replica 1 is behind."""
    model = dt.shard(built(Plain), mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(adam, model, mesh["replicate"], dt.demo(), patience=1e6)
    for step in range(3):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        if step == 2 and mesh["replicate"].get_local_rank():
            optimizer._consensus.patience.answer(step)
        optimizer.step()
        optimizer.zero_grad()
    dt.save_checkpoint(folder, model, optimizer)
    return optimizer.idle


def loaded(mesh, folder):
    model = dt.shard(built(Plain), mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(adam, model, mesh["replicate"], dt.demo(), patience=1e6)
    dt.load_checkpoint(folder, model, optimizer)
    return optimizer.idle, optimizer.step_count


def test_a_checkpoint_knows_who_is_behind(tmp_path):
    assert worlds.run(saved, 2, 1, tmp_path) == [False, True]
    assert worlds.run(loaded, 2, 1, tmp_path) == [(False, 3), (True, 3)]
    assert worlds.run(loaded, 3, 1, tmp_path) == [(False, 3)] * 3
