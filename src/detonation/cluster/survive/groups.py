"""Creates gloo process groups outside of torch's registry of process groups. Ranks create such a
group in milliseconds, and abandon it when one of its ranks is lost.

The module also defines two records: `NumberedCollective`, a collective that this rank has started,
and `SurvivedLoss`, a change of the members after which training continued.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from detonation.cluster.processes.descriptors import drop_strangers
from detonation.cluster.processes.waiting import in_thread
from detonation.cluster.survive.agreement import Agreement, RankReport, in_words
from detonation.cluster.survive.membership import Membership
from detonation.core.schemes import is_sent_at_once

FORM_S = 10.0
"""Seconds in which the members of a process group must connect, after all ranks have agreed on
these members.
"""
OVER_S = 30.0
"""Seconds by which gloo's timeout exceeds the timeout of the membership. The membership must find
out which rank is late before gloo raises an error.
"""
_POLL_S = 0.5
_LOOK_S = 0.05


class Flight:
    """A running collective. A thread of gloo sets `ended` when the collective has ended, and `good`
    if it succeeded.

    After this the gloo thread calls `notify`, which waits for a lock. The collective counts as
    unfinished until `notify` returns. So a thread that holds this lock must not wait for the
    collective.
    """

    def __init__(self, work: dist.Work, notify: Callable[[], None]) -> None:
        self.ended = self.good = False
        self._notify = notify
        work.get_future().add_done_callback(self._end)

    def _end(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
            self.good = True
        except RuntimeError:  # a rank is lost; `Membership` finds out which one
            pass
        self.ended = True
        self._notify()


class Group:
    """A gloo process group of the remaining replicas.

    A collective waits at most `timeout_s` seconds for another member. The sockets listen on
    `address` of this machine; if `address` is "", gloo chooses an address.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, address: str = ""
    ) -> None:
        self.size = size
        how: Any = timedelta(seconds=FORM_S)
        if address:
            how = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            how._timeout = timedelta(seconds=FORM_S)
            how._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = ProcessGroupGloo(store, rank, size, how)
        self._group._set_default_timeout(timedelta(seconds=timeout_s))
        self._works: list[dist.Work] = []
        with suppress(RuntimeError, OSError):  # a lost store does no harm: the group is connected
            drop_strangers(self._group, store)

    @staticmethod
    def formed(make: Callable[[], "Group"], in_vain: Callable[[], bool]) -> "Group":
        """Forms a process group by calling `make` in another thread, and returns the group. Members
        have `FORM_S` seconds to connect, but the caller need not wait so long if a member is lost.

        Raises `RuntimeError` if `make` fails, or as soon as `in_vain` returns True, which means
        that a member is lost.
        """
        future = in_thread(make, "group")
        while not wait([future], _LOOK_S).done:
            if in_vain():
                raise RuntimeError("a replica was lost while the group was formed")
        return future.result()

    def all_reduce(self, values: Tensor) -> dist.Work:
        """Replaces `values` by the sum of the `values` of all members."""
        return self._kept(self._group.allreduce([values]))

    def all_gather(self, target: Tensor, mine: Tensor) -> dist.Work:
        """Gathers `mine` of all members into `target`."""
        if self.size > 2 and is_sent_at_once(mine.nbytes, self.size):
            return self.all_to_all(target, mine.repeat(self.size))
        return self._kept(self._group._allgather_base(target.view(-1), mine))

    def all_to_all(self, target: Tensor, mine: Tensor) -> dist.Work:
        """Sends row r of `mine` to member r, and receives one row from each member in `target`."""
        return self._kept(self._group.alltoall_base(target.view(-1), mine.view(-1), [], []))

    def broadcast(self, values: Tensor, source: int) -> dist.Work:
        """Replaces `values` with the values of member `source`."""
        return self._kept(self._group.broadcast(values, source))

    def abandon(self) -> None:
        """Ends the group without waiting for its running collectives.

        gloo's `abort` and `shutdown` do nothing, and its destructor waits for running collectives
        up to their timeout. So another thread keeps the group until these collectives have ended.
        If no collective is running, the sockets close immediately. The closed sockets wake other
        members that still wait for a message.
        """
        held = [(self._group, [work for work in self._works if not work.is_completed()])]
        self._group = None
        self._works = []
        if held[0][1]:
            threading.Thread(
                target=_outlast, args=(held,), name="abandoned group", daemon=True
            ).start()

    def _kept(self, work: dist.Work) -> dist.Work:
        if len(self._works) > 16:
            self._works = [each for each in self._works if not each.is_completed()]
        self._works.append(work)
        return work


