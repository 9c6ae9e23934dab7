"""FlexDeMo in an FSDP2 loop: 2 replicas x 2 shards on one machine.

torchrun --nproc-per-node 4 examples/fsdp2_loop.py
"""

import torch
from torch import nn

import detonation as dt


class Model(nn.Module):
    """Residual layers that learn to invert a random rotation."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, width] -> [batch, width]
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def train() -> None:
    mesh = dt.init_mesh(replicas=2, shards=2)  # reads the environment of torchrun
    model = Model().to(mesh.device_type)
    dt.shard(model, mesh)  # FSDP2 inside the node; every replica starts from the same weights
    # Between the nodes, the signs of 4 DCT coefficients of each 64 coordinates of the momentum are exchanged.
    signs = dt.SignSGD(model.parameters(), lr=3e-3)
    optimizer = dt.replicate(
        signs, model, mesh["replicate"], dt.demo(precision="sign", error_feedback=False)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(64, 64)).Q.to(mesh.device_type)
    torch.manual_seed(1 + mesh.get_rank())  # each rank draws its own data
    losses = []
    for _ in range(100):
        target = torch.randn(32, 64, device=mesh.device_type)
        loss = (model(target @ rotation) - target).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    _, equal = dt.fingerprint(model, mesh)
    if mesh.get_rank() == 0:
        less = 100 * sum(optimizer.dense_bytes_by_level) / optimizer.stats.bytes_sent
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {less:.1f} times fewer bytes, replicas equal: {equal}"
        )


train()
dt.leave()  # here, after the last reference to the process group is gone
