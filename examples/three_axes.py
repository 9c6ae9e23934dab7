"""A layer over two tensor-parallel ranks, shards over two more, DeMo between two replicas: a mesh of three axes.

torchrun --nproc-per-node 8 examples/three_axes.py
"""

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # before the process group: imported later, its caches would keep the group alive
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import detonation as dt


class Block(nn.Module):
    """Two matrices: the first is cut by columns, the second by rows, so that one all-reduce joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(self.rise(x).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[1](self.layers[0](x)))


device = dt.init_mesh(
    replicas=2
).device_type  # joins the world of torchrun, on one machine or several
# The slowest link is the outermost axis, the fastest the innermost: neighbouring ranks are tensor-parallel.
mesh = init_device_mesh(device, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its part
model = Model().to(device)
for layer in model.layers:
    parallelize_module(
        layer, mesh["tensor"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()}
    )
dt.shard(model, mesh)
optimizer = dt.SignSGD(model.parameters(), lr=6e-3)
# Biases that are not cut along "tensor" are held whole there, and cross the slow link once.
optimizer = dt.replicate(
    optimizer, model, mesh["replicate"], dt.demo(topk=4, chunk=16), intra_node=mesh["tensor"]
)

torch.manual_seed(1 + mesh.get_rank() // 2)  # tensor-parallel ranks see the same data
losses = []
for _ in range(30):
    x = torch.randn(32, 16, device=device)
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
_, equal = dt.fingerprint(model, mesh)
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}, replicas equal: {equal}")