class GroupAhead:
    """A process group that another thread forms in advance by `make`, while the present group is
    still in use.
    """

    def __init__(self, members: list[int], make: Callable[[], Group]) -> None:
        self._members = members
        # no daemon, because the interpreter must not end while this thread calls the store
        self._group = in_thread(make, "group", daemon=False)

    @property
    def formed(self) -> list[int]:
        """The members of the group; an empty list until the group is formed."""
        if self._group.done() and self._group.exception() is None:
            return self._members
        return []

    def take(self) -> Group:
        return self._group.result()


def group_ahead(
    membership: Membership, agreement: Agreement, timeout_s: float
) -> tuple[GroupAhead, str]:
    """Begins to form a process group while training continues. Its members are the members of
    `agreement` and the joining replica (guest). Returns the group, and a log line with the address
    on which this rank listens.

    The group is of no use if the members change before the step at which the replica joins.
    """
    members = [*agreement.members, agreement.guest]
    make, line = group_maker(membership, members, f"{agreement.epoch}/ahead", timeout_s)
    return GroupAhead(members, make), line


def group_maker(
    membership: Membership, members: Sequence[int], name: str, timeout_s: float
) -> tuple[Callable[[], Group], str]:
    """Returns a function that forms the process group `name` of `members`, and a log line with the
    address on which this rank listens.
    """
    shard = membership.shard
    own = membership.store.clone()  # type: ignore[attr-defined]
    store = PrefixStore(f"{name}/shard{shard}", own)
    way = membership.ways.to(member * membership.shards + shard for member in members)
    address = ""
    line = ""
    if way is not None:
        address = way.address
        line = membership.ways.line(way)
    rank = members.index(membership.replica)
    return partial(Group, store, rank, len(members), timeout_s + OVER_S, address), line


def _outlast(held: list[tuple[Any, list[dist.Work]]]) -> None:
    while not all(work.is_completed() for work in held[0][1]):
        time.sleep(_POLL_S)
    held.clear()


NumberedKind = Literal["all_reduce", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class SurvivedLoss:
    """A loss, a departure or a join of replicas, after which the other replicas continued.

    replicas: the replicas that were lost or left. next_step: the first step that no rank had begun.
    recovered_s: seconds from noticing the change until all collectives continued. came: the
    replicas that joined. left: True if `replicas` were asked to leave.
    """

    replicas: tuple[int, ...]
    next_step: int
    recovered_s: float
    came: tuple[int, ...] = ()
    left: bool = False

    def text(self, left: int, before: int) -> str:
        """Returns a log line about the change, after which `left` of `before` replicas continue."""
        verb = "lost"
        if self.left:
            verb = "left"
        event = f"{in_words(self.replicas)} {verb} after step {self.next_step}"
        return f"{event}: {left} of {before} go on, {self.recovered_s:.2f} s after the notice"


@dataclass
class NumberedCollective:
    """A collective that this rank has started. The rank keeps its record until every replica has
    finished the collective.

    layout: the replicas that counted as members when the collective started, by their numbers at
    the start of the run. floor: when the collective started, all ranks had finished the collectives
    up to this number. members: the replicas of `layout` that still take part.
    """

    number: int
    kind: NumberedKind
    sent: Tensor
    layout: list[int]
    floor: int
    members: list[int]
    target: Tensor
    flight: Flight | None = None  # None if gloo could not start the collective
    result: Tensor | None = None
    absent: frozenset[int] = frozenset()

    @property
    def finished(self) -> bool:
        return self.result is not None


def floor_after(floor: int, kept: Mapping[int, NumberedCollective]) -> int:
    """Returns the highest number up to which this rank has finished all collectives. All
    collectives up to `floor` are certainly finished. kept: the collectives that the rank still
    holds, by number.
    """
    while (following := kept.get(floor + 1)) and following.finished:
        floor += 1
    return floor


def lost_of(layout: Sequence[int], members: Sequence[int]) -> list[int]:
    """Returns the indices of the replicas in `layout` that are not in `members`."""
    return [number for number, member in enumerate(layout) if member not in members]


ALL = -1
NOBODY = -2


def holder_of(number: int, kind: NumberedKind, reports: Sequence[RankReport]) -> int:
    """Chooses the rank from which other ranks copy the result of collective `number`. Returns the
    index of this rank's report.

    Returns `ALL` if all ranks have the result. Returns `NOBODY` if all ranks must repeat the
    collective: either no rank has the result, or it is an all-to-all, in which each rank receives
    different bytes.
    """
    holders = [index for index, report in enumerate(reports) if report.has(number)]
    if len(holders) == len(reports):
        return ALL
    if kind == "all_to_all" or not holders:
        return NOBODY
    return holders[0]
