"""Replicas that join during training: `Admission` runs on the existing replicas, `admitted` on the
new replica.
"""

import contextlib
import gc
import logging
import math
import time

from torch import nn

from detonation.cluster.position import joined_address
from detonation.cluster.survive.agreement import GuestEntry, ReplicaLost
from detonation.cluster.survive.elastic_axis import Guest
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.cluster.survive.users import AxisUser
from detonation.core.agreement import Safety
from detonation.core.optimizer import Replicated
from detonation.feed.follower import Follower
from detonation.feed.pace import BEFORE_COPY, SharedPace
from detonation.feed.publisher import Feed
from detonation.feed.shared_state import MakeOptimizer
from detonation.feed.token import checked_token
from detonation.log.records import Tapes

_log = logging.getLogger("detonation.feed")
LOOK_S = 1.0
"""Seconds between two looks at what the other shards of a guest need. A look costs a round trip."""


class Admission:
    """Lets new replicas join. Each rank of each replica has one, and calls `after_step` after each
    step.

    The ranks of the first replica open a feed for a new replica. The new replica receives a copy of
    the state, and follows until all replicas agree on the step at which it joins. While no replica
    wants to join, it costs nothing.

    Args:
        model: The trained model.
        optimizer: Made by `replicate` over an elastic axis.
        host: An address of this machine that new replicas can reach; by default the one that
            reaches the store.
        token: As in `Feed`.

    Raises:
        ValueError: The axis is not elastic, there are several levels, or the token is shorter than
            16 bytes.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
        >>> model = nn.Linear(2, 1)
        >>> optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
        >>> door = dt.Admission(model, optimizer)
        >>> optimizer.step(); door.after_step()
        >>> axis.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Replicated,
        host: str = "",
        *,
        token: bytes | None = None,
    ) -> None:
        (axis, _), *others = optimizer.levels
        if others:
            raise ValueError(
                "replicas cannot join a run with several levels: start all replicas with the run"
            )
        if not isinstance(axis, AxisUser):
            raise ValueError(
                "only an elastic axis lets replicas in: make it with detonation.elastic"
            )
        self._model = model
        self._optimizer = optimizer
        self._user = axis
        self._axis = axis.axis
        self._host = host
        self._token = token
        if token is not None:
            checked_token(token)
        self._feed: Feed | None = None
        self._guest = -1
        self._copy_turn = math.inf  # the guest gets no copy before this turn
        self._copies = 0
        self._asked = False  # for the next copy
        self._next_look = 0.0

    def after_step(self) -> None:
        """Opens a feed for a new replica that asks to join, and closes it after the replica has
        joined or is lost.
        """
        guest = self._axis.host.guest
        if self._feed is not None:
            self._feed.flush()  # the new replica needs the last step before joining
            self._agree_on_copy(self._feed)
        if self._feed is not None and guest != self._guest:
            self._optimizer.record(self._before)
            self._feed.close(ended=False, wait_s=0.0)
            self._feed = None
        if guest is not None and guest != self._guest and self._axis.is_first:
            self._guest = guest
            try:
                self._open(guest)
            except (ValueError, OSError) as error:
                _log.warning("replica %d asks to join, but cannot: %s", guest, error)
                self._axis.host.refuse(guest, str(error))

    def _agree_on_copy(self, feed: Feed) -> None:
        """Lets all shards give the new replica a copy of the same step, each time it asks."""
        turn = self._user.turn_of(self._optimizer.step_count)
        if turn >= self._copy_turn:  # on each shard, so all of them count the same copies
            self._copies += 1
            self._copy_turn = math.inf
            self._asked = False
        self._asked |= feed.is_asked
        if not self._asked and self._others_ask():
            # the others lost their connection before the last copy, which only this shard has
            feed.disconnect("another shard of it needs a new copy")
        if self._asked and math.isinf(self._copy_turn):
            self._copy_turn = self._axis.host.copy_turn(self._guest, self._copies, turn)
        feed.first_copy = self._user.step_of(self._copy_turn)

    def _others_ask(self) -> bool:
        """True if the guest waits for the next copy on another shard; asks the store seldom."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        return self._axis.host.others_ask(self._guest, self._copies)

    def _several_optimizers(self) -> bool:
        return sum(not user.turns.over for user in self._axis.users.present) > 1

    def _open(self, guest: int) -> None:
        if self._several_optimizers():
            gc.collect()  # frees dropped optimizers that reference cycles keep alive
        if self._several_optimizers():
            raise ValueError(
                "several optimizers use the axis, but a newcomer can receive the state of one only"
            )
        way = self._axis.way_to(guest)
        host = "127.0.0.1"
        if way is not None:
            host = way.address
        address = joined_address(self._host or host, 0)
        self._feed = Feed(self._model, self._optimizer, address, token=self._token)
        # the shards of the new replica need copies of the same step
        self._feed.first_copy = self._copy_turn = math.inf
        self._copies = 0
        self._asked = False
        self._feed.ahead = self._user.turns_ahead
        self._before = self._optimizer.observer
        if self._before is None:
            self._optimizer.record(self._feed)
        else:
            self._optimizer.record(Tapes([self._before, self._feed]))
        self._axis.host.offer(guest, self._feed.address, self._user.number)


