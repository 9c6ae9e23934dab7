"""Two network tiers: full gradient averaging inside a rack, DiLoCo between racks; the model is not sharded.

torchrun --nproc-per-node 4 examples/diloco_two_tiers.py
"""

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # before the process group: imported later, its caches would keep the group alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import detonation as dt


def train() -> None:
    device = dt.init_mesh(
        replicas=4
    ).device_type  # joins the world of torchrun, on one machine or several
    # Ranks of a rack are neighbours, so the inner axis is the last.
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("rack", "node"))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    for axis in ("node", "rack"):
        dt.same_weights(model, mesh[axis])  # all replicas start from the weights of rank 0

    # From the innermost tier outwards.
    levels = [
        (mesh["node"], dt.full()),
        (mesh["rack"], dt.diloco(every=10, outer_lr=0.7, outer_momentum=0.6)),
    ]
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-2), model, levels=levels)

    torch.manual_seed(1 + mesh.get_rank())  # each rank draws its own data
    losses = []
    for _ in range(100):
        x = torch.randn(32, 16, device=device)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    optimizer.synchronize()  # ends an open round; there is none here, as 100 is a multiple of 10
    _, equal = dt.fingerprint(model, mesh)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}, replicas equal: {equal}")


train()
dt.leave()  # here, after the last reference to the process group is gone
