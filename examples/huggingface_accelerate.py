"""A loop of Accelerate, with gradients in 4 bits between nodes: 2 replicas x 2 GPUs.

torchrun --nproc-per-node 4 examples/huggingface_accelerate.py
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import detonation as dt
from detonation.integrations.huggingface import Replicas, prepare, replicated


def train() -> None:
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap"
        ),
        parallelism_config=Replicas(
            dp_replicate_size=2, dp_shard_size=2
        ),  # neighbouring ranks share a replica
        gradient_accumulation_steps=2,
    )
    torch.manual_seed(0)  # every rank starts from the same weights
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    rotation = torch.linalg.qr(torch.randn(32, 32)).Q
    x = torch.randn(8192, 32)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x @ rotation), batch_size=32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=128)
    # Between the replicas, gradients are exchanged in 4 bits, and their rounding errors are sent later.
    model, optimizer, loader, scheduler = prepare(
        accelerator, model, optimizer, loader, scheduler, scheme=dt.loco(), clip=1.0
    )

    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state("out/accelerate")  # load_state goes on, bit for bit

    inside = replicated(optimizer)
    _, equal = dt.fingerprint(model, accelerator.torch_device_mesh)
    less = inside.step_count * sum(inside.dense_bytes_by_level) / inside.stats.bytes_sent
    accelerator.print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {less:.1f} times fewer bytes, replicas equal: {equal}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    train()