def admitted(
    model: nn.Module,
    guest: Guest,
    *,
    token: bytes | None = None,
    optimizer: MakeOptimizer | None = None,
    safety: Safety | None = None,
    timeout_s: float = 60.0,
) -> tuple[Replicated, SurvivingCommunicator]:
    """Joins a running training as a new replica. Collective over the shards of this replica.

    A replica with an `Admission` sends weights and optimizer state while it continues to train. All
    replicas agree on a step. From this step on the new replica is bitwise equal to the other
    replicas, or close to them if it rounds differently. Its memory is empty.

    Args:
        model: Like the trained one, with any weights; sharded like the others, with the mesh of
            `guest`.
        guest: This replica.
        token: As in `Feed`.
        optimizer: As in `follow`.
        safety: As in `replicate`, equal to that of the others.
        timeout_s: Seconds to wait for each answer of the others.

    Returns:
        The optimizer, at the step at which this replica joined (`step_count`), and the axis.

    Raises:
        ReplicaLost: No replica has answered in time, training ended before, or the others continued
            without this replica.
        LostFeed: The feed refuses this replica.
        ValueError: The training is of another model or number of shards, or the token is missing or
            too short.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> store = dist.HashStore()
        >>> axis = dt.elastic(replica=0, replicas=1, store=store)
        >>> model, guest, token = nn.Linear(2, 1), dt.Guest(store), b"0123456789abcdef"
        >>> dt.admitted(model, guest, token=token, timeout_s=0.1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        detonation.cluster.survive.agreement.ReplicaLost: no replica has let replica 1 in within ...
        >>> axis.close()
    """
    token = checked_token(token)
    with contextlib.ExitStack() as undo:
        undo.callback(guest.membership.stop)
        with Follower(
            model, guest.addresses(timeout_s), token, optimizer, 64, joins=True
        ) as follower:
            arrival = _Arrival(guest, follower, timeout_s)
            axis = None
            while axis is None:
                entry = arrival.next_entry()
                axis = guest.come_in(entry, timeout_s, arrival.reaches(entry))
                if axis is None:  # a shard lacked the state, so the others have gone on
                    arrival.start_over()
            joined = follower.join(axis, safety)
        joined.verify()  # collective: the other replicas call verify at this step
        undo.pop_all()
    return joined, axis


