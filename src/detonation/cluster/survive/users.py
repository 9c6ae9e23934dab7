"""Who uses an elastic axis on a rank: the optimizers, and the host of a newcomer; and the texts
between ranks."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakMethod

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from detonation.cluster.survive.agreement import (
    Agreement,
    GuestEntry,
    ReplicaLeft,
    axis_key,
    ranks_of_replicas,
    turn_of,
)
from detonation.cluster.survive.membership import Membership
from detonation.core.link.elastic_communicator import ElasticCommunicator, HandOver, PeerLost

_TEXT_POLL_S = 0.01
_TEXT = b"+"
_LOST = b"-"


class StoreTexts:
    """Gathers texts of the ranks of some replicas; any thread may use it, one at a time.

    The store keeps the first value of a key. So where a rank is lost, either all others have its
    text or none has. No other texts had the name `channel`.
    """

    def __init__(self, membership: Membership, members: Sequence[int], channel: str) -> None:
        self._membership = membership
        self._channel = channel
        self._count = 0
        self._store: Store = membership.store.clone()  # type: ignore[attr-defined]  # one connection for each thread
        self._ranks = [
            member * membership.shards + shard
            for member in members
            for shard in range(membership.shards)
        ]
        self.rank = self._ranks.index(membership.rank)
        self.world_size = len(self._ranks)

    def gather(self, text: str) -> list[str]:
        """Texts of all ranks, by rank.

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
        """Text of the first rank. Collective, as `gather`."""
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

    door = -1
    """Optimizer that lets in the replica on which all have agreed."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @property
    def guest(self) -> int | None:
        """A replica that asks to come in, or waits for its step; None without one."""
        if self.membership.guest_asks:
            return self.membership.guest
        return None

    def offer(self, guest: int, address: str, user: int) -> None:
        """Lets a guest know where the state of this shard is, and that `user` lets it in."""
        store = self.membership.store
        store.set(axis_key("door", guest), str(user))  # first: who has the address may be ready
        store.set(axis_key("feed", guest, self.membership.shard), address)

    def door_of(self, guest: int) -> int:
        """Optimizer that lets a guest in."""
        store = self.membership.store
        key = axis_key("door", guest)
        if store.check([key]):
            return int(store.get(key))
        return 0

    def tell_entry(self, guest: int, entry: GuestEntry) -> None:
        """Lets a guest know that the others have come to the turn before which it comes in."""
        told = f"{entry.user} {entry.turn} {entry.step}"
        self.membership.store.set(axis_key("entry", guest), told)

    def awaits(self, guest: int) -> bool:
        """Notes that this rank has reached the step at which `guest` joins; True once all members
        have."""
        self.membership.store.set(axis_key("at", guest, self.membership.rank), "1")
        return not self.not_at(guest)

    def not_at(self, guest: int) -> list[int]:
        """Ranks that have not reached the step at which `guest` joins."""
        store = self.membership.store
        ranks = ranks_of_replicas(self.membership.members, self.membership.shards)
        if store.check([axis_key("at", guest, rank) for rank in ranks]):
            return []
        return [rank for rank in ranks if not store.check([axis_key("at", guest, rank)])]

    def copy_turn(self, guest: int, turn: int) -> float:
        """Turn after which all shards give their guest a copy; infinity until all have one.

        The shards of a replica are in the same turn, or in two that follow each other.
        """
        store = self.membership.store
        shard = self.membership.shard
        shards = self.membership.shards
        first = self.membership.rank - shard
        copy = axis_key("copy", guest, self.membership.replica)
        store.set(
            axis_key("coming", guest, first + shard), "1"
        )  # by rank: another replica gives it if this one is lost
        if shard == 0 and store.check(
            [axis_key("coming", guest, first + each) for each in range(shards)]
        ):
            store.compare_set(copy, "", str(turn + (2 if shards > 1 else 0)))
        if store.check([copy]):
            return int(store.get(copy))
        return math.inf


class AxisEnd(ElasticCommunicator):
    """An end of an elastic axis, for an optimizer or for what is none.

    layout: the replicas that have a number for it, by the numbers with which they began. adopted:
    the turn before which it took them. pending: agreements on members that it has not adopted.
    name: of its texts.
    """

    axis: "SurvivingCommunicator"
    layout: list[int]
    pending: list[Agreement]
    adopted: int
    name = ""
    channels = 0

    @property
    def shared(self) -> bool:
        return self.axis.users.several

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

    def take(self, due: Sequence[Agreement], members: list[int], turn: int) -> None:
        """Takes the numbers that `members` have from `turn` on, by the agreements `due`."""
        self.pending = [each for each in self.pending if each not in due]
        self.layout = members
        self.replica = members.index(self.axis.host.membership.replica)
        # the same members may come together again
        self.channels = 0
        self.adopted = turn


class AxisUser(AxisEnd):
    """One optimizer's end of an elastic axis: after a loss it takes the new numbers before a step
    of its own.

    Until then a lost replica is absent for it. Optimizers may be in different steps. All ranks make
    them in one order.

    turns: how far it has come. optimizer: its method that hands over; None if none does.
    """

    def __init__(self, axis: "SurvivingCommunicator", hand_over: HandOver | None) -> None:
        self.number = axis.users.next_number()
        self.turns = axis.users.turns[self.number]
        self._ahead = self.turns.begun - self.turns.steps  # a turn less the step of the optimizer
        if hand_over is None:
            self._optimizer = None
        else:
            self._optimizer = WeakMethod(hand_over)
        self.axis = axis
        self.layout = axis.layout
        self.replica = axis.replica
        self.pending = list(axis.pending)
        self.adopted = axis.adopted
        self.name = f"user{self.number}/"
        self._membership = axis.host.membership

    @property
    def optimizer(self) -> HandOver | None:
        if self._optimizer is None:
            return None
        return self._optimizer()

    @property
    def exists(self) -> bool:
        """True unless its optimizer was dropped."""
        return self._optimizer is None or self._optimizer() is not None

    def turn_of(self, step: int) -> int:
        """Turn that begins with `step` of the optimizer."""
        return step + self._ahead

    def turns_ahead(self) -> int:
        """A turn less its step; another one after training went back, or forth."""
        return self._ahead

    def step_of(self, turn: float) -> float:
        """Step of the optimizer that begins `turn`, unless training goes back before."""
        return turn - self._ahead

    def resume_at(self, step: int) -> None:
        self._ahead = self.turns.begun - step

    def trains(self, tensors: Collection[Tensor]) -> None:
        self.axis.users.note_trained(self.number, tensors)

    def expects(self, step: int) -> bool:
        axis = self.axis
        return (
            axis.guest is not None
            and self.number == axis.host.door
            and self.turn_of(step) >= axis.guest[0]
        )

    def enter_step(self, step: int) -> bool:
        with self._membership.changed:
            self.axis.settle()
            turn = self.turn_of(step)
            self.turns.entered = max(self.turns.entered, turn + 1)
            if self._due(turn) or self.expects(step) or self.leaving(step):
                return True
            self._begin(step)
        return False

    def leaving(self, step: int) -> list[int]:
        if self.axis.acting not in (None, self):  # see `handing_over`
            return []
        turn = self.turn_of(step)
        return [
            self.layout.index(member)
            for member, departure in self.axis.departing.items()
            if turn_of(departure.turns, self.number) <= turn and member in self.layout
        ]

    def handing_over(self) -> list[int]:
        return [self.layout.index(each) for each in self.axis.handed if each in self.layout]

    def adopt(self, step: int) -> list[int]:
        leaving = [self.layout[number] for number in self.leaving(step)]
        if leaving:
            self._let_all_hand_over(leaving)
        self._await_departure(leaving, step)
        self._await_guest(step)
        with (
            self._membership.changed
        ):  # at once: after another loss all ask who has begun this step, and with whom
            self.axis.settle()
            self.axis.forget_departed(leaving)
            turn = self.turn_of(step)
            due = self._due(turn)
            if due:
                members = due[-1].members
            else:
                members = self.layout
            kept = [number for number, member in enumerate(self.layout) if member in members]
            if (
                not due or due[-1] in self.axis.pending
            ):  # the first user that adopts: for what is no user, too
                self.axis.take(due, members, turn)
            self.take(due, members, turn)
            self._end_others(due, grown=len(members) > len(kept))
            self._begin(step)
        return kept

    def _let_all_hand_over(self, leaving: Sequence[int]) -> None:
        """Lets other optimizers hand over what the replicas `leaving` have not sent. Collective.

        All ranks are in the same step of the same optimizer, so the others are between two steps.
        """
        axis = self.axis
        gone = {user for member in leaving for user in axis.departing[member].gone}
        axis.acting = self
        axis.handed = leaving
        try:
            for user in axis.users.company(self, gone):
                user.hand_over()
        finally:
            axis.acting = None
            axis.handed = ()

    def hand_over(self) -> None:
        """Lets its optimizer hand over, in a step of another one.

        This is a turn of its own: it adopts the new numbers in the next one.
        """
        if (optimizer := self.optimizer) is not None:
            optimizer()
        self._ahead += 1

    def _await_departure(self, leaving: Sequence[int], step: int) -> None:
        """Leaves where this replica is `leaving`; else waits until all agree on who is left."""
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
        axis = self.axis
        membership = self._membership
        awaited = membership.awaited()
        while True:
            with membership.changed:
                axis.settle()
                if axis.guest is None or not self.expects(step):
                    axis.awaits = -1
                    return
                if axis.awaits < 0:
                    axis.host.tell_entry(
                        axis.guest[1], GuestEntry(self.number, axis.guest[0], step)
                    )
                axis.awaits = axis.guest[1]
            if axis.host.awaits(axis.awaits):  # and nothing is in flight anywhere
                membership.call()
                with membership.changed:
                    membership.changed.wait_for(lambda: axis.guest is None or axis.error, 1.0)
            else:
                membership.require_store()
                awaited.wait(partial(axis.host.not_at, axis.awaits), _POLL_S)

    def _due(self, turn: int) -> list[Agreement]:
        return [each for each in self.pending if turn >= turn_of(each.next_turns, self.number)]

    def _end_others(self, due: Sequence[Agreement], grown: bool) -> None:
        """Counts optimizers as over that some rank has no longer.

        A newcomer has only the one that let it in.
        """
        users = self.axis.users
        for agreement in due:
            users.end_others(agreement.gone)
        if grown:
            users.end_others([each for each in range(len(users.turns)) if each != self.number])

    def _begin(self, step: int) -> None:
        turns = self.turns
        membership = self._membership
        turns.begin(self.turn_of(step), step)
        membership.under_way = membership.under_way or turns.begun > turns.first + 2
