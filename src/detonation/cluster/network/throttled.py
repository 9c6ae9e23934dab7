"""Throttled: a slow link between nodes that are processes of one machine, without root and on any system."""

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

from detonation.core.link.communicator import ProcessGroupCommunicator
from detonation.core.schemes.traffic import ring_bytes
from detonation.link_speed import LinkSpeed, hops

_WINDOW = 4096
"""The most exchanges of one rank that may be under way at once."""


class ThrottledCommunicator:
    """Slows the link of `axis` down to `speed`; takes the place of the axis in `replicate`.

    The ranks with the same coordinate on the axis are a node and share its link: their messages leave one after
    another, each after bytes / rate. An exchange ends when the messages of all peers have left, plus a latency per hop.
    Computation meanwhile counts, so overlap works as on a real link. Only the sending side is limited: in ring
    collectives a node receives as much as it sends.

    Collective: all ranks construct it together. `speed` may be set again between two steps. Raises `ValueError` where
    not all ranks are processes of this machine.
    """

    def __init__(
        self,
        axis: DeviceMesh,
        speed: LinkSpeed,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        world = dist.get_world_size()
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
            raise ValueError("a link can be emulated between processes of one machine only: leave --link out")
        self.replica, self.speed = axis.get_local_rank(), speed
        self._axis, self._group, self._clock, self._sleep = axis, ProcessGroupCommunicator(axis, own=True), clock, sleep
        self._peers = dist.get_process_group_ranks(axis.get_group())
        self._started = 0
        self._file, times = _shared_memory(8 * (axis.size() + world * _WINDOW), torch.device(axis.device_type))
        self._idle_from = times[: axis.size()]  # [nodes] float64: when all messages of each node will have left
        self._left = times[axis.size() :].view(world, _WINDOW)  # [ranks, exchanges]: when each message will have left

    def size(self) -> int:
        return self._group.size()

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        nbytes = ring_bytes("all-reduce", values.nbytes, self.size())
        return self._throttled(self._group.all_reduce, values, nbytes, hops("all-reduce", self.size()))

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        nbytes = ring_bytes("all-gather", len(mine), self.size())
        return self._throttled(self._group.all_gather, mine, nbytes, hops("all-gather", self.size()))

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        others = self.size() - 1
        return self._throttled(self._group.all_to_all, mine, len(mine) // self.size() * others, min(1, others))

    def _throttled(
        self, start: Callable[[Tensor], Callable[[], Tensor]], message: Tensor, nbytes: int, hops: int
    ) -> Callable[[], Tensor]:
        exchange = self._queue(nbytes)
        wait_for_result = start(message)

        def wait() -> Tensor:
            result = wait_for_result()
            # all peers have started this exchange, so each has recorded when its message leaves
            due = float(self._left[self._peers, exchange].max()) + self.speed.seconds(0, hops)
            while (early := due - self._clock()) > 0:
                self._sleep(early)
            return result

        return wait

    def _queue(self, nbytes: int) -> int:
        """Queues `nbytes` behind the messages that this node is sending, and records when they will have left.

        Returns the column of `_left` that belongs to this exchange, the same on all ranks.
        """
        exchange = self._started % _WINDOW
        self._started += 1
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self.replica)
        end = max(self._clock(), float(self._idle_from[self.replica])) + self.speed.seconds(nbytes, 0)
        self._idle_from[self.replica] = end
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self.replica)
        self._left[dist.get_rank(), exchange] = end
        return exchange


def _shared_memory(nbytes: int, device: torch.device) -> tuple[int, Tensor]:
    """A nameless file that all ranks have open, and its memory as float64 zeros. Collective."""
    path = torch.zeros(4096, dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        descriptor, name = tempfile.mkstemp(prefix="detonation-link-")
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
