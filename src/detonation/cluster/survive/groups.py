"""gloo process groups outside of torch's registry: they are created in milliseconds, and abandoned
when a peer is lost. The module also has numbered collectives and the record of a loss.
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
"""Seconds in which the members of a group must connect after all have agreed on it."""
OVER_S = 30.0
"""Seconds by which the network library's timeout exceeds the membership's timeout, because the
membership must first find out which rank is late.
"""
_POLL_S = 0.5
_LOOK_S = 0.05


class Flight:
    """A running collective. A thread of the network library sets `ended`, and `good` if it
    succeeded.

    That thread then waits for the lock of `notify`, and the work is unfinished until `notify`
    returns. Therefore do not wait for the work while you hold that lock.
    """

    def __init__(self, work: dist.Work, notify: Callable[[], None]) -> None:
        self.ended = self.good = False
        self._notify = notify
        work.get_future().add_done_callback(self._end)

    def _end(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
            self.good = True
        except RuntimeError:  # the membership finds out which rank was lost
            pass
        self.ended = True
        self._notify()


class Group:
    """A process group of the remaining replicas.

    A collective waits at most `timeout_s` for a peer. The sockets listen on `address` of this
    machine; with "" gloo chooses.
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
        with suppress(RuntimeError, OSError):  # the group is connected, and needs no store
            drop_strangers(self._group, store)

    @staticmethod
    def formed(make: Callable[[], "Group"], in_vain: Callable[[], bool]) -> "Group":
        """Calls `make` in another thread, because members have only `FORM_S` to connect.

        Raises `RuntimeError` if it fails, or as soon as `in_vain` returns True.
        """
        future = in_thread(make, "group")
        while not wait([future], _LOOK_S).done:
            if in_vain():
                raise RuntimeError("a member was lost meanwhile")
        return future.result()

    def all_reduce(self, values: Tensor) -> dist.Work:
        """Sums `values` in place."""
        return self._kept(self._group.allreduce([values]))

    def all_gather(self, target: Tensor, mine: Tensor) -> dist.Work:
        """Gathers `mine` of all members into `target`."""
        if self.size > 2 and is_sent_at_once(mine.nbytes, self.size):
            return self.all_to_all(target, mine.repeat(self.size))
        return self._kept(self._group._allgather_base(target.view(-1), mine))

    def all_to_all(self, target: Tensor, mine: Tensor) -> dist.Work:
        """Sends row r of `mine` to member r, and receives a row of each member in `target`."""
        return self._kept(self._group.alltoall_base(target.view(-1), mine.view(-1), [], []))

    def broadcast(self, values: Tensor, source: int) -> dist.Work:
        """Replaces `values` with the values of member `source`."""
        return self._kept(self._group.broadcast(values, source))

    def abandon(self) -> None:
        """Ends the group without waiting for its running collectives.

        gloo's `abort` and `shutdown` do nothing, and its destructor waits for running collectives
        up to their timeout. So another thread keeps the group until these collectives have ended.
        If no collective is running, the sockets close at once, which wakes peers that still wait.
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
    """A group that `make` forms while another group is in use."""

    def __init__(self, members: list[int], make: Callable[[], Group]) -> None:
        self._members = members
        # The interpreter waits for this thread at its end, because the thread is inside the store.
        self._group = in_thread(make, "group", daemon=False)

    @property
    def formed(self) -> list[int]:
        """The members of the group; empty until it is formed."""
        if self._group.done() and self._group.exception() is None:
            return self._members
        return []

    def take(self) -> Group:
        return self._group.result()


def group_ahead(
    membership: Membership, agreement: Agreement, timeout_s: float
) -> tuple[GroupAhead, str]:
    """Begins to form the group that includes the guest of `agreement`. Also returns the line that
    says where this rank listens.

    The group is useless if the members change before the guest's step.
    """
    members = [*agreement.members, agreement.guest]
    make, line = group_maker(membership, members, f"{agreement.epoch}/ahead", timeout_s)
    return GroupAhead(members, make), line


def group_maker(
    membership: Membership, members: Sequence[int], name: str, timeout_s: float
) -> tuple[Callable[[], Group], str]:
    """Returns a function that forms the group `name` of `members`, and the line that says where
    this rank listens.
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
    """A loss that the other replicas survived.

    replicas: the lost ones. recovered_s: seconds from noticing the loss until all collectives
    continued. came: the replica that joined. left: True if the lost replicas were asked to leave.
    """

    replicas: tuple[int, ...]
    next_step: int
    recovered_s: float
    came: tuple[int, ...] = ()
    left: bool = False

    def text(self, left: int, before: int) -> str:
        """Describes the loss: `left` of `before` replicas continue."""
        verb = "lost"
        if self.left:
            verb = "left"
        event = f"{in_words(self.replicas)} {verb} after step {self.next_step}"
        return f"{event}: {left} of {before} go on, {self.recovered_s:.2f} s after the notice"


@dataclass
class NumberedCollective:
    """A collective that this rank started. It is kept until every replica has finished it.

    layout: the present replicas, by their numbers at the start. floor: all ranks had finished the
    collectives up to this number when this one started.
    """

    number: int
    kind: NumberedKind
    sent: Tensor
    layout: list[int]
    floor: int
    members: list[int]
    target: Tensor
    flight: Flight | None = None  # None if the process group refused the collective
    result: Tensor | None = None
    absent: frozenset[int] = frozenset()

    @property
    def finished(self) -> bool:
        return self.result is not None


def floor_after(floor: int, kept: Mapping[int, NumberedCollective]) -> int:
    """Number up to which all collectives are finished, if all collectives up to `floor` are."""
    while (following := kept.get(floor + 1)) and following.finished:
        floor += 1
    return floor


def lost_of(layout: Sequence[int], members: Sequence[int]) -> list[int]:
    """Indices of the replicas in `layout` that are not in `members`."""
    return [number for number, member in enumerate(layout) if member not in members]


ALL = -1
NOBODY = -2


def holder_of(number: int, kind: NumberedKind, reports: Sequence[RankReport]) -> int:
    """Index of the report of the rank from which other ranks copy the result of collective
    `number`.

    `ALL` if all ranks have the result. `NOBODY` if all ranks repeat the collective: if no rank has
    the result, or in an all-to-all, where each rank receives different bytes.
    """
    holders = [index for index, report in enumerate(reports) if report.has(number)]
    if len(holders) == len(reports):
        return ALL
    if kind == "all_to_all" or not holders:
        return NOBODY
    return holders[0]
