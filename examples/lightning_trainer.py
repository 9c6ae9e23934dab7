"""A LightningModule, sharded inside each replica, whose replicas exchange gradients in 4 bits: 2 replicas x 2 shards.

torchrun --nproc-per-node 4 examples/lightning_trainer.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import detonation as dt
from detonation.integrations.lightning import ReplicaStrategy


class Inverter(LightningModule):
    """Learns to invert a random rotation. Nothing in it knows of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # [batch, 32] each -> []
        rotated, target = batch
        loss = (self.net(rotated) - target).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train() -> None:
    seed_everything(0, verbose=False)
    rotation, target = torch.linalg.qr(torch.randn(32, 32)).Q, torch.randn(4096, 32)
    strategy = ReplicaStrategy(replicas=2, shards=2, scheme=dt.loco())
    trainer = Trainer(devices=4, strategy=strategy, max_steps=100, gradient_clip_val=1.0, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    module = Inverter()
    trainer.fit(module, DataLoader(TensorDataset(target @ rotation, target), batch_size=32))

    (optimizer,) = strategy.replicated
    _, equal = dt.fingerprint(module, strategy.device_mesh)
    if trainer.is_global_zero:
        less = 100 * sum(optimizer.dense_bytes_by_level) / optimizer.stats.bytes_sent
        losses = module.losses
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {less:.1f} times fewer bytes, replicas equal: {equal}"
        )


train()
