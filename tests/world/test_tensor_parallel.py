"""Tensor parallelism changes no weight, also where the base optimizer reads this replica's own gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import detonation as dt
import worlds

BASES = {
    "SignSGD": lambda p: dt.SignSGD(p, lr=0.01),
    "SignSGD with momentum": lambda p: dt.SignSGD(p, lr=0.01, momentum=0.9),
    "Muon": lambda p: dt.Muon(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
SCHEMES = (
    lambda: dt.full(),
    lambda: dt.muloco(every=2, precision="fp32"),
    lambda: dt.none(),
)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, tokens):
        return self.down(self.up(self.norm(self.table(tokens))).tanh())


def plan(table):
    """The norm gets sums that no rank has added, and a table that is cut by rows a whole gradient."""
    return {
        "table": table(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }


def trained(base, scheme, mesh, layout):
    torch.manual_seed(0)
    model = Layers()
    if layout:
        parallelize_module(model, mesh["tensor"], layout)
    inner = BASES[base](model.parameters())
    optimizer = dt.replicate(inner, model, mesh["replicate"], scheme, intra_node=mesh["tensor"])
    for step in range(4):
        numbers = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("replicate"))
        out = model(torch.randint(0, 16, (4, 6), generator=numbers))
        whole = out.full_tensor() if isinstance(out, DTensor) else out
        whole.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model


def apart(_, base):
    """The largest distance between weights with and without tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    found = []
    for scheme in SCHEMES:
        whole = [*trained(base, scheme(), mesh, None).parameters()]
        for table in (ColwiseParallel, RowwiseParallel):
            model = trained(base, scheme(), mesh, plan(table))
            pairs = zip(model.parameters(), whole, strict=True)
            found.append(max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs))
    return found


@pytest.mark.parametrize("base", BASES)
def test_tensor_parallelism_changes_no_weight(base):
    for distances in worlds.run_alone(apart, 2, 2, base):
        assert max(distances) < 1e-5, distances
