"""Two stages of a pipeline in each of two replicas, DiLoCo between the replicas of each stage.

torchrun --nproc-per-node 4 examples/pipeline_stages.py
"""

import torch
import torch.distributed.fsdp  # before the process group: imported later, its caches would keep the group alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import detonation as dt


def train() -> None:
    device = dt.init_mesh(
        replicas=2
    ).device_type  # joins the world of torchrun, on one machine or several
    # Activations cross the inner axis at each micro-batch; DiLoCo crosses the outer one every ten steps.
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "pipe"))
    number, last = mesh.get_local_rank("pipe"), mesh.get_local_rank("pipe") == 1
    torch.manual_seed(0)
    halves = (
        nn.Sequential(nn.Linear(16, 64), nn.Tanh()),
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
    )
    model = halves[number].to(device)
    stage = PipelineStage(model, number, 2, torch.device(device), group=mesh.get_group("pipe"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    scheme = dt.diloco(every=10, outer_lr=0.7, outer_momentum=0.6)
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, mesh["replicate"], scheme
    )

    torch.manual_seed(
        1 + mesh.get_local_rank("replicate")
    )  # the stages of a replica see the same data
    losses: list[float] = []
    for _ in range(60):
        x = torch.randn(32, 16, device=device)
        micro: list[torch.Tensor] = []
        schedule.step(
            *([] if number else [x]), target=x.mean(1, keepdim=True) if last else None, losses=micro
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.extend(loss.detach().item() for loss in micro)

    optimizer.synchronize()
    _, equal = dt.fingerprint(model, mesh)
    if last and mesh.get_local_rank("replicate") == 0:
        print(f"loss {losses[0]:.2f} -> {sum(losses[-40:]) / 40:.2f}, replicas equal: {equal}")


train()
dt.leave()  # here, after the last reference to the process group is gone
