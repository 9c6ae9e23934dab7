"""Verify: do all replicas hold the same weights."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.flat.layout import digest, local


def fingerprint(model: nn.Module, mesh: DeviceMesh) -> tuple[str, bool]:
    """A hash of the parameters of the first replica, and whether all replicas are bitwise equal to it. Collective.

    mesh: ("replicate", "shard"), over all ranks. The hash (sha256, hex) depends on the number of shards.
    """
    mine = bytes.fromhex(digest(model.parameters()))
    device = next(local(p).device for p in model.parameters())
    buffer = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(buffer) for _ in range(mesh.size())]
    dist.all_gather(everyone, buffer)
    digests = [bytes(b.tolist()) for b in everyone]
    replicas = [[digests[rank] for rank in row] for row in mesh.mesh.tolist()]
    return hashlib.sha256(b"".join(replicas[0])).hexdigest(), all(replica == replicas[0] for replica in replicas)
