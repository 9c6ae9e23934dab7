"""Creates the elastic axis, on which replicas survive the loss of other replicas, and the store in
which they meet. `Guest` is a replica that joins later.
"""

import json
import platform
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from detonation.cluster.init import GROUP_TIMEOUT_S, LaunchPosition, end_for, init_replica
from detonation.cluster.interface import listener_at, listening_address
from detonation.cluster.network.throttled import NodeLink
from detonation.cluster.position import host_and_port, joined_address, require_known_host
from detonation.cluster.processes.failure import Failure
from detonation.cluster.processes.refusal import is_prepared
from detonation.cluster.processes.signals import end_if_asked
from detonation.cluster.processes.waiting import WAIT_LINE_S, Awaited
from detonation.cluster.quorum.store import meeting_store
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
    note_gone,
    parse_agreement,
    ranks_of_replicas,
    serve_one_axis,
    turn_of,
)
from detonation.cluster.survive.groups import GroupAhead, group_ahead
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.port import (
    Presence,
    meet_at,
    place_in_replica,
    place_of_replica,
)
from detonation.cluster.survive.surviving import MOST_TRIES, SurvivingCommunicator
from detonation.link_speed import LinkSpeed

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Survival:
    """Makes a launcher continue after the loss of replicas, while at least `min_replicas` remain.
    Each replica has `shards` ranks.

    address: "HOST:PORT" of the store; "" for a free port on this machine only.
    """

    shards: int
    min_replicas: int
    address: str = ""


@dataclass(frozen=True)
class Place:
    """A replica's position in a run: the store where all replicas meet, and its replica number."""

    store: Store
    replica: int
    replicas: int


_place: Place | None = None


def place() -> Place | None:
    """Returns the position of this process in a run that may lose replicas; None in other runs."""
    return _place


