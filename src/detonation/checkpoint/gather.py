"""Texts from every rank to every rank, and the device that they travel on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from detonation.core.flat.tensors import local
from detonation.core.link.elastic_communicator import ElasticCommunicator, TextExchange
from detonation.core.optimizer.replicated import Replicated


@dataclass(frozen=True)
class Texts:
    """Texts between all ranks.

    Args:
        device: A device whose tensors the group's backend can send.
        group: Over all ranks; by default the default group.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank. Collective."""
        if self.world_size == 1:
            return [text]
        content = _encoded(text)
        count = torch.tensor([len(content)], device=self.device)
        counts = [torch.empty_like(count) for _ in range(self.world_size)]
        dist.all_gather(counts, count, group=self.group)
        longest = max(int(c) for c in counts)
        if not longest:
            return [""] * len(counts)
        buffer = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(buffer) for _ in counts]
        dist.all_gather(rows, buffer, group=self.group)
        return [_decoded(bytes(row.tolist())[: int(c)]) for row, c in zip(rows, counts, strict=True)]

    def broadcast(self, text: str) -> str:
        """The `text` of rank 0, on all ranks. Collective."""
        content = _encoded(text)
        if self.world_size == 1 or not (count := self._of_first([len(content)], torch.int64)[0]):
            return text if self.rank == 0 else ""
        # every rank needs a buffer of the same size; only that of rank 0 counts
        return _decoded(bytes(self._of_first(content.ljust(count)[:count], torch.uint8)))

    def _of_first(self, values: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The `values` of rank 0. Every rank has equally many."""
        tensor = torch.tensor(list(values), dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0, group=self.group)
        return tensor.tolist()


def elastic_axis(optimizer: Replicated) -> ElasticCommunicator | None:
    """The axis between the replicas of `optimizer`, if they may be lost."""
    found = (axis for axis, _ in optimizer.levels if isinstance(axis, ElasticCommunicator))
    return next(found, None)


def texts_between(model: nn.Module, optimizer: Replicated) -> TextExchange:
    """Texts between all ranks that train `model`: those of an elastic axis, or of the default group."""
    elastic = elastic_axis(optimizer)
    return elastic.texts() if elastic is not None else Texts(device_of(model))


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters, which its process group can send from."""
    return next(local(parameter).device for parameter in model.parameters())


def _encoded(text: str) -> bytes:
    """UTF-8; the name of a file may have bytes that are not."""
    return text.encode(errors="surrogateescape")


def _decoded(content: bytes) -> str:
    return content.decode(errors="surrogateescape")
