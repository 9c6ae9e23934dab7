"""The axis between replicas, of which some may be lost while the others train on: its store, the
axis, its guests."""

import json
import platform
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from detonation.cluster.init import GROUP_TIMEOUT_S, LaunchPosition, end_alone, init_replica
from detonation.cluster.interface import listening_address
from detonation.cluster.network.throttled import ELSEWHERE, NodeLink
from detonation.cluster.position import host_and_port
from detonation.cluster.processes.failure import Failure
from detonation.cluster.processes.refusal import is_prepared, refusals
from detonation.cluster.processes.rendezvous import reached_store
from detonation.cluster.processes.waiting import WAIT_LINE_S, Awaited
from detonation.cluster.survive.agreement import (
    EPOCH,
    SIZE,
    Agreement,
    GuestEntry,
    RankReport,
    ReplicaLost,
    axis_key,
    axis_store,
    latest_axis_store,
    latest_members,
    next_axis_store,
    note_gone,
    parse_agreement,
    serve_one_axis,
    turn_of,
)
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.port import Presence
from detonation.cluster.survive.surviving import MOST_TRIES, SurvivingCommunicator
from detonation.link_speed import LinkSpeed

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Survival:
    """The wish of a launcher to go on when replicas of `shards` ranks are lost, while
    `min_replicas` are left.

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
    """The store of a launcher.

    It listens at once, and answers from `serve` on: a process that forks has no threads.
    """

    def __init__(self, survival: Survival, replicas: int) -> None:
        self._survival, self._replicas = survival, replicas
        host, port = host_and_port(survival.address) if survival.address else ("127.0.0.1", 0)
        host = listening_address(host)
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._store: Store | None = None
        self.lost: set[int] = set()

    def serve(self) -> None:
        """Answers from now on."""
        fd = self._listener.detach()
        self._store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=fd,
            use_libuv=True,
        )
        if self._replicas:
            serve_one_axis(self._store)

    def survives(self, failure: Failure) -> Collection[int]:
        """The ranks of the replica that `failure` takes along, where the others go on; none where
        they cannot.

        A fault of set-up ends all.
        """
        replica = failure.rank // self._survival.shards
        if failure.bad_input and not self._is_prepared(failure.rank):
            return ()
        if (
            self._store is None
            or len(self._members() - {*self.lost, replica}) < self._survival.min_replicas
        ):
            return ()
        self.lost.add(replica)
        first = replica * self._survival.shards
        ranks = range(first, first + self._survival.shards)
        for rank in ranks:
            note_gone(axis_store(self._store, 0), rank)
        return ranks

    def _is_prepared(self, rank: int) -> bool:
        return self._store is not None and is_prepared(axis_store(self._store, 0), rank)

    def _members(self) -> set[int]:
        """The replicas by the latest agreement: some may have come in since the start."""
        assert self._store is not None
        return {*latest_members(axis_store(self._store, 0), self._replicas)}

    def has_left(self, rank: int) -> bool:
        """True where `rank` was asked to leave before the others, and has."""
        return self._store is not None and axis_store(self._store, 0).check(
            [axis_key("asked", rank)]
        )

    def left_out(self) -> list[int]:
        """The ranks of replicas without which the others go on."""
        members, shards = (
            self._members() if self._store else {*range(self._replicas)},
            self._survival.shards,
        )
        ranks = range(self._replicas * shards)
        return [rank for rank in ranks if rank // shards not in members and not self.has_left(rank)]

    def close(self) -> None:
        """Answers no longer."""
        self._store = None
        self._listener.close()


def serve_meeting(address: str, tell: Callable[[str], None]) -> NoReturn:
    """Serves a store at `address` until a signal ends this process; `tell` gets the address once it
    answers."""
    point = MeetingPoint(Survival(1, 1, address), 0)
    point.serve()
    tell(f"{point.host}:{point.port}")
    while True:  # a handler that returns is not the end: another thread may be about to end this
        signal.pause()


def join_replicas(position: LaunchPosition, host: str, port: int, shards: int) -> None:
    """Joins the process group of this rank's replica, whose launcher keeps the store at `host`,
    `port`."""
    store = TCPStore(host, port, timeout=_TIMEOUT)
    init_replica(position, store, shards)
    take_place(store, position.rank // shards, position.world_size // shards)


def meet_replicas(address: str, replica: int, replicas: int) -> None:
    """Takes the place of replica `replica`, a world of its own, at the store that somebody keeps at
    `address`."""
    take_place(reached_store(*host_and_port(address)), replica, replicas)


def take_place(store: Store, replica: int, replicas: int) -> None:
    """Notes the place of this process, for `place`."""
    global _place
    _place = Place(store, replica, replicas)


def elastic(
    mesh: DeviceMesh | None = None,
    *,
    replica: int | None = None,
    replicas: int | None = None,
    store: Store | None = None,
    min_replicas: int = 1,
    silence_s: float = 15.0,
    timeout_s: float = GROUP_TIMEOUT_S,
    end: Callable[[str], object] | None = None,
    link: str = "",
) -> SurvivingCommunicator:
    """The axis between replicas for `replicate`: training goes on when some of them are lost.
    Collective.

    A replica is lost with any of its ranks: killed, stopped, or cut off from the store. The others
    notice, agree on who is left, complete the interrupted exchange among themselves and go on in
    the same process, bitwise equal. From the next step on, means, votes and owners are those of the
    replicas that are left. A replica that comes to life after it was left out raises `ReplicaLost`.

    Args:
        mesh: ("replicate", "shard"), as of `init_mesh`; or the mesh of this replica alone, with
            `replica` and `replicas`; None for a replica of one rank. A mesh of one's own may have
            the tiers of several nodes, which levels inside this one join: they are lost together.
        replica: The number of this replica, from 0 to below `replicas`, where each replica is a
            world of its own.
        replicas: How many there are then.
        store: Where all ranks meet; by default the store of the default process group. Without it
            nobody can agree, so the process that keeps it must not be lost: under torchrun the
            agent of the first node, otherwise rank 0.
        min_replicas: From 1 to the number of replicas; with fewer left all raise `ReplicaLost`.
        silence_s: A rank that is silent for this long is lost, above 1. A killed rank's connections
            close at once.
        timeout_s: Seconds for which a collective waits for a rank that is alive.
        end: Called with the reason, in another thread, in a rank whose replica was left out and
            whose main thread waits for something else; by default it logs, and ends the process
            with code 1.
        link: Emulated speed of the links between replicas that are processes of one machine, such
            as "100mbit,5ms".

    Raises:
        ValueError: An argument is out of range, there is neither a mesh nor a store, or `link`
            joins machines.
        TimeoutError: Not all ranks came within the store's timeout.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
        >>> axis.size(), axis.losses
        (1, [])
        >>> axis.close()
    """
    shard, shards = (
        (0, 1) if mesh is None else (mesh["shard"].get_local_rank(), mesh["shard"].size())
    )
    if mesh is not None and replica is not None:
        shard, shards = mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()
    if mesh is not None and replica is None and replicas is None:
        replica, replicas = mesh["replicate"].get_local_rank(), mesh["replicate"].size()
    if replica is None or replicas is None or not 0 <= replica < replicas:
        raise ValueError(
            f"replica is {replica} of {replicas}, must be from 0 to below replicas; or pass a whole"
            " mesh"
        )
    if not 1 <= min_replicas <= replicas:
        raise ValueError(
            f"min_replicas is {min_replicas}, must be from 1 to the number of replicas, {replicas}"
        )
    if not silence_s > 1:
        raise ValueError(f"silence_s is {silence_s}, must be above 1")
    if store is None and mesh is None:
        raise ValueError(
            "replicas without a common process group need a store, such as"
            " torch.distributed.TCPStore"
        )
    speed = LinkSpeed.parse(link) if link else None
    base = store or distributed_c10d._get_default_store()
    look = refusals(base, replica, replica * shards + shard)
    membership = Membership(
        next_axis_store(base, replica * shards + shard, replicas * shards, look),
        replica,
        replicas,
        shard,
        shards,
        silence_s,
        min_replicas,
        end or end_alone,
        look=look,
    )
    try:
        link_here = _node_link(speed, membership, mesh)
        return SurvivingCommunicator(membership, timeout_s, link=link_here)
    except ValueError:  # before the others count on this rank
        membership.stop()
        raise


def _node_link(
    speed: LinkSpeed | None, membership: Membership, mesh: DeviceMesh | None
) -> NodeLink | None:
    """The emulated link of this replica.

    Collective; raises `ValueError` where the first one is on another machine.
    """
    if speed is None:
        return None
    if membership.first_text("machine", platform.node()) != platform.node():
        membership.stop()
        raise ValueError(ELSEWHERE)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = None if mesh is None else torch.device(mesh.device_type)
    return NodeLink(speed, rank // membership.shards, -(-world // membership.shards), device)


_POLL_S = 0.005
_ALL = 2**62
"""A guest lacks no collective of those before it came."""


class Guest:
    """A replica that comes in while others train, for `admitted`. All ranks of the replica
    construct it together.

    number: Of the replica; numbers are never used twice. hosts: The replicas that train.

    Args:
        store: Where the replicas meet; see `elastic`.
        mesh: ("replicate", "shard") of this replica alone, as of `init_mesh(replicas=1)`; None for
            one rank.
        min_replicas, silence_s, timeout_s, link: As in `elastic`, with the link of the others.

    Raises:
        ReplicaLost: Nobody has met there, or the replicas that have met are not there any more.
        ValueError: The replicas there have another number of shards.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> store = dist.HashStore()
        >>> axis = dt.elastic(replica=0, replicas=1, store=store)
        >>> guest = dt.Guest(store)
        >>> guest.number
        1
        >>> guest.membership.stop(); axis.close()
    """

    def __init__(
        self,
        store: Store,
        mesh: DeviceMesh | None = None,
        *,
        min_replicas: int = 1,
        silence_s: float = 15.0,
        timeout_s: float = GROUP_TIMEOUT_S,
        link: str = "",
    ) -> None:
        speed = LinkSpeed.parse(link) if link else None
        self._shard, self._shards = (
            (0, 1) if mesh is None else (mesh["shard"].get_local_rank(), mesh["shard"].size())
        )
        self._timeout_s = timeout_s
        own = latest_axis_store(store)
        replicas, shards = map(int, own.get(SIZE).split())
        if shards != self._shards:
            raise ValueError(f"a replica of {self._shards} shards cannot join replicas of {shards}")
        # before it counts as a guest
        Presence(own, replicas, shards, silence_s).require()
        number = torch.tensor(replicas + own.add("numbers", 1) - 1 if self._shard == 0 else 0)
        if mesh is not None and shards > 1:
            group = mesh["shard"].get_group()
            number = number.to(mesh.device_type if dist.get_backend(group) == "nccl" else "cpu")
            dist.broadcast(number, dist.get_global_rank(group, 0), group)
        self.number = int(number)
        self.membership = Membership(
            own,
            self.number,
            replicas,
            self._shard,
            shards,
            silence_s,
            min_replicas,
            end_alone,
            is_guest=True,
        )
        self._link = _node_link(speed, self.membership, mesh)
        self._store = self.membership.store
        self.hosts = Presence(self._store, replicas, shards, self.membership.limit_s())
        self._store.set(
            axis_key("ask", self.number), "1"
        )  # at once: the others look for one number after another

    def addresses(self, timeout_s: float) -> str:
        """The addresses of the feeds of all shards, separated by commas, once the others have them."""
        keys = [axis_key("feed", self.number, shard) for shard in range(self._shards)]
        who = f"replica {self.number}"
        awaited = Awaited(who, timeout_s, WAIT_LINE_S, self.hosts.require)
        try:
            while not self._store.check(keys):
                awaited.wait(lambda: "a replica that lets it in", _POLL_S)
        except TimeoutError as error:
            text = f"no replica has let {who} in within {timeout_s:g} s"
            raise ReplicaLost(text) from error
        return ",".join(self._store.get(key).decode() for key in keys)

    def ready(self) -> None:
        """Lets the others know that this rank has the state of training."""
        self._store.set(axis_key("ready", self.number, self._shard), "1")

    def entry(self) -> GuestEntry | None:
        """Where this replica comes in; None until the others wait for it there."""
        key = axis_key("entry", self.number)
        return (
            GuestEntry(*map(int, self._store.get(key).split()))
            if self._store.check([key])
            else None
        )

    def come_in(self, entry: GuestEntry, timeout_s: float = 60.0) -> SurvivingCommunicator:
        """The axis between the replicas, this one among them, or `ReplicaLost`. Collective."""
        report = RankReport(_ALL, [], {}, entry.step, self.number)
        deadline = time.monotonic() + timeout_s
        self._store.set(axis_key("at", self.number, self.membership.rank), "1")
        agreement = None
        while agreement is None:
            if time.monotonic() > deadline:
                raise ReplicaLost(
                    f"the others did not let replica {self.number} in within {timeout_s:g} s"
                )
            agreement = self.let_in(report)
        self.membership.join(agreement)
        beside = [
            report
            for rank, report in agreement.reports.items()
            if rank % self._shards == self._shard
        ]
        floor = max(report.floor for report in beside if report.floor < _ALL)
        agreed = [agreement]
        for _ in range(MOST_TRIES):
            try:
                return SurvivingCommunicator(
                    self.membership, self._timeout_s, floor, entry, agreed, self._link
                )
            except (
                RuntimeError
            ):  # one of the others was lost meanwhile; they may have begun the turn with it
                agreement = self.membership.agree(replace(report, floor=floor, guest=-1))
                begun = turn_of(agreement.next_turns, entry.user) > entry.turn
                agreed = [*agreed, agreement] if begun else [agreement]
        raise ReplicaLost(f"replica {self.number} could not form a process group with the others")

    def let_in(self, report: RankReport | None = None) -> Agreement | None:
        """The agreement that lets this guest in, if there is one; `report` asks for it.

        `ReplicaLost` where without.
        """
        latest = int(self._store.get(EPOCH))
        for epoch in (
            latest,
            latest + 1,
        ):  # the others may have noted the one, or have agreed on the next
            if not self._store.check([f"{epoch}/record"]):
                continue
            agreement = parse_agreement(epoch, self._store.get(f"{epoch}/record"))
            if self.number in agreement.members:
                return agreement
            if agreement.awaited == self.number:
                at = "in vain" if (entry := self.entry()) is None else f"before step {entry.step}"
                raise ReplicaLost(f"the others did not wait for replica {self.number} {at}")
        # never for an agreement after that which lets it in: it would be taken for that of a member
        if report:
            self._store.set(f"{latest + 1}/report/{self.membership.rank}", json.dumps(vars(report)))
            time.sleep(_POLL_S)
        return None
