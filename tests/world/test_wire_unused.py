"""Parameters that no rank uses, between nodes of a shard wire: nothing happens to them, as without one."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import detonation as dt
import worlds
from detonation.core.flat.tensors import digest, local
from detonation.wire.units import shard_state
from zoo import HEADS, Heads, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

PLAN = ["abc", "a", "b", "ab", "", "c"]
"""By step, the heads that all ranks use; of "ab" rank 0 uses the first alone, and the others the second."""


def heads_at(step):
    heads = PLAN[step % len(PLAN)]
    if heads == "ab":
        return heads[dist.get_rank() > 0]
    return heads


def everything(model, optimizer):
    """By part, the bits of all that a step may change."""
    found = {part: [] for part in HEADS}
    state = shard_state(model)
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        entries = optimizer.state.get(parameter, {})
        found[part].append(digest([parameter, *(entries[key] for key in sorted(entries))]))
        if f"residual.{name}" in state:
            found[part].append(digest([state[f"residual.{name}"]]))
        else:
            found[part].append(digest([torch.zeros(1, local(parameter).numel())]))
    return found


def changed(mesh, gradients, overlap):
    """By step, the parts of which something changed, and whether all ranks have the same gathered weights."""
    model = built(Heads)
    dt.shard(model, mesh, wire=dt.shard_wire(gradients=gradients, nodes=2))
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
    found = []
    for step in range(2 * len(PLAN)):
        before = everything(model, optimizer)
        with optimizer.overlap() if overlap else nullcontext():
            model(batch(dist.get_rank(), step, 24), heads_at(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = everything(model, optimizer)
        found.append({part for part in HEADS if before[part] != after[part]})
    return found, dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize("gradients", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_law_10_what_no_rank_used_is_left_alone_between_nodes(shape, gradients, overlap):
    for found, equal in worlds.run(changed, *shape, gradients, overlap):
        assert equal
        for step, parts in enumerate(found):
            assert parts == {"trunk", *PLAN[step % len(PLAN)]}, step
