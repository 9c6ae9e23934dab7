"""World: texts from every rank to every rank."""

import torch
import torch.distributed as dist
from torch import nn

from detonation.core.flat.layout import local


def gather(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """Everyone's `text`, by rank. Collective over all ranks."""
    if dist.get_world_size() == 1:
        return [text]
    mine = text.encode()
    count = torch.tensor([len(mine)], device=device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count, group=group)
    longest = max(int(c) for c in counts)
    if not longest:
        return [""] * len(counts)
    buffer = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(buffer) for _ in counts]
    dist.all_gather(rows, buffer, group=group)
    return [bytes(row.tolist())[: int(c)].decode() for row, c in zip(rows, counts, strict=True)]


def device_of(model: nn.Module) -> torch.device:
    """The device that holds the model: what its process group reads."""
    return next(local(parameter).device for parameter in model.parameters())
