"""The place where replicas meet that may be lost: a store in a process that stays, such as the launcher."""

import signal
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from detonation.cluster.init import LaunchPosition, init_replica
from detonation.cluster.position import host_and_port
from detonation.cluster.processes.failure import Failure
from detonation.cluster.survive.agreement import EPOCH, axis_store, left_out, note_gone, parse_agreement

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Survival:
    """The wish of a launcher to go on when replicas are lost.

    Args:
        shards: Ranks of a replica, which are neighbours.
        min_replicas: With fewer left the world ends.
        address: "HOST:PORT" where the replicas meet; "" for a free port of this machine alone.
    """

    shards: int
    min_replicas: int
    address: str = ""


@dataclass(frozen=True)
class Place:
    """This replica's place in a run: where all meet, and its number there."""

    store: Store
    replica: int
    replicas: int


_place: Place | None = None


def place() -> Place | None:
    """The place of this process among replicas that may be lost, if it has one."""
    return _place


class MeetingPoint:
    """The store of a launcher. It listens at once, and answers from `serve` on: a process that forks has no threads."""

    def __init__(self, survival: Survival, replicas: int) -> None:
        self._survival, self._replicas = survival, replicas
        host, port = host_and_port(survival.address) if survival.address else ("127.0.0.1", 0)
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._store: Store | None = None
        self.lost: set[int] = set()

    def serve(self) -> None:
        """Answers from now on."""
        fd = self._listener.detach()
        self._store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=fd, use_libuv=True
        )

    def survives(self, failure: Failure) -> Collection[int]:
        """The ranks of the replica that `failure` takes along, where the others go on; none where they cannot."""
        replica = failure.rank // self._survival.shards
        if self._store is None or len(self._members() - {*self.lost, replica}) < self._survival.min_replicas:
            return ()
        self.lost.add(replica)
        first = replica * self._survival.shards
        ranks = range(first, first + self._survival.shards)
        for rank in ranks:
            note_gone(axis_store(self._store, 0), rank)
        return ranks

    def _members(self) -> set[int]:
        """The replicas by the latest agreement: some may have come in since the start."""
        assert self._store is not None
        store = axis_store(self._store, 0)
        epoch = int(store.get(EPOCH)) if store.check([EPOCH]) else 0
        return {*parse_agreement(epoch, store.get(f"{epoch}/record")).members} if epoch else {*range(self._replicas)}

    def left_out(self) -> list[int]:
        """The ranks of replicas without which the others go on."""
        if self._store is None:
            return []
        shards, store = self._survival.shards, axis_store(self._store, 0)
        lost = [replica for replica in range(self._replicas) if left_out(store, replica)]
        return [replica * shards + shard for replica in lost for shard in range(shards)]

    def close(self) -> None:
        """Answers no longer."""
        self._store = None
        self._listener.close()


def serve_meeting(address: str, tell: Callable[[str], None]) -> None:
    """Serves a store at `address` until a signal ends this process; `tell` gets the address once it answers."""
    point = MeetingPoint(Survival(1, 1, address), 0)
    point.serve()
    tell(f"{point.host}:{point.port}")
    signal.pause()


def join_replicas(position: LaunchPosition, host: str, port: int, shards: int) -> None:
    """Joins the process group of this rank's replica, whose launcher keeps the store at `host`, `port`."""
    store = TCPStore(host, port, timeout=_TIMEOUT)
    init_replica(position, store, shards)
    take_place(store, position.rank // shards, position.world_size // shards)


def meet_replicas(address: str, replica: int, replicas: int) -> None:
    """Takes the place of replica `replica`, a world of its own, at the store that somebody keeps at `address`."""
    host, port = host_and_port(address)
    take_place(TCPStore(host, port, timeout=_TIMEOUT), replica, replicas)


def take_place(store: Store, replica: int, replicas: int) -> None:
    """Notes the place of this process, for `place`."""
    global _place
    _place = Place(store, replica, replicas)
