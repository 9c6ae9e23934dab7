"""Texts from every rank to every rank, and the device that they travel on."""

import torch
import torch.distributed as dist
from torch import nn

from detonation.core.flat.tensors import local


def gather(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """All-gathers `text`: the texts of all ranks, by rank. Collective.

    Args:
        device: a device whose tensors the group's backend can send.
        group: over all ranks; by default the default group.
    """
    if dist.get_world_size() == 1:
        return [text]
    content = text.encode()
    count = torch.tensor([len(content)], device=device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count, group=group)
    longest = max(int(c) for c in counts)
    if not longest:
        return [""] * len(counts)
    buffer = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(buffer) for _ in counts]
    dist.all_gather(rows, buffer, group=group)
    return [bytes(row.tolist())[: int(c)].decode() for row, c in zip(rows, counts, strict=True)]


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters, which its process group can send from."""
    return next(local(parameter).device for parameter in model.parameters())