class _Arrival:
    """A guest that follows training until the step at which it joins.

    Its state comes from one replica. If that replica is lost, one of its connections is lost, or
    training goes back, the guest needs a new copy. It tells this to the others, so that they do not
    wait for it.
    """

    def __init__(self, guest: Guest, follower: Follower, timeout_s: float) -> None:
        self._guest = guest
        self._follower = follower
        self._timeout_s = timeout_s
        self._is_ready = False
        self._pace = SharedPace(guest.membership)
        self._copy_at_entry = 0

    def next_entry(self) -> GuestEntry:
        """Follows until the others wait for this guest before the step that it returns."""
        deadline = time.monotonic() + self._timeout_s
        while (entry := self._guest.entry()) is None:
            if self._follower.ended:
                raise ReplicaLost(
                    f"training ended after {self._follower.step} steps, before replica"
                    f" {self._guest.number} came in"
                )
            if self._announces_change():
                deadline = time.monotonic() + self._timeout_s
            late = "no weights came"
            if self._is_ready:
                late = "the others did not agree on a step"
            self._follow(deadline, late)
        return entry

    def reaches(self, entry: GuestEntry) -> bool:
        """Follows to the state at `entry`; returns False if that state cannot come."""
        deadline = time.monotonic() + self._timeout_s
        pace = self._pace
        self._copy_at_entry = pace.copy
        while not self._is_at(entry):
            if pace.copy > self._copy_at_entry:
                return False
            # after `ready`, it may have turned to a next copy, which cannot come while all wait
            if not self._is_ready or pace.limit == BEFORE_COPY:
                pace.close()  # another shard may wait for what this one receives
                return False
            if not entry.is_at(entry.step, self._follower.ahead):
                pace.close()
            late = f"the weights of step {entry.step} did not come"
            if self._follower.step == entry.step:
                # the other replicas end open rounds, and receive all messages in flight
                late = f"the others did not synchronize after step {entry.step}"
            self._follow(deadline, late)
        return True

    def _is_at(self, entry: GuestEntry) -> bool:
        follower = self._follower
        return entry.is_at(follower.step, follower.ahead) and follower.complete

    def start_over(self) -> None:
        """Asks for a new copy of the state, on each shard, because loading one is collective."""
        self._is_ready = False
        if self._pace.copy == self._copy_at_entry:
            self._pace.close()

    def _announces_change(self) -> bool:
        """Tells the others whether this guest may join; returns True if that has changed."""
        if self._has_copy() == self._is_ready:
            return False
        self._is_ready = not self._is_ready
        if self._is_ready:
            self._guest.ready()
        else:
            self._guest.withdraw()
        return True

    def _has_copy(self) -> bool:
        """True if all shards have a copy that a member gives, and each later step follows."""
        pace = self._pace
        given = self._guest.giver in self._guest.members
        return pace.limit > BEFORE_COPY and not pace.is_final and self._follower.current and given

    def _follow(self, deadline: float, late: str) -> None:
        """Follows the replica that offers the state; if that one is lost, the next one.

        Raises `ReplicaLost` after `deadline`, or if the others have continued without the guest.
        """
        guest = self._guest
        follower = self._follower
        if time.monotonic() > deadline:
            lost = ""
            if follower.trouble:
                lost = f": {follower.trouble}"
            raise ReplicaLost(
                f"{late} for replica {guest.number} within {self._timeout_s:g} s{lost}"
            )
        guest.let_in()
        self._keep_pace()
        if follower.trouble and not follower.ended:  # a training that has ended says so itself
            guest.hosts.require()

    def _needs_copy(self) -> bool:
        """True if the copy is of no use: no later step follows, or a member no longer gives it."""
        if self._has_copy():
            return False
        guest = self._guest
        follower = self._follower
        given = guest.giver in guest.members
        return (
            follower.lost
            or guest.latest_addresses() != follower.address
            or (not given and follower.received > BEFORE_COPY)
        )

    def _keep_pace(self) -> None:
        """Applies what all shards have received. Asks for a new copy if one of them needs it."""
        pace = self._pace
        follower = self._follower
        if self._needs_copy():
            pace.close()
        pace.exchange(follower.received)
        follower.limit = pace.limit
        follower.update(wait_s=0.01)
        if pace.is_over:
            pace.next_copy()
            follower.limit = BEFORE_COPY
            follower.turn_to(self._guest.latest_addresses())