class MeetingPoint:
    """The store of a launcher. It listens from the start, but answers only after `serve`.

    Answering needs a thread, and the launcher must have no threads when it forks its ranks.
    """

    def __init__(self, survival: Survival, replicas: int) -> None:
        self._survival = survival
        self._replicas = replicas
        address = survival.address or "127.0.0.1:0"
        require_known_host("the address of the store", address)
        host, port = host_and_port(address)
        try:
            host = listening_address(host)
            self._listener = listener_at(host, port)
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            remedy = "give a free port above 1023 at an address of this machine"
            if replicas:
                remedy += ", or --replica to meet others at the store of detonation meet"
            raise ValueError(f"no store can be at {address}: {reason}; {remedy}") from error
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self._store: Store | None = None
        self.lost: set[int] = set()

    def serve(self) -> None:
        """Starts to answer the clients of the store."""
        fd = self._listener.detach()
        try:
            self._store = TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=fd,
                use_libuv=True,
            )
        except DistError as error:
            raise ValueError(
                f"this machine cannot connect to its own store at"
                f" {joined_address(self.host, self.port)}: bring up its loopback interface with ip"
                " link set lo up, and let its firewall pass that port"
            ) from error
        if self._replicas:
            serve_one_axis(self._store)

    def survives(self, failure: Failure) -> Collection[int]:
        """Returns the ranks of the replica that `failure` ends; none if the whole run ends.

        The run ends if the set-up of a replica fails, or if fewer than `min_replicas` would remain.
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
        """Returns the members in the latest agreement, including those that joined later."""
        assert self._store is not None
        return {*latest_members(axis_store(self._store, 0), self._replicas)}

    def has_left(self, rank: int) -> bool:
        """True if `rank` has left because its replica was asked to leave."""
        return self._store is not None and axis_store(self._store, 0).check(
            [axis_key("asked", rank)]
        )

    def left_out(self) -> list[int]:
        """Returns the ranks of removed replicas, except replicas that were asked to leave."""
        members = {*range(self._replicas)}
        if self._store:
            members = self._members()
        shards = self._survival.shards
        ranks = range(self._replicas * shards)
        return [rank for rank in ranks if rank // shards not in members and not self.has_left(rank)]

    def close(self) -> None:
        """Ends the store."""
        self._store = None
        self._listener.close()


def serve_meeting(address: str, tell: Callable[[str], None]) -> NoReturn:
    """Serves a store at `address` until a signal ends this process. Calls `tell` with the address
    once the store answers.
    """
    point = MeetingPoint(Survival(1, 1, address), 0)
    point.serve()
    tell(joined_address(point.host, point.port))
    while True:  # loop: a signal handler may return before another thread ends this process
        signal.pause()


def join_replicas(position: LaunchPosition, host: str, port: int, shards: int) -> None:
    """Joins the process group of this rank's replica. The launcher's store is at `host`, `port`."""
    store = TCPStore(host, port, timeout=_TIMEOUT)
    init_replica(position, store, shards)
    take_place(store, position.rank // shards, position.world_size // shards)


def meet_replicas(addresses: str, replica: int, replicas: int) -> None:
    """Connects `replica`, which has a process group of its own, to the store at `addresses`."""
    take_place(meeting_store(addresses), replica, replicas)


def take_place(store: Store, replica: int, replicas: int) -> None:
    """Stores the position of this process in a run, so that `place` returns it."""
    global _place
    _place = Place(store, replica, replicas)


def elastic(
    mesh: DeviceMesh | None = None,
    *,
    replica: int | None = None,
    replicas: int | None = None,
    store: Store | str | None = None,
    min_replicas: int = 1,
    silence_s: float = 15.0,
    timeout_s: float = GROUP_TIMEOUT_S,
    end: Callable[[Exception], object] | None = None,
    link: str = "",
) -> SurvivingCommunicator:
    """Creates an axis between replicas for `replicate`. Training on this axis continues after
    replicas are lost. Collective.

    A replica is lost if one of its ranks is killed, stopped, or cut off from the store. The other
    replicas notice the loss, agree on who remains, complete the interrupted exchange and continue
    in the same processes, bitwise equal. From the next step on, only the remaining replicas count
    in means and votes, and aggregate rows. A removed replica that resumes raises `ReplicaLost`.

    Args:
        mesh: The mesh of all replicas, with the axis "replicate", as from `init_mesh`; or the mesh
            of this replica alone, with `replica` and `replicas`; None for a replica of one rank.
            All other axes, of any name, are inside a replica, whose ranks are lost together.
        replica: Index of this replica, from 0 to `replicas` - 1, if each replica is a separate
            world.
        replicas: Number of replicas, if each is a separate world.
        store: The store where all ranks meet; by default the store of the default process group. No
            rank can continue without the store, so its host process must not be lost: with
            torchrun the agent of the first node, otherwise rank 0. With several stores of
            `detonation meet`, "HOST:PORT,HOST:PORT,HOST:PORT", a minority of them may be lost.
        min_replicas: From 1 to the number of replicas. If fewer remain, ranks raise `ReplicaLost`.
        silence_s: A rank without a heartbeat for this many seconds is lost; above 1. The loss of a
            killed rank is noticed at once, because its connections close.
        timeout_s: Seconds for which a collective waits for a rank that is alive.
        end: Called once, in another thread, with the error, if the main thread of a replica that
            cannot continue has not raised it for 5 s. By default logs the error, ends the process.
        link: Emulated speed of the links between replicas on one machine, such as "100mbit,5ms".

    Raises:
        ValueError: An argument is out of range, there is neither a mesh nor a store, or replicas
            with a `link` are on several machines.
        TimeoutError: A rank was missing after the store's timeout.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
        >>> axis.size(), axis.losses
        (1, [])
        >>> axis.close()
    """
    alone = replica is not None
    if mesh is not None and not alone and replicas is None:
        replica, replicas = place_of_replica(mesh)
    if replica is None or replicas is None or not 0 <= replica < replicas:
        raise ValueError(
            f"replica is {replica}, replicas is {replicas}: pass both, with 0 <= replica <"
            " replicas, or only a mesh of all replicas"
        )
    if not 1 <= min_replicas <= replicas:
        raise ValueError(
            f"min_replicas is {min_replicas}, must be from 1 to the number of replicas, {replicas}"
        )
    if not silence_s > 1:
        raise ValueError(f"silence_s is {silence_s}, must be above 1")
    if store is None and mesh is None:
        raise ValueError("replicas without a common mesh need a store: pass store=TCPStore(...)")
    speed = None
    if link:
        speed = LinkSpeed.parse(link)
    base = _reached(store)
    shard, shards = place_in_replica(mesh, alone)
    own, look = meet_at(base, replica, replicas, shard, shards)
    membership = Membership(
        own,
        replica,
        replicas,
        shard,
        shards,
        silence_s,
        min_replicas,
        end or end_for,
        look=look,
    )
    try:
        link_here = _node_link(speed, membership, mesh)
        return SurvivingCommunicator(membership, timeout_s, link=link_here)
    except ValueError:  # without heartbeats the other ranks soon notice that this rank is lost
        membership.stop()
        raise


def _reached(store: Store | str | None) -> Store:
    if isinstance(store, str):
        return meeting_store(store)
    return store or distributed_c10d._get_default_store()


def _node_link(
    speed: LinkSpeed | None, membership: Membership, mesh: DeviceMesh | None
) -> NodeLink | None:
    """Returns the emulated link of this replica; None without `speed`.

    Collective. Raises `ValueError` unless all replicas are on one machine.
    """
    if speed is None:
        return None
    if membership.first_text("machine", platform.node()) != platform.node():
        membership.stop()
        raise ValueError(
            "a link can be emulated between processes of one machine only: leave --link out"
        )
    rank = 0
    world = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
    device = None
    if mesh is not None:
        device = torch.device(mesh.device_type)
    return NodeLink(speed, rank // membership.shards, -(-world // membership.shards), device)


_POLL_S = 0.005
_ASK_POLL_S = 0.1
_ALL = 2**62
"""`floor` of a joining replica's first report: it needs no result of an earlier collective."""


