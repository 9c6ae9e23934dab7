"""Who uses an elastic axis on a rank: the optimizers, and the host of a newcomer; and the texts
between ranks."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from detonation.cluster.survive.agreement import Agreement, ReplicaLeft, axis_key
from detonation.cluster.survive.membership import Membership
from detonation.core.link.elastic_communicator import ElasticCommunicator, PeerLost

_TEXT_POLL_S = 0.01
_TEXT, _LOST = b"+", b"-"


class StoreTexts:
    """Gathers texts of the ranks of some replicas; any thread may use it, one at a time.

    The store keeps the first value of a key. So where a rank is lost, either all others have its
    text or none has. No other texts had the name `channel`.
    """

    def __init__(self, membership: Membership, members: Sequence[int], channel: str) -> None:
        self._membership, self._channel, self._count = membership, channel, 0
        self._store: Store = membership.store.clone()  # type: ignore[attr-defined]  # one connection for each thread
        self._ranks = [
            member * membership.shards + shard
            for member in members
            for shard in range(membership.shards)
        ]
        self.rank, self.world_size = self._ranks.index(membership.rank), len(self._ranks)

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank.

        Collective; raises `PeerLost` on all that are left where one is lost.
        """
        self._count += 1
        keys = [self._key(self._count, rank) for rank in self._ranks]
        self._first(keys[self.rank], _TEXT + text.encode(errors="surrogateescape"))
        awaited = self._membership.awaited()
        while not self._store.check(keys):
            lost = [
                rank // self._membership.shards not in self._membership.members
                for rank in self._ranks
            ]
            for key in (key for key, gone in zip(keys, lost, strict=True) if gone):
                self._first(key, _LOST)
            self._membership.call_if_left()
            awaited.wait(partial(self._away, keys), _TEXT_POLL_S)
        values = self._store.multi_get(keys)
        if self._count > 1:  # which all have read
            self._store.delete_key(self._key(self._count - 1, self._ranks[self.rank]))
        if any(value[:1] == _LOST for value in values):
            raise PeerLost("a replica was lost meanwhile")
        return [value[1:].decode(errors="surrogateescape") for value in values]

    def broadcast(self, text: str) -> str:
        """The text of the first rank. Collective, as `gather`."""
        return self.gather(text if not self.rank else "")[0]

    def _away(self, keys: Sequence[str]) -> list[int]:
        each = zip(self._ranks, keys, strict=True)
        return [rank for rank, key in each if not self._store.check([key])]

    def _first(self, key: str, value: bytes) -> None:
        self._store.compare_set(key, "", value)  # type: ignore[arg-type]

    def _key(self, count: int, rank: int) -> str:
        return f"texts/{self._channel}/{count}/{rank}"


if TYPE_CHECKING:
    from detonation.cluster.survive.surviving import SurvivingCommunicator

_POLL_S = 0.005


