"""The users of an elastic axis on one rank: its optimizers, the `Host` that lets a new replica
join, and the exchange of texts between ranks.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakMethod

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from detonation.cluster.processes.failure import describe, is_network_error
from detonation.cluster.survive.agreement import (
    Agreement,
    GuestEntry,
    ReplicaLeft,
    ReplicaLost,
    axis_key,
    ranks_of_replicas,
)
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.turns import due_before, leaving_before
from detonation.core.base_error import DetonationError
from detonation.core.link import ElasticCommunicator, HandOver, PeerLost

_TEXT_POLL_S = 0.01
_TEXT = b"+"
_LOST = b"-"


class StoreTexts:
    """Gathers texts from the ranks of all `members` through the store. Only one thread may use this
    object at a time.

    The store keeps the first value of a key. So if a rank is lost, either all remaining ranks get
    the text of the lost rank, or none of them does. No other exchange of texts may have the same
    name `channel`.
    """

    def __init__(self, membership: Membership, members: Sequence[int], channel: str) -> None:
        self._membership = membership
        self._channel = channel
        self._count = 0
        # each thread needs its own connection to the store
        self._store: Store = membership.store.clone()  # type: ignore[attr-defined]
        self._ranks = ranks_of_replicas(members, membership.shards)
        self.rank = self._ranks.index(membership.rank)
        self.world_size = len(self._ranks)

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in the order of the ranks. Collective.

        Raises `PeerLost` on all remaining ranks if a rank is lost before its text arrives.
        """
        self._count += 1
        keys = [self._key(self._count, rank) for rank in self._ranks]
        self._first(keys[self.rank], _TEXT + text.encode(errors="surrogateescape"))
        awaited = self._membership.awaited()
        while not self._store.check(keys):
            for rank, key in zip(self._ranks, keys, strict=True):
                if rank // self._membership.shards not in self._membership.members:
                    self._first(key, _LOST)
            self._membership.call_if_left()
            awaited.wait(partial(self._away, keys), _TEXT_POLL_S)
        values = self._store.multi_get(keys)
        if self._count > 1:  # all ranks have read the previous texts, so delete this rank's text
            self._store.delete_key(self._key(self._count - 1, self._ranks[self.rank]))
        if any(value[:1] == _LOST for value in values):
            raise PeerLost("a replica was lost meanwhile")
        return [value[1:].decode(errors="surrogateescape") for value in values]

    def broadcast(self, text: str) -> str:
        """Returns the text of the first rank. Collective, like `gather`."""
        if self.rank:
            text = ""
        return self.gather(text)[0]

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
    """Writes to the store, on one rank of a replica that trains, what a joining replica (guest)
    needs.
    """

    door = -1
    """Number of the optimizer that lets in the joining replica on which all ranks have agreed; -1
    at first.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @property
    def guest(self) -> int | None:
        """The replica that asks to join, or that waits for the step at which it joins; None if
        there is no such replica.
        """
        if self.membership.guest_asks:
            return self.membership.guest
        return None

    def offer(self, guest: int, address: str, user: int) -> None:
        """Writes to the store what the joining replica `guest` needs. `address` is the address of
        the feed that sends the training state of this shard. `user` is the number of the optimizer
        before whose step the replica joins.
        """
        store = self.membership.store
        # write the key `door` first: after the guest has read `feed`, all ranks read `door`
        store.set(axis_key("door", guest), str(user))
        feed = axis_key("feed", guest, self.membership.shard)
        store.set(feed, f"{self.membership.replica} {address}")

    def refuse(self, guest: int, reason: str) -> None:
        """Tells the joining replica `guest` the `reason` why it cannot join."""
        self.membership.store.set(axis_key("refused", guest), reason)

    def door_of(self, guest: int) -> int:
        """Returns the number of the optimizer that lets the joining replica `guest` in."""
        store = self.membership.store
        key = axis_key("door", guest)
        if store.check([key]):
            return int(store.get(key))
        return 0

    def tell_entry(self, guest: int, entry: GuestEntry) -> None:
        """Writes for the joining replica `guest` the optimizer, turn and step before which this
        replica joins. The members now begin to wait for this replica.
        """
        told = f"{entry.user} {entry.turn} {entry.step}"
        self.membership.store.set(axis_key("entry", guest), told)

    def awaits(self, guest: int, turn: str) -> bool:
        """Announces that this rank has reached `turn`, the optimizer step before which the replica
        `guest` joins. Returns True once all ranks of all members have reached `turn`.
        """
        self.membership.store.set(axis_key("at", guest, self.membership.rank), turn)
        return not self.not_at(guest, turn)

    def not_at(self, guest: int, turn: str) -> list[int]:
        """Returns the ranks that have not reached `turn`, among the ranks of all members. The
        replica `guest` joins before the optimizer step `turn`.
        """
        store = self.membership.store
        ranks = ranks_of_replicas(self.membership.members, self.membership.shards)
        keys = {rank: axis_key("at", guest, rank) for rank in ranks}
        if not store.check([*keys.values()]):
            return [rank for rank, key in keys.items() if not store.check([key])]
        # the key of a rank may still hold the turn of an earlier entry, which was postponed
        return [rank for rank, key in keys.items() if store.get(key).decode() != turn]

    def copy_turn(self, guest: int, number: int, turn: int) -> float:
        """All shards of this replica send a copy of the training state to the joining replica
        `guest` after the same turn (step of the optimizer). Returns this turn for copy `number`.
        Returns infinity while a shard of `guest` does not wait for this copy yet.

        The shards of this replica are in the same turn or one turn apart. So with several shards
        the copy is made one turn later than with one shard.
        """
        store = self.membership.store
        shard = self.membership.shard
        shards = self.membership.shards
        copy = axis_key("copy", guest, self.membership.replica, number)
        coming = self._coming(guest, number)
        store.set(coming[shard], "1")
        if shard == 0 and store.check(coming):
            ahead = 1 + (shards > 1)
            store.compare_set(copy, "", str(turn + ahead))
        if store.check([copy]):
            return int(store.get(copy))
        return math.inf

    def others_ask(self, guest: int, number: int) -> bool:
        """True if another shard of the joining replica `guest` waits for copy `number` of the
        training state.
        """
        store = self.membership.store
        coming = self._coming(guest, number)
        del coming[self.membership.shard]
        return any(store.check([key]) for key in coming)

    def _coming(self, guest: int, number: int) -> list[str]:
        # keys have the ranks of this replica, so another replica that sends copies has other keys
        ranks = ranks_of_replicas([self.membership.replica], self.membership.shards)
        return [axis_key("coming", guest, rank, number) for rank in ranks]


class AxisEnd(ElasticCommunicator):
    """The communicator of one user of an elastic axis, such as an optimizer, on one rank.

    layout: the replicas that this user counts as members, by their numbers at the start of the run.
    adopted: the turn (step of the optimizer) from which the user uses this layout. pending:
    agreements on members that the user does not use yet. name: the first part of the names of its
    text channels.
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

    def explain(self, error: BaseException) -> None:
        membership = self.axis.host.membership
        # only collectives between the shards of a replica end with errors of the network library
        has_shards = membership.shards > 1
        if has_shards and is_network_error(error) and not isinstance(error, DetonationError):
            raise ReplicaLost(
                f"replica {membership.replica} is lost, because a collective between its shards"
                f" failed: {describe(error)}"
            ) from error

    def texts(self) -> StoreTexts:
        self.channels += 1
        channel = f"{self.layout}/{self.adopted}/{self.name}{self.channels}"
        return StoreTexts(self.axis.host.membership, self.layout, channel)

    def take(self, due: Sequence[Agreement], members: list[int], turn: int) -> None:
        """Uses the replicas `members` from `turn` (a step of the optimizer) on, because the
        agreements `due` take effect before this turn.
        """
        self.pending = [each for each in self.pending if each not in due]
        self.layout = members
        self.replica = members.index(self.axis.host.membership.replica)
        self.channels = 0
        # part of each channel name: it distinguishes two times at which the members are the same
        self.adopted = turn


