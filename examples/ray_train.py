"""Ray Train with gradients in 4 bits between nodes: 4 workers as 2 replicas x 2 shards. A failed run goes on by itself.

python examples/ray_train.py
"""

import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import detonation as dt


def train(config: dict[str, int]) -> None:
    """Learns to invert a random rotation. Runs in each worker, whose process group Ray has initialised."""
    mesh = dt.init_mesh(replicas=2, shards=config["workers"] // 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)).to(mesh.device_type)
    dt.shard(model, mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(adamw, model, mesh["replicate"], dt.loco(), clip=1.0)
    rotation = torch.linalg.qr(torch.randn(32, 32)).Q.to(mesh.device_type)

    if saved := ray.train.get_checkpoint():  # after a failure, and of an earlier run of this name
        with saved.as_directory() as folder:
            dt.load_checkpoint(folder, model, optimizer)
    for step in range(optimizer.step_count, config["steps"]):
        torch.manual_seed(1000 * mesh.get_rank() + step)  # each worker draws its own data
        target = torch.randn(32, 32, device=mesh.device_type)
        loss = (model(target @ rotation) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["every"] == 0:
            numbers = {
                "step": step + 1,
                "loss": loss.item(),
                "bytes_sent": optimizer.stats.bytes_sent,
            }
            numbers["equal"] = dt.fingerprint(model, mesh)[1]
            with (
                tempfile.TemporaryDirectory() as folder
            ):  # one for each worker; Ray puts their files together
                dt.save_checkpoint(folder, model, optimizer)
                ray.train.report(numbers, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    gpus = int(torch.cuda.is_available())
    trainer = TorchTrainer(
        train,
        train_loop_config={"workers": 4, "steps": 100, "every": 20},
        scaling_config=ScalingConfig(
            num_workers=4, use_gpu=gpus > 0, resources_per_worker={"CPU": 0.5, "GPU": gpus}
        ),
        run_config=RunConfig(
            name="rotation",
            storage_path=str(Path("out").resolve()),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    last = trainer.fit().metrics
    print(f"loss {last['loss']:.3f} after {last['step']} steps, replicas equal: {last['equal']}")
