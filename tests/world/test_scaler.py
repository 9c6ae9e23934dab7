"""Overflows under a GradScaler: `full` equals hybrid sharding bit for bit, whichever shard overflows."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import detonation as dt
import worlds
from detonation.core.flat.tensors import digest
from zoo import DEVICE, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

BAD = {0, 2, 3}
"""Steps in which some gradient overflows on all replicas."""


def trained(mesh, hybrid, whole):
    """The bits of weights and optimizer state, and the scale, after each step.

    whole: all gradients overflow; otherwise those of one bias on the second shard of each replica.
    """
    model = built(Plain)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh if hybrid else mesh["shard"])
    base = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = base
    if not hybrid:
        safety = dt.Safety(non_finite="skip")
        optimizer = dt.replicate(base, model, mesh["replicate"], dt.full(), safety=safety)
    scaler, found = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10), []
    for step in range(5):
        loss = model(batch(dist.get_rank(), step, 32)).mean()
        scaler.scale(loss * torch.inf if whole and step in BAD else loss).backward()
        if not whole and step in BAD and mesh["shard"].get_local_rank() == 1:
            model.layers[1].bias.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = [value for entries in base.state.values() for value in entries.values()]
        found.append((digest([*model.parameters(), *state]), scaler.get_scale()))
    return found


def both(mesh, whole):
    return trained(mesh, True, whole), trained(mesh, False, whole)


@pytest.mark.parametrize("whole", [True, False], ids=["all", "one shard"])
def test_law_6_full_is_hybrid_sharding_where_gradients_overflow(whole):
    for hybrid, full in worlds.run(both, 2, 2, whole):
        assert hybrid == full