class AxisUser(AxisEnd):
    """The communicator of one optimizer on an elastic axis. If the members change, the optimizer
    uses the new members from its own next step on.

    Until this step the optimizer counts a lost replica as absent. Several optimizers on the axis
    may be in different steps. All ranks create the optimizers in the same order.

    turns: progress of the optimizer. optimizer: the method of the optimizer that hands over its
    unsent state; None if there is no such method.
    """

    def __init__(self, axis: "SurvivingCommunicator", hand_over: HandOver | None) -> None:
        self.number = axis.users.next_number()
        self.turns = axis.users.turns[self.number]
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
        """True unless the program has dropped the optimizer."""
        return self._optimizer is None or self._optimizer() is not None

    def turn_of(self, step: int) -> int:
        """Returns the turn (a step number that never falls) in which the optimizer takes `step`."""
        return self.turns.of(step)

    def turns_ahead(self) -> int:
        """Returns the number of a turn (a step number that never falls) minus the number of its
        step. The difference changes when training goes back or forward.
        """
        return self.turns.ahead

    def step_of(self, turn: float) -> float:
        """Returns the step that the optimizer takes in `turn` (a step number that never falls). The
        result holds unless training goes back or forward before this turn.
        """
        return turn - self.turns.ahead

    def resume_at(self, step: int) -> None:
        self.turns.resume_at(step)

    def trains(self, tensors: Collection[Tensor]) -> None:
        self.axis.users.note_trained(self.number, tensors)

    def expects(self, step: int) -> bool:
        return self.lets_in and self._has_guest(step)

    def _has_guest(self, step: int) -> bool:
        """True if all ranks have agreed that a replica joins before `step`. Also True for a join
        before an earlier step that this optimizer has not begun.
        """
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
        # if `acting` is another optimizer, the leaving replicas leave in a step of that optimizer
        if self.axis.acting not in (None, self):
            return []
        leave = leaving_before(self.axis.departing, self.number, self.turn_of(step))
        return [self.layout.index(member) for member in leave if member in self.layout]

    def handing_over(self) -> list[int]:
        return [self.layout.index(each) for each in self.axis.handed if each in self.layout]

    def adopt(self, step: int) -> list[int]:
        leaving = [self.layout[number] for number in self.leaving(step)]
        if leaving:
            self._let_all_hand_over(leaving)
        self._await_departure(leaving, step)
        self._await_guest(step)
        return self.begin_with_members(step, leaving)

    def begin_with_members(self, step: int, left: Sequence[int] = ()) -> list[int]:
        """Uses from now on the members on which all ranks agreed for `step`, and begins this step.
        Returns the earlier members that stay, by their earlier index.

        left: replicas that have left before this step.
        """
        # hold the lock, so that no report sees the new members before the step has begun
        with self._membership.changed:
            self.axis.settle()
            self.axis.forget_departed(left)
            turn = self.turn_of(step)
            due = self._due(turn)
            members = self.layout
            if due:
                members = due[-1].members
            kept = [number for number, member in enumerate(self.layout) if member in members]
            if not due or due[-1] in self.axis.pending:
                # the first optimizer that uses the new members sets them for the axis, too
                self.axis.take(due, members, turn)
            self.take(due, members, turn)
            self._end_others(due, grown=len(members) > len(kept))
            self._begin(step)
        return kept

    def _let_all_hand_over(self, leaving: Sequence[int]) -> None:
        """Makes all other optimizers hand over the unsent state of the replicas `leaving`.
        Collective.

        All ranks are in the same step of this optimizer, so each other optimizer is between two
        steps.
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
        """Makes the optimizer hand over its unsent state during a step of another optimizer.

        The hand-over counts as a turn (step) of the optimizer. In its next turn the optimizer uses
        the new members.
        """
        if (optimizer := self.optimizer) is not None:
            optimizer()
        self.turns.ahead += 1

    def _await_departure(self, leaving: Sequence[int], step: int) -> None:
        """Ends this replica if it is one of the replicas `leaving`. Otherwise waits until all ranks
        have agreed on members without the replicas `leaving`.

        Raises `ReplicaLeft` on a replica that leaves.
        """
        if self._membership.replica in leaving:
            self._membership.store.set(axis_key("asked", self._membership.rank), "1")
            self._membership.await_shards(self.axis.timeout_s)
            self.axis.close(0)
            raise ReplicaLeft(
                f"replica {self._membership.replica} has left after step {step}, as it was asked to"
            )
        while any(member in self._membership.members for member in leaving):
            self._membership.call_if_left()
            time.sleep(_POLL_S)

    def _await_guest(self, step: int) -> None:
        """If a replica joins before `step`, waits until all ranks have agreed whether this replica
        is a member now.
        """
        axis = self.axis
        membership = self._membership
        awaited = membership.awaited()
        while True:
            with membership.changed:
                axis.settle()
                if axis.guest is None or not self.expects(step):
                    axis.awaits = -1
                    return
                turn, guest = axis.guest
                entry = GuestEntry(self.number, turn, step)
                if axis.awaits < 0:
                    axis.host.tell_entry(guest, entry)
                axis.awaits = guest
            # once all ranks wait before this step, no collective is running
            if axis.host.awaits(guest, entry.turn_in_words):
                membership.call()
                with membership.changed:
                    membership.changed.wait_for(lambda: axis.guest is None or axis.error, 1.0)
            else:
                membership.require_store()
                awaited.wait(partial(axis.host.not_at, guest, entry.turn_in_words), _POLL_S)

    def _due(self, turn: int) -> list[Agreement]:
        return due_before(self.pending, self.number, turn)

    def _end_others(self, due: Sequence[Agreement], grown: bool) -> None:
        """Marks optimizers as over (no longer in use) if at least one rank lacks them.

        grown: True if a replica joins. The joining replica has only this optimizer, which let it
        in, so all other optimizers are then over.
        """
        users = self.axis.users
        for agreement in due:
            users.end_others(agreement.gone)
        if grown:
            users.end_others([each for each in range(len(users.turns)) if each != self.number])

    def _begin(self, step: int) -> None:
        # a replica joins before this turn, but not now: no rank may count the turn as begun
        if self._has_guest(step) and not self.lets_in:
            return
        turns = self.turns
        membership = self._membership
        turns.begin(step)
        membership.under_way = membership.under_way or turns.begun > turns.first + 2
