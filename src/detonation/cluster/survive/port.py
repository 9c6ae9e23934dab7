"""How the processes of an elastic axis find and reach each other. `Ways` chooses the addresses on
which a process listens. `Port` shows other ranks whether the process is alive and reachable.
`meet_at` waits at the start until all ranks have met.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.cluster.interface import (
    LOOPBACK,
    Way,
    find_way,
    listener_at,
    loopback_id,
    source_addresses,
    way_over,
)
from detonation.cluster.position import joined_address
from detonation.cluster.processes.claims import Claim, this_process
from detonation.cluster.processes.refusal import RefusedStart, refusals
from detonation.cluster.processes.rendezvous import asked_interface, describe_ways
from detonation.cluster.survive.agreement import (
    GONE,
    SIZE,
    ReplicaLost,
    axis_key,
    latest_axis,
    latest_members,
    next_axis_store,
    pace_of,
    ranks_of_replicas,
)

_MEET_S = 10.0
_PRESENT_S = 1.0
_REPLICATE = "replicate"
RUNNING_S = 10.0
"""A rank that waits in a store for its own start gives up after another run has sent heartbeats to
this store for this many seconds.
"""
KNOCK_S = 0.2
"""Seconds for which a rank waits for an answer on the port of another rank. The rank ignores a
later answer.
"""


class Port:
    """A port that shows other ranks whether this process exists. The operating system answers on
    the port as long as the process exists, even if the process is busy.

    The port is on the interface for messages between replicas: the interface that is set for gloo,
    or else the interface that leads to the store.

    name: "HOST PORT" for other ranks; empty if processes do not reach the store over a network.
    """

    def __init__(self, store: Store) -> None:
        self.name = ""
        self._listener: socket.socket | None = None
        # workers of a data loader may outlive this process, and must not keep its port open
        os.register_at_fork(after_in_child=self.close)
        host, _ = store_host(store)
        with contextlib.suppress(OSError):
            here = _address_towards(host)
            if not here:
                return
            self._listener = listener_at(here, 0)
            self._listener.setblocking(False)
            self.name = f"{here} {self._listener.getsockname()[1]}"

    def answer(self) -> None:
        """Closes the connections of ranks that have tested whether this process exists."""
        with contextlib.suppress(OSError):
            while self._listener:
                self._listener.accept()[0].close()

    def close(self) -> None:
        """Stops listening, so that the operating system refuses connections to the port."""
        if self._listener:
            self._listener.close()


def _address_towards(host: str) -> str:
    """Returns the address at which this machine receives messages of other replicas: the address
    from which it reaches the store at `host`. Returns "" if there is no such address.
    """
    asked = asked_interface(os.environ)
    if asked and asked != LOOPBACK:
        return way_over(asked, host).address
    if host:
        return next(source_addresses(host), "")
    return ""


def knock(name: str, patience_s: float = KNOCK_S) -> bool | None:
    """Tests whether the process at the port `name` exists. Returns True if the process accepts a
    connection, False if its host refuses the connection, None if no answer comes within
    `patience_s` seconds.
    """
    host, _, port = name.partition(" ")
    if not port:
        return None
    try:
        socket.create_connection((host, int(port)), timeout=patience_s).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def refuses(name: str) -> bool:
    """True if the host refuses connections to the port `name`, which means that the process with
    this port has ended.
    """
    return knock(name) is False


class Presence:
    """Finds out, for a process that is not a member, whether the replicas of a run still exist.

    A replica is gone if one of its ranks has left, has ended, or has sent no heartbeat for
    `silence_s`. The launcher or the operating system of a rank shows whether it has ended.
    replicas, shards: counts of replicas and shards at the start of the run.
    """

    def __init__(self, store: Store, replicas: int, shards: int, silence_s: float) -> None:
        self._store, self._replicas, self._shards = store, replicas, shards
        self._silence_s, self._asked = silence_s, -math.inf
        self._beats: dict[int, tuple[bytes, float]] = {}

    def require(self) -> None:
        """Raises `ReplicaLost` if no replica of the run exists any more. Asks the store at most
        once per second.
        """
        now = time.monotonic()
        if now - self._asked < _PRESENT_S:
            return
        members = latest_members(self._store, self._replicas)
        ranks = [ranks_of_replicas([member], self._shards) for member in members]
        if all(any(self._is_gone(rank) for rank in each) for each in ranks):
            host, port = store_host(self._store)
            where = f"met at {joined_address(host, port)}" if host else "met here"
            raise ReplicaLost(
                f"the run whose replicas {where} has ended: start it again, or give the address"
                " of a run that trains"
            )
        self._asked = time.monotonic()

    def _is_gone(self, rank: int) -> bool:
        if self._store.check([axis_key("left", rank)]):
            return True
        # a rank that has not sent its first heartbeat yet is not gone
        if not self._store.check([axis_key("beat", rank)]):
            return False
        now, beat = time.monotonic(), self._store.get(axis_key("beat", rank))
        seen, since = self._beats.get(rank, (b"", now))
        if beat != seen:
            since = now
        self._beats[rank] = (beat, since)
        if beat == GONE or now - since > max(self._silence_s, 4 * pace_of(beat)):
            return True
        key = axis_key("port", rank)
        return self._store.check([key]) and refuses(self._store.get(key).decode())


class Running:
    """Finds out whether another run already uses the store `base`. A rank that waits in this store
    for the start of its own run must then not start.

    base: the store in which all ranks of a run meet, and to which they send heartbeats.
    """

    def __init__(self, base: Store) -> None:
        self._base: Store = base.clone()  # type: ignore[attr-defined]  # a store for each thread
        self._beats: list[bytes] = []
        self._asked = -math.inf
        self._began = self._changed = -math.inf

    def look(self) -> None:
        """Raises `RefusedStart` if other processes have sent heartbeats to this store for
        `RUNNING_S`.
        """
        now = time.monotonic()
        if now - self._asked < _PRESENT_S:
            return
        self._asked = now
        beats = self._beats_of_others()
        changed = bool(self._beats) and not {*beats} <= {*self._beats}
        self._beats = beats
        if not changed:
            return
        pause_s = 4 * max([_PRESENT_S, *map(pace_of, beats)])
        # `_began` is the time of the first new heartbeats after a pause
        if now - self._changed > pause_s:
            self._began = now
        self._changed = now
        if now - self._began > RUNNING_S:
            raise RefusedStart(
                "a run trains at this store already: start this replica with --join to join"
                " that run, or start a new run at another store, or after the end of that run"
            )

    def _beats_of_others(self) -> list[bytes]:
        """Returns the heartbeats of the run that started last in this store; none if this process
        belongs to that run.
        """
        axis = latest_axis(self._base)
        if axis is None or axis.check([_member()]) or not axis.check([SIZE]):
            return []
        replicas, shards = map(int, axis.get(SIZE).split())
        ranks = ranks_of_replicas(latest_members(axis, replicas), shards)
        keys = [axis_key("beat", rank) for rank in ranks]
        return [axis.get(key) for key in keys if axis.check([key])]


def _member() -> str:
    return f"member/{this_process()}"


def meet_at(
    base: Store, replica: int, replicas: int, shard: int, shards: int
) -> tuple[Store, Callable[[], None]]:
    """Waits until all ranks of all replicas have met in the store `base`. Collective.

    Returns the part of `base` for the axis, and a function that raises `RefusedStart` if another
    replica cannot start. Raises `RefusedStart` if two replicas have the same number, or if they
    name different counts of replicas or shards.
    """
    rank = replica * shards + shard
    refused = refusals(base, replica, rank)
    claim = Claim(base, replica, replicas, shards, rank)
    running = Running(base)

    def look() -> None:
        refused()
        claim.look()

    def look_before() -> None:
        look()
        running.look()

    axis = next_axis_store(base, rank, replicas * shards, look_before, claim.offer)
    claim.hold(axis)
    axis.set(_member(), "")
    return axis, look


class Ways:
    """Chooses the address at which other ranks reach this rank: loopback if they all share this
    rank's loopback interface, otherwise the address on the interface that leads to the store.

    An interface that the user has chosen takes precedence. The exception is loopback in an
    environment variable. The process group inside a replica sets this variable, so the variable
    does not apply to ranks on other machines.
    """

    def __init__(self, store: Store, rank: int) -> None:
        host, port = store_host(store)
        self._store = store
        self._host = host
        self._name = joined_address(host, port)
        self._own = loopback_id()
        self._others: dict[int, str] = {}
        store.set(axis_key("loopback", rank), self._own)

    def to(self, ranks: Iterable[int]) -> Way | None:
        """Returns the route on which `ranks` reach this rank; None if gloo has to choose the route.

        Raises `ValueError` if no interface leads to the store.
        """
        if not self._host:
            return None
        asked = asked_interface(os.environ)
        if asked and asked != LOOPBACK:
            return way_over(asked, self._host)
        if all(self._loopback_of(rank) == self._own for rank in ranks):
            return Way(LOOPBACK, "127.0.0.1")
        return find_way(self._host)

    def line(self, way: Way) -> str:
        """Returns a log line that says on which interface this rank listens; "" if this interface
        is loopback.
        """
        if way.interface != LOOPBACK:
            return describe_ways([str(way)], self._name)
        return ""

    def _loopback_of(self, rank: int) -> str:
        if rank not in self._others:
            key = axis_key("loopback", rank)
            try:  # rank 0 may send its first heartbeat before it writes this key to the store
                self._store.wait([key], timedelta(seconds=_MEET_S))
                self._others[rank] = self._store.get(key).decode()
            except DistError:
                # the rank ended before it wrote this key: no process group with this rank will form
                return self._own
        return self._others[rank]


def store_host(store: Store) -> tuple[str, int]:
    """Returns the host and port of `store`. The host is "" if processes do not reach the store over
    a network.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "")), int(getattr(store, "port", 0))


def place_of_replica(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns the number of this rank's replica, and the number of replicas of `mesh`."""
    names = mesh.mesh_dim_names or ()
    if _REPLICATE not in names:
        raise ValueError(
            f'the mesh has the axes {names}, must have "replicate": name the axis between replicas'
            " so, or pass replica and replicas with the mesh of one replica"
        )
    return mesh.get_local_rank(_REPLICATE), mesh.size(names.index(_REPLICATE))


def place_in_replica(mesh: DeviceMesh | None, alone: bool) -> tuple[int, int]:
    """Returns the number of this rank in its replica, and the number of ranks of a replica. All
    axes of `mesh` except "replicate" are inside a replica.

    alone: True if `mesh` is the mesh of this replica alone.
    """
    if mesh is None:
        return 0, 1
    ranks = mesh.mesh
    if not alone:
        axis = (mesh.mesh_dim_names or ()).index(_REPLICATE)
        ranks = ranks.select(axis, mesh.get_local_rank(_REPLICATE))
    inside = ranks.flatten().tolist()
    return inside.index(dist.get_rank()), len(inside)