class Guest:
    """A replica that joins a run while the other replicas of the run train; see `admitted`. All
    ranks of the replica construct it together.

    number: the number of the replica; numbers are never reused. hosts: the replicas that train.
    members: the members in the last agreement that this replica has read. giver: the replica that
    sends the training state; -1 for none. postponed: how often the members went on without this
    replica, because it lacked the state.

    Args:
        store: The store where the replicas meet; see `elastic`.
        mesh: ("replicate", "shard") of this replica alone, as from `init_mesh(replicas=1)`; None
            for one rank.
        min_replicas, silence_s, timeout_s, link: As in `elastic`; `link` as for the other replicas.

    Raises:
        ReplicaLost: No replicas have met at this store, or the replicas that met have ended.
        ValueError: The other replicas have another number of shards.

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
        store: Store | str,
        mesh: DeviceMesh | None = None,
        *,
        min_replicas: int = 1,
        silence_s: float = 15.0,
        timeout_s: float = GROUP_TIMEOUT_S,
        link: str = "",
    ) -> None:
        speed = None
        if link:
            speed = LinkSpeed.parse(link)
        self._shard = 0
        self._shards = 1
        if mesh is not None:
            self._shard = mesh["shard"].get_local_rank()
            self._shards = mesh["shard"].size()
        self._timeout_s = timeout_s
        self._ahead: GroupAhead | None = None
        self._answered: GuestEntry | None = None
        self._feeds = ""
        own = latest_axis_store(_reached(store))
        replicas, shards = map(int, own.get(SIZE).split())
        if shards != self._shards:
            raise ValueError(
                f"a replica of {self._shards} shards cannot join replicas of {shards}: start it"
                f" with {shards} shards"
            )
        # check that the run still trains, before this replica gets a number of the run
        Presence(own, replicas, shards, silence_s).require()
        number = torch.tensor(0)
        if self._shard == 0:
            number = torch.tensor(replicas + own.add("numbers", 1) - 1)
        if mesh is not None and shards > 1:
            group = mesh["shard"].get_group()
            if dist.get_backend(group) == "nccl":
                number = number.to(mesh.device_type)
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
            end_for,
            is_guest=True,
        )
        self._link = _node_link(speed, self.membership, mesh)
        self._store = self.membership.store
        self._epoch = int(self._store.get(EPOCH))
        self.members = latest_members(self._store, replicas)
        self.giver = -1
        self.postponed = 0
        self.hosts = Presence(self._store, replicas, shards, self.membership.limit_s())
        # ask now: members wait for the requests of joining replicas in the order of their numbers
        self._store.set(axis_key("ask", self.number), "1")
        if self._shard == 0:
            self._ask_for_dead(range(replicas, self.number), silence_s)

    def _ask_for_dead(self, earlier: Iterable[int], silence_s: float) -> None:
        """Writes requests to join for `earlier` replicas that do not ask within `silence_s`.
        These replicas have ended after they got their numbers. The members wait for the requests in
        the order of the replica numbers, and skip a replica that has ended.
        """
        deadline = time.monotonic() + silence_s
        while away := self._not_asking(earlier):
            if time.monotonic() > deadline:
                break
            end_if_asked()
            time.sleep(_ASK_POLL_S)
        for guest in away:
            for rank in ranks_of_replicas([guest], self._shards):
                # members wait for the key `loopback`, which the ended rank cannot write any more
                self._store.set(axis_key("loopback", rank), "")
                note_gone(self._store, rank)
            self._store.set(axis_key("ask", guest), "1")

    def _not_asking(self, guests: Iterable[int]) -> list[int]:
        keys = {guest: axis_key("ask", guest) for guest in guests}
        if not keys or self._store.check([*keys.values()]):
            return []
        return [guest for guest, key in keys.items() if not self._store.check([key])]

    def addresses(self, timeout_s: float) -> str:
        """Returns the addresses of all shards' feeds, which send the training state, separated by
        commas. Waits until a member has opened these feeds.
        """
        who = f"replica {self.number}"
        awaited = Awaited(who, timeout_s, WAIT_LINE_S, self._require_hosts)
        try:
            while not self.latest_addresses():
                awaited.wait(lambda: "a replica that lets it in", _POLL_S)
        except TimeoutError as error:
            raise ReplicaLost(f"no replica has let {who} in within {timeout_s:g} s") from error
        return self._feeds

    def latest_addresses(self) -> str:
        """Returns the addresses of the feeds that send the training state; "" for none. All these
        feeds belong to the latest member that has opened a feed for each shard: the new `giver`.
        """
        keys = [axis_key("feed", self.number, shard) for shard in range(self._shards)]
        if self._store.check(keys):
            told = [self._store.get(key).decode().split(" ", 1) for key in keys]
            givers = {giver for giver, _ in told}
            if len(givers) == 1:
                self.giver = int(givers.pop())
                self._feeds = ",".join(address for _, address in told)
        return self._feeds

    def _require_hosts(self) -> None:
        """Raises `ReplicaLost` if the members have refused this replica, or have ended."""
        refused = axis_key("refused", self.number)
        if self._store.check([refused]):
            reason = self._store.get(refused).decode()
            raise ReplicaLost(f"the run cannot let replica {self.number} in: {reason}")
        self.hosts.require()

    def ready(self) -> None:
        """Announces that this rank has the state of `giver`, and now receives the later steps."""
        self._store.set(axis_key("ready", self.number, self._shard), str(self.giver))

    def withdraw(self) -> None:
        """Announces that this rank no longer has the current training state."""
        self._store.set(axis_key("ready", self.number, self._shard), "")

    def entry(self) -> GuestEntry | None:
        """Returns the point of training at which the members wait for this replica to join. Returns
        None while no member waits: before they begin to wait, and after they postponed the join.
        """
        entry = self._latest_entry()
        return entry if entry != self._answered else None

    def _latest_entry(self) -> GuestEntry | None:
        key = axis_key("entry", self.number)
        if not self._store.check([key]):
            return None
        return GuestEntry(*map(int, self._store.get(key).split()))

    def come_in(
        self, entry: GuestEntry, timeout_s: float = 60.0, has_state: bool = True
    ) -> SurvivingCommunicator | None:
        """Joins the run at the point of training `entry`, and returns the axis. Returns None if a
        rank of this replica lacks the training state: the replica then joins later. Collective.

        Raises `ReplicaLost` if the members do not let this replica in within `timeout_s`.
        """
        formed = self._ahead.formed if self._ahead else []
        report = RankReport(_ALL, [], {}, entry.step, self.number, ahead=formed)
        if not has_state:
            # first announce that this rank has no state, so that no agreement admits this replica
            self.withdraw()
            report = replace(report, guest=-1)
        self._answered = entry
        postponed = self.postponed
        deadline = time.monotonic() + timeout_s
        self._store.set(axis_key("at", self.number, self.membership.rank), entry.turn_in_words)
        while (agreement := self.let_in(report)) is None:
            if self.postponed > postponed:
                self.withdraw()
                return None
            if time.monotonic() > deadline:
                raise ReplicaLost(
                    f"the run did not let replica {self.number} in within {timeout_s:g} s"
                )
        return self._joined(agreement, report, entry)

    def _joined(
        self, agreement: Agreement, report: RankReport, entry: GuestEntry
    ) -> SurvivingCommunicator:
        """Returns the axis of `agreement`. If another replica is lost meanwhile, agrees again."""
        self.membership.join(agreement)
        floors = [
            report.floor
            for rank, report in agreement.reports.items()
            if rank % self._shards == self._shard
        ]
        floor = max(each for each in floors if each < _ALL)
        agreed = [agreement]
        for _ in range(MOST_TRIES):
            try:
                return SurvivingCommunicator(
                    self.membership, self._timeout_s, floor, entry, agreed, self._link, self._ahead
                )
            except RuntimeError:  # another replica was lost in the meantime
                agreement = self.membership.agree(replace(report, floor=floor, guest=-1, ahead=[]))
                # keep the earlier agreements only if a member has begun the turn of `entry`
                if turn_of(agreement.next_turns, entry.user) <= entry.turn:
                    agreed = []
                agreed.append(agreement)
        raise ReplicaLost(f"replica {self.number} could not form a process group with the run")

    def let_in(self, report: RankReport | None = None) -> Agreement | None:
        """Reads the new agreements, and returns the agreement that makes this replica a member. If
        no agreement does so yet, writes `report` for the next epoch, and returns None.

        Raises `ReplicaLost` if the members have agreed to continue without this replica.
        """
        while self._store.check([f"{self._epoch + 1}/record"]):
            self._epoch += 1
            agreement = parse_agreement(self._epoch, self._store.get(f"{self._epoch}/record"))
            if self.number in agreement.members:
                return agreement
            self.members = agreement.members
            self._note(agreement)
        if report:
            key = f"{self._epoch + 1}/report/{self.membership.rank}"
            self._store.set(key, json.dumps(vars(report)))
            time.sleep(_POLL_S)
        return None

    def _note(self, agreement: Agreement) -> None:
        """Records what `agreement` says about this replica, which is not one of its members yet."""
        if agreement.guest == self.number and self._ahead is None:
            self._ahead, _ = group_ahead(self.membership, agreement, self._timeout_s)
        if agreement.awaited != self.number:
            return
        if not agreement.postponed:
            entry = self._latest_entry()
            at = f"before step {entry.step}" if entry else "any longer"
            raise ReplicaLost(f"the run did not wait for replica {self.number} {at}")
        self.postponed += 1
        self._ahead = None
