"""Emulation: a slow wire between nodes that are processes of one machine, without root and on any system."""

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.link.communicator import Group
from detonation.core.link.link_speed import Pace, hops
from detonation.core.schemes.traffic import sent

_WINDOW = 4096
"""Exchanges of one rank that may be on their way at once."""


class Emulated:
    """A wire that is no faster than `pace`, over one that is: it takes the place of the axis in `replicate`.

    The ranks at one place of the axis are a node and share what it can send: their messages leave one after another,
    each taking bytes / rate. An exchange is over when the messages of all peers have left, plus a latency a hop. What
    is computed meanwhile counts, so overlap works as on a real link. Only what a node sends is limited: in the ring
    collectives that are emulated it receives as much.

    All ranks must be processes of one machine and make it together (collective). Raises `ValueError` otherwise.
    """

    def __init__(
        self,
        axis: DeviceMesh,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        world = dist.get_world_size()
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
            raise ValueError("a link can be emulated between processes of one machine only: leave --link out")
        self.replica, self.pace = axis.get_local_rank(), pace
        self._group, self._clock, self._sleep = Group(axis), clock, sleep
        self._peers = dist.get_process_group_ranks(axis.get_group())
        self._count = 0
        self._file, times = _shared(8 * (axis.size() + world * _WINDOW), torch.device(axis.device_type))
        self._idle_from = times[: axis.size()]  # [nodes] float64: when what each node has sent will have left it
        self._left = times[axis.size() :].view(world, _WINDOW)  # [ranks, exchanges]: the same of single messages

    def size(self) -> int:
        return self._group.size()

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        nbytes = sent("all-reduce", values.nbytes, self.size())
        return self._paced(self._group.reduce, values, nbytes, hops("all-reduce", self.size()))

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        nbytes = sent("all-gather", len(mine), self.size())
        return self._paced(self._group.gather, mine, nbytes, hops("all-gather", self.size()))

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        others = self.size() - 1
        return self._paced(self._group.swap, mine, len(mine) // self.size() * others, min(1, others))

    def _paced(
        self, start: Callable[[Tensor], Callable[[], Tensor]], message: Tensor, nbytes: int, hops: int
    ) -> Callable[[], Tensor]:
        place = self._leave(nbytes)
        arrived = start(message)

        def wait() -> Tensor:
            result = arrived()
            # all peers have started this exchange, so each has written down when its message leaves
            due = float(self._left[self._peers, place].max()) + self.pace.seconds(0, hops)
            while (early := due - self._clock()) > 0:
                self._sleep(early)
            return result

        return wait

    def _leave(self, nbytes: int) -> int:
        """Queues `nbytes` behind what this node is sending, and writes down when they will have left."""
        place = self._count % _WINDOW
        self._count += 1
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self.replica)
        end = max(self._clock(), float(self._idle_from[self.replica])) + self.pace.seconds(nbytes, 0)
        self._idle_from[self.replica] = end
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self.replica)
        self._left[dist.get_rank(), place] = end
        return place


def _shared(nbytes: int, device: torch.device) -> tuple[int, Tensor]:
    """A file without a name that all ranks have open, and its memory as float64 zeros. Collective."""
    path = torch.zeros(4096, dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        descriptor, name = tempfile.mkstemp(prefix="detonation-wire-")
        os.truncate(descriptor, nbytes)
        os.close(descriptor)
        path[: len(name.encode())] = torch.tensor(list(name.encode()), dtype=torch.uint8)
    dist.broadcast(path, 0)
    name = bytes(path.tolist()).rstrip(b"\0").decode()
    descriptor = os.open(name, os.O_RDWR)
    memory = mmap.mmap(descriptor, nbytes)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(name).unlink()
    return descriptor, torch.frombuffer(memory, dtype=torch.float64)
