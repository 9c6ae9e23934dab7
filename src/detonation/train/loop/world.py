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
from detonation.core.flat.layout import digest
from detonation.core.integrity import readback
from detonation.core.link.communicator import Wire
from detonation.core.replicator.overlap import Side

Told = Callable[[], list[list[Any]]]
"""Waits for what everyone told, a list each, in rank order."""


class World(Protocol):
    """All ranks of a run. Its methods are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def tell(self, values: Tensor) -> Told:
        """Everyone's `values`, to be asked for later: until then neither host nor device waits."""  # [n]
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
        self._hosts = mesh.get_group("shard")
        if dist.get_backend(self._hosts) != "gloo":
            # counts of the host go from host to host: a device would first finish all that it has been given
            self._hosts, _ = dist.new_subgroups(mesh["shard"].size(), backend="gloo")  # type: ignore[no-untyped-call]

    def tell(self, values: Tensor) -> Told:
        self._side.follow(values)
        with self._side.current():
            everyone = [torch.empty_like(values) for _ in range(self.size)]
            work = dist.all_gather(everyone, values, async_op=True)
            if not readback.late(values.device):
                return partial(_arrived, work, everyone)
            work.wait()  # the stream does
            return readback.Later(torch.stack(everyone)).read

    def over_shards(self, count: int) -> int:
        total = torch.tensor(count)
        dist.all_reduce(total, group=self._hosts)
        return int(total)

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        return dt.fingerprint(model, self._mesh)


class Alone:
    """Replicas that are whole, of one shard each, and joined by a wire alone: those of a simulation."""

    def __init__(self, wire: Wire) -> None:
        self.rank, self.size, self._wire = wire.replica, wire.size(), wire

    def tell(self, values: Tensor) -> Told:
        arrived = self._wire.gather(values.contiguous().view(torch.uint8))
        return lambda: arrived().view(values.dtype).tolist()

    def over_shards(self, count: int) -> int:
        return count

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        mine = torch.tensor(list(bytes.fromhex(digest(model.parameters()))), dtype=torch.uint8)
        digests = [bytes(told) for told in self.tell(mine)()]
        return hashlib.sha256(digests[0]).hexdigest(), all(other == digests[0] for other in digests)


def _arrived(work: dist.Work, everyone: list[Tensor]) -> list[list[Any]]:
    work.wait()
    return [values.tolist() for values in everyone]
