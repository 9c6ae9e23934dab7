"""World: who takes part in a run, as one of them sees it, and what the training loop asks of the others."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
from detonation.core import later
from detonation.core.flat import digest
from detonation.core.overlap import Side
from detonation.core.wire import Wire

Told = Callable[[], list[list[Any]]]
"""Waits for what everyone told, in rank order."""


class World(Protocol):
    """All ranks of a run. Its methods are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: Tensor) -> Tensor:
        """Everyone's `values`, in rank order."""  # [n] -> [size, n]
        ...

    def tell(self, values: Tensor) -> Told:
        """The same as lists, to be asked for later: until then neither host nor device waits."""
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
        self._mesh, self._side = mesh, Side(device)
        # counts of the host go from host to host: a device would first finish all that it has been given
        shards = mesh["shard"].size()
        self._hosts: dist.ProcessGroup | None = None
        if shards > 1:
            self._hosts, _ = dist.new_subgroups(shards, backend="gloo")  # type: ignore[no-untyped-call]

    def gather(self, values: Tensor) -> Tensor:
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def tell(self, values: Tensor) -> Told:
        self._side.follow(values)
        with self._side.current():
            everyone = [torch.empty_like(values) for _ in range(self.size)]
            work = dist.all_gather(everyone, values, async_op=True)
            if not later.late(values.device):
                return partial(_arrived, work, everyone)
            work.wait()  # the stream does
            return later.Later(torch.stack(everyone)).read

    def over_shards(self, count: int) -> int:
        total = torch.tensor(count)
        if self._hosts is not None:
            dist.all_reduce(total, group=self._hosts)
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

    def tell(self, values: Tensor) -> Told:
        raw = values.contiguous().view(torch.uint8)
        arrived = self._wire.gather(raw)
        return lambda: arrived().view(values.dtype).tolist()

    def over_shards(self, count: int) -> int:
        return count

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        mine = torch.tensor(list(bytes.fromhex(digest(model.parameters()))), dtype=torch.uint8)
        digests = [bytes(row.tolist()) for row in self.gather(mine)]
        return hashlib.sha256(digests[0]).hexdigest(), all(other == digests[0] for other in digests)


def _arrived(work: dist.Work, everyone: list[Tensor]) -> list[list[Any]]:
    work.wait()
    return [values.tolist() for values in everyone]
