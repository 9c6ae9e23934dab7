"""The loss of one shard of a replica on an elastic axis, as the other shard sees it in a step."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import detonation as dt
import worlds
from detonation.cluster.processes.failure import is_network_error


def await_backward(mesh, step):
    """Waits for the backward of both shards, because a killed shard may take along what it has sent."""
    store = distributed_c10d._get_default_store()
    if store.add(f"backward {step}", 1) == mesh.size():
        store.set(f"both {step}", "")
    store.wait([f"both {step}"])


def step_without_the_other_shard(mesh, written):
    """Shard 1 is killed between backward and its second step; shard 0 writes what its own step raises."""
    model = nn.Linear(16, 4)
    dt.shard(model, mesh)
    axis = dt.elastic(mesh)
    base = torch.optim.AdamW(model.parameters())
    optimizer = dt.replicate(base, model, axis, dt.full(), clip=1.0)
    for step in range(2):
        model(torch.randn(8, 16)).square().mean().backward()
        await_backward(mesh, step)
        if mesh["shard"].get_local_rank() == step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
        except Exception as error:
            written.write_text(f"{type(error).__name__} {is_network_error(error)} {error}")


def test_the_step_of_the_other_shard_raises_that_its_replica_is_lost(tmp_path):
    with pytest.raises(AssertionError, match="rank 1:\nit ended without an answer"):
        worlds.run_alone(step_without_the_other_shard, 1, 2, Path(tmp_path, "end"))
    told = "ReplicaLost True replica 0 is lost, because a collective between its shards failed: "
    assert Path(tmp_path, "end").read_text().startswith(told)
