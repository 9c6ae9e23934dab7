"""A DistributedDataParallel loop whose nodes exchange gradients in 4 bits: 2 nodes x 2 ranks on one machine.

torchrun --nproc-per-node 4 examples/ddp_hook.py
"""

import torch
import torch.distributed.fsdp  # before the process group: imported later, its caches would keep the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import detonation as dt


def train() -> None:
    mesh = dt.init_mesh(replicas=2, shards=2)  # the ranks of a node are neighbours
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)).to(mesh.device_type)
    model = DistributedDataParallel(network)
    hook = dt.comm_hook(model, dt.loco(), mesh)  # the only line that is new
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rotation = torch.linalg.qr(torch.randn(32, 32)).Q.to(mesh.device_type)
    torch.manual_seed(1 + mesh.get_rank())  # each rank draws its own data
    losses = []
    for _ in range(100):
        target = torch.randn(64, 32, device=mesh.device_type)
        loss = (model(target @ rotation) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    _, equal = dt.fingerprint(network, mesh)
    if mesh.get_rank() == 0:
        less = 100 * hook.dense_bytes / hook.stats.bytes_sent
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {less:.1f} times fewer bytes, replicas equal: {equal}"
        )


train()
dt.leave()  # here, after the last reference to the process group is gone
