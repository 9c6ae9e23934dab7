"""Two tiers of network: gradients averaged in full inside a rack, DiLoCo across racks. A plain, unsharded model.

torchrun --nproc-per-node 4 examples/diloco_two_tiers.py
"""

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # before the process group, which what it defines would otherwise keep for ever
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import detonation as dt


def train() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rack", "node"))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    for axis in ("node", "rack"):
        dt.same_weights(model, mesh[axis])

    levels = [(mesh["node"], dt.full()), (mesh["rack"], dt.diloco(every=10, outer_lr=0.7, outer_momentum=0.6))]
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-2), model, levels=levels)

    torch.manual_seed(1 + mesh.get_rank())
    losses = []
    for _ in range(100):
        x = torch.randn(32, 16)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    optimizer.settle()  # ends a round that is still open; here 100 is a multiple of 10
    _, equal = dt.fingerprint(model, mesh)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}, replicas equal: {equal}")


train()
dt.leave()  # when nothing holds the process group any more