class Host:
    """One rank's dealings with a replica that comes in, by the store."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @property
    def guest(self) -> int | None:
        """A replica that asks to come in, or waits for its step; None without one."""
        return self.membership.guest if self.membership.guest_asks else None

    def offer(self, guest: int, address: str) -> None:
        """Lets a guest know where it finds the state of this shard."""
        self.membership.store.set(axis_key("feed", guest, self.membership.shard), address)

    def copy_step(self, guest: int, step: int) -> float:
        """The step after which all shards give their guest a copy; infinity until the guests of all
        are there.

        The shards of a replica are in the same step, or in two that follow each other.
        """
        store, shard, shards = self.membership.store, self.membership.shard, self.membership.shards
        first, copy = self.membership.rank - shard, axis_key("copy", guest, self.membership.replica)
        store.set(
            axis_key("coming", guest, first + shard), "1"
        )  # by rank: another replica gives it if this one is lost
        if shard == 0 and store.check(
            [axis_key("coming", guest, first + each) for each in range(shards)]
        ):
            store.compare_set(copy, "", str(step + (2 if shards > 1 else 0)))
        return int(store.get(copy)) if store.check([copy]) else math.inf


class AxisEnd(ElasticCommunicator):
    """An end of an elastic axis, for an optimizer or for what is none.

    layout: the replicas that have a number for it, by the numbers with which they began. adopted:
    the step before which it took them. pending: agreements on members that it has not adopted.
    name: of its texts.
    """

    axis: "SurvivingCommunicator"
    layout: list[int]
    pending: list[Agreement]
    adopted: int
    name, channels = "", 0

    @property
    def shared(self) -> bool:
        return len(self.axis.users) > 1

    def expects(self, step: int) -> bool:
        return self.axis.guest is not None and step >= self.axis.guest[0]

    def size(self) -> int:
        return len(self.layout)

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return self.axis.start("all_reduce", values, self)

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self.axis.start("all_gather", mine, self)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        return self.axis.start("all_to_all", mine, self)

    def texts(self) -> StoreTexts:
        self.channels += 1
        channel = f"{self.layout}/{self.adopted}/{self.name}{self.channels}"
        return StoreTexts(self.axis.host.membership, self.layout, channel)

    def take(self, due: Sequence[Agreement], members: list[int], step: int) -> None:
        """Takes the numbers that `members` have from `step` on, by the agreements `due`."""
        self.pending = [each for each in self.pending if each not in due]
        self.layout, self.replica = members, members.index(self.axis.host.membership.replica)
        self.channels, self.adopted = 0, step  # the same members may come together again


class AxisUser(AxisEnd):
    """One optimizer's end of an elastic axis: after a loss it takes the new numbers before a step
    of its own.

    Until then a lost replica is absent for it. Optimizers may be in different steps. All ranks make
    them in one order.

    begun: the steps that it began; entered: those for which it asked who leaves.
    """

    def __init__(self, axis: "SurvivingCommunicator", number: int, begun: int) -> None:
        self.axis, self.number, self.layout, self.replica = axis, number, axis.layout, axis.replica
        self.pending, self.begun, self.entered, self._first = (
            list(axis.pending),
            begun,
            begun,
            float("inf"),
        )
        self.adopted, self.name, self._membership = (
            axis.adopted,
            f"user{number}/",
            axis.host.membership,
        )

    def enter_step(self, step: int) -> bool:
        with self._membership.changed:
            self.axis.settle()
            self.entered = max(self.entered, step + 1)
            if self._due(step) or self.axis.expects(step) or self.leaving(step):
                return True
            self._begin(step)
        return False

    def leaving(self, step: int) -> list[int]:
        return [
            self.layout.index(m)
            for m, first in self.axis.departing.items()
            if first <= step and m in self.layout
        ]

    def adopt(self, step: int) -> list[int]:
        self._await_departure(step)
        self._await_guest(step)
        with (
            self._membership.changed
        ):  # at once: after another loss all ask who has begun this step, and with whom
            self.axis.settle()
            due = self._due(step)
            members = due[-1].members if due else self.layout
            kept = [number for number, member in enumerate(self.layout) if member in members]
            if (
                not due or due[-1] in self.axis.pending
            ):  # the first user that adopts: for what is no user, too
                self.axis.take(due, members, step)
            self.take(due, members, step)
            self._begin(step)
        return kept

    def _await_departure(self, step: int) -> None:
        """Leaves where this replica is to leave before `step`; otherwise waits until all have
        agreed on who is left."""
        leaving = [self.layout[number] for number in self.leaving(step)]
        if self._membership.replica in leaving:
            self._membership.store.set(axis_key("asked", self._membership.rank), "1")
            self._membership.await_shards(self.axis.timeout_s)
            self.axis.close(0)
            raise ReplicaLeft(
                f"replica {self._membership.replica} has left before step {step}, as it was"
                " asked to"
            )
        while any(member in self._membership.members for member in leaving):
            self._membership.call_if_left()
            time.sleep(_POLL_S)

    def _await_guest(self, step: int) -> None:
        """Waits before `step` until all have agreed whether the guest has come."""
        axis, membership = self.axis, self._membership
        awaited = membership.awaited()
        while True:
            with membership.changed:
                axis.settle()
                if axis.guest is None or not axis.expects(step):
                    axis.awaits = -1
                    return
                axis.awaits = axis.guest[1]
            if membership.awaits(axis.awaits):  # and nothing is in flight anywhere
                membership.call()
                with membership.changed:
                    membership.changed.wait_for(lambda: axis.guest is None or axis.error, 1.0)
            else:
                membership.require_store()
                awaited.wait(partial(membership.not_at, axis.awaits), _POLL_S)

    def _due(self, step: int) -> list[Agreement]:
        return [each for each in self.pending if step >= each.first_step(self.number)]

    def _begin(self, step: int) -> None:
        self.begun, self._first = max(self.begun, step + 1), min(self._first, step)
        self._membership.under_way = self._membership.under_way or self.begun > self._first + 2
