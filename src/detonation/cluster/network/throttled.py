"""Emulates a slow link between processes of one machine, on any operating system and without
root.
"""

import fcntl
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.link import Communicator, ProcessGroupCommunicator
from detonation.core.schemes import hops, ring_bytes
from detonation.link_speed import LinkSpeed
from detonation.whole_files import opened

_WINDOW = 4096
"""Largest number of exchanges that a rank may have started but not finished."""


class NodeLink:
    """The slow link that all ranks of one node share. The link sends messages one after another,
    each in bytes / rate seconds.

    Construction is collective over the default process group, if there is one. The ranks of this
    group are spread over `nodes` nodes, and this rank is on the node with the number `node`.
    `speed` may change between two steps.
    """

    def __init__(
        self,
        speed: LinkSpeed,
        node: int = 0,
        nodes: int = 1,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed = speed
        self._node = node
        self._clock = clock
        self._sleep = sleep
        # [nodes] float64: for each node, the time at which its last message will have been sent
        self._file, self._idle_from = _shared_memory(8 * nodes, device or torch.device("cpu"))
        weakref.finalize(self, os.close, self._file)

    def leave(self, kind: str, sent: Tensor, replicas: int) -> float:
        """Puts the bytes of a collective into the queue behind the messages that this node still
        sends. Returns the time at which the last of these bytes will have been sent.
        """
        if kind == "all-to-all":
            nbytes = sent.nbytes // replicas * (replicas - 1)
        else:
            nbytes = ring_bytes(kind, sent.nbytes, replicas)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._node)
        end = max(self._clock(), float(self._idle_from[self._node])) + self.speed.seconds(nbytes, 0)
        self._idle_from[self._node] = end
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._node)
        return end

    def arrive(self, kind: str, left: Tensor, replicas: int, nbytes: int) -> None:
        """Waits until the messages of all replicas have arrived, each of `nbytes` bytes. `left`
        holds the time at which each replica has sent its message.
        """
        # the shape of `left` is [replicas], float64
        due = float(left.max()) + self.speed.seconds(0, hops(kind, replicas, nbytes))
        while (early := due - self._clock()) > 0:
            self._sleep(early)


class ThrottledCommunicator(NodeLink, Communicator):
    """Communicator that slows the link of `axis` down to `speed`. Pass the communicator to
    `replicate` instead of the axis.

    All ranks with the same coordinate on the axis form a node and share the link of the node. The
    link sends their messages one after another, each in bytes / rate seconds. An exchange ends when
    all peers have sent their messages and one latency per hop has passed. A rank can compute in the
    meantime, so communication overlaps with computation as on a real link. Only the sending side is
    limited, because in ring collectives a node receives as much as it sends.

    Construction is collective. Raises `ValueError` unless all ranks are processes of this machine.
    """

    def __init__(self, axis: DeviceMesh, speed: LinkSpeed) -> None:
        world = dist.get_world_size()
        device = torch.device(axis.device_type)
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            raise ValueError(
                "a link can be emulated between processes of one machine only: leave --link out"
            )
        self.replica = axis.get_local_rank()
        super().__init__(speed, self.replica, axis.size(), device)
        self._axis = axis
        self._group = ProcessGroupCommunicator(axis, own=True)
        self._peers = dist.get_process_group_ranks(axis.get_group())
        self._started = 0
        # [ranks, exchanges] float64: the time at which each message will have been sent
        file, left = _shared_memory(8 * world * _WINDOW, device)
        self._left = left.view(world, _WINDOW)
        os.close(file)  # the shared memory remains mapped after its file is closed

    def size(self) -> int:
        return self._group.size()

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return self._throttled("all-reduce", self._group.all_reduce, values)

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._throttled("all-gather", self._group.all_gather, mine)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._throttled("all-to-all", self._group.all_to_all, mine)

    def _throttled(
        self, kind: str, start: Callable[[Tensor], Callable[[], Tensor]], message: Tensor
    ) -> Callable[[], Tensor]:
        # all ranks use the same column of `_left` for this exchange
        exchange = self._started % _WINDOW
        self._left[dist.get_rank(), exchange] = self.leave(kind, message, self.size())
        self._started += 1
        wait_for_result = start(message)

        def wait() -> Tensor:
            result = wait_for_result()
            # every peer has started this exchange, so `_left` holds when its message is sent
            self.arrive(kind, self._left[self._peers, exchange], self.size(), message.nbytes)
            return result

        return wait


def _shared_memory(nbytes: int, device: torch.device) -> tuple[int, Tensor]:
    """Creates memory that all ranks share: a file that each rank maps. Removes the name of the
    file. Returns the descriptor of the file, and the memory as a float64 tensor of zeros.
    Collective.
    """
    path = torch.zeros(4096, dtype=torch.uint8, device=device)
    rank = -1
    if dist.is_initialized():
        rank = dist.get_rank()
    if rank <= 0:
        descriptor, name = tempfile.mkstemp(prefix="detonation-link-")
        os.truncate(descriptor, nbytes)
        os.close(descriptor)
        path[: len(name.encode())] = torch.tensor(list(name.encode()), dtype=torch.uint8)
    if rank >= 0:
        dist.broadcast(path, 0)
    name = bytes(path.tolist()).rstrip(b"\0").decode()
    descriptor = opened(Path(name), os.O_RDWR)
    memory = mmap.mmap(descriptor, nbytes)
    if rank >= 0:
        dist.barrier()
    if rank <= 0:
        Path(name).unlink()
    return descriptor, torch.frombuffer(memory, dtype=torch.float64)
