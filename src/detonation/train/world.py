"""World: who takes part in a run, as one of them sees it, and what the training loop asks of the others."""

import hashlib
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
from detonation.core.flat import digest
from detonation.core.wire import Wire


class World(Protocol):
    """All ranks of a run. Its methods are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: Tensor) -> Tensor:
        """Everyone's `values`, in rank order."""  # [n] -> [size, n]
        ...

    def over_shards(self, count: int) -> int:
        """The sum of `count` over the shards of this rank's replica."""
        ...

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        """A hash of the first replica's parameters, and whether all replicas are bitwise equal to it."""
        ...


class Ranks:
    """The processes of a mesh ("replicate", "shard")."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._mesh, self._device = mesh, device

    def gather(self, values: Tensor) -> Tensor:
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def over_shards(self, count: int) -> int:
        total = torch.tensor(count, dtype=torch.int64, device=self._device)
        if self._mesh["shard"].size() > 1:
            dist.all_reduce(total, group=self._mesh.get_group("shard"))
        return int(total)

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        return dt.fingerprint(model, self._mesh)


class Alone:
    """Replicas that are whole, of one shard each, and joined by a wire alone: those of a simulation."""

    def __init__(self, wire: Wire) -> None:
        self.rank, self.size, self._wire = wire.replica, wire.size(), wire

    def gather(self, values: Tensor) -> Tensor:
        raw = values.contiguous().view(-1).view(torch.uint8)
        return self._wire.gather(raw)().view(values.dtype).view(self.size, *values.shape)

    def over_shards(self, count: int) -> int:
        return count

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        mine = torch.tensor(list(bytes.fromhex(digest(model.parameters()))), dtype=torch.uint8)
        digests = [bytes(row.tolist()) for row in self.gather(mine)]
        return hashlib.sha256(digests[0]).hexdigest(), all(other == digests[0] for other in digests)
