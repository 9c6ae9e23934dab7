"""Lets replicas join during training: `Admission` runs on the existing replicas, `admitted` on the
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
"""Seconds between two checks whether another shard of the joining replica (guest) needs a new copy
of the state. Each check costs a round trip to the store.
"""


class Admission:
    """Lets new replicas join a running training. Each rank of each replica has an `Admission`, and
    calls its `after_step` after each step.

    The ranks of the first replica open a feed for a new replica. The new replica receives a copy of
    the training state. It follows each later step until all replicas agree on the step at which it
    joins. While no replica wants to join, an `Admission` costs no time.

    Args:
        model: The trained model.
        optimizer: Made by `replicate` over an elastic axis.
        host: An address of this machine that new replicas can reach; by default the address that
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
                "only an elastic axis lets replicas in: make the axis with detonation.elastic"
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
        # turn of the optimizer (see `Turns`) after which the new replica gets a copy of the state
        self._copy_turn = math.inf
        self._copies = 0
        self._asked = False  # True if the new replica has asked for its next copy of the state
        self._next_look = 0.0

    def after_step(self) -> None:
        """Opens a feed for a new replica that asks to join. Closes the feed after this replica has
        joined or is lost.
        """
        guest = self._axis.host.guest
        if self._feed is not None:
            # send queued steps now: the new replica joins only after it has received the last step
            self._feed.flush()
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
        """Agrees with the other shards on a step after which each shard sends the new replica a
        copy of the state. The shards agree on a later step if the new replica asks for another
        copy.
        """
        turn = self._user.turn_of(self._optimizer.step_count)
        # all shards send each copy after the same step, so `_copies` is equal on all shards
        if turn >= self._copy_turn:
            self._copies += 1
            self._copy_turn = math.inf
            self._asked = False
        self._asked |= feed.is_asked
        if not self._asked and self._others_ask():
            # if one shard of the new replica needs a new copy of the state, all its shards need one
            feed.disconnect("another shard of this replica needs a new copy of the state")
        if self._asked and math.isinf(self._copy_turn):
            self._copy_turn = self._axis.host.copy_turn(self._guest, self._copies, turn)
        feed.first_copy = self._user.step_of(self._copy_turn)

    def _others_ask(self) -> bool:
        """True if another shard of the joining replica (guest) waits for the next copy of the
        state. Asks the store at most once per `LOOK_S` seconds.
        """
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        return self._axis.host.others_ask(self._guest, self._copies)

    def _several_optimizers(self) -> bool:
        return sum(not user.turns.over for user in self._axis.users.present) > 1

    def _open(self, guest: int) -> None:
        if self._several_optimizers():
            gc.collect()  # frees unused optimizers that only reference cycles keep alive
        if self._several_optimizers():
            raise ValueError(
                "several optimizers use the axis, but a joining replica can receive the state of"
                " only one: keep one optimizer on the axis"
            )
        way = self._axis.way_to(guest)
        host = "127.0.0.1"
        if way is not None:
            host = way.address
        address = joined_address(self._host or host, 0)
        self._feed = Feed(self._model, self._optimizer, address, token=self._token)
        # no shard sends a copy of the state before all shards have agreed on its step
        self._feed.first_copy = self._copy_turn = math.inf
        self._copies = 0
        self._asked = False
        self._feed.ahead = self._user.turns_ahead
        self._feed.has_joined = lambda: guest in self._axis.layout
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
    """Joins a running training as a new replica. Collective over the shards of this new replica.

    A replica with an `Admission` sends weights and optimizer state while it continues to train. All
    replicas agree on the step at which the new replica joins. From this step on the new replica is
    bitwise equal to the other replicas, or close to them if it rounds differently. Its memory of
    unsent values is empty at this step.

    Args:
        model: A model like the trained one, with any weights. If the replicas are sharded, shard
            the model in the same way, with the mesh of `guest`.
        guest: This replica.
        token: As in `Feed`.
        optimizer: As in `follow`.
        safety: As in `replicate`, equal to that of the other replicas.
        timeout_s: Seconds to wait for each answer of the other replicas.

    Returns:
        The optimizer, at the step at which this replica joined (`step_count`), and the axis.

    Raises:
        ReplicaLost: No replica answered in time, training ended, or the other replicas continued
            without this replica.
        LostFeed: The feed refuses this replica.
        ValueError: Training has another model or number of shards, or the token is missing or too
            short.

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
                # if one shard of this replica lacked the training state, all shards join later
                if axis is None:
                    arrival.start_over()
            joined = follower.join(axis, safety)
        joined.verify()  # `verify` is collective: the other replicas call it at this step, too
        undo.pop_all()
    return joined, axis


class _Arrival:
    """A joining replica (guest) that follows training until the step at which it joins.

    The guest receives the training state from one replica. The guest needs a new copy of the state
    if that replica is lost, if a connection to it is lost, or if training returns to an earlier
    step. The guest tells the existing replicas that it needs a new copy, so that they do not wait
    for the guest.
    """

    def __init__(self, guest: Guest, follower: Follower, timeout_s: float) -> None:
        self._guest = guest
        self._follower = follower
        self._timeout_s = timeout_s
        self._is_ready = False
        self._pace = SharedPace(guest.membership)
        self._copy_at_entry = 0

    def next_entry(self) -> GuestEntry:
        """Follows training until the existing replicas wait for this joining replica. Returns the
        step before which they wait.
        """
        deadline = time.monotonic() + self._timeout_s
        while (entry := self._guest.entry()) is None:
            if self._follower.ended:
                raise ReplicaLost(
                    f"training ended after {self._follower.step} steps, before replica"
                    f" {self._guest.number} joined"
                )
            if self._announces_change():
                deadline = time.monotonic() + self._timeout_s
            late = "no weights came"
            if self._is_ready:
                late = "the other replicas did not agree on a step"
            self._follow(deadline, late)
        return entry

    def reaches(self, entry: GuestEntry) -> bool:
        """Follows training up to the state at `entry` (the step at which this replica joins).
        Returns False if this state cannot arrive any more.
        """
        deadline = time.monotonic() + self._timeout_s
        pace = self._pace
        self._copy_at_entry = pace.copy
        while not self._is_at(entry):
            if pace.copy > self._copy_at_entry:
                return False
            # All other replicas now wait for this replica, so they send neither steps nor copies.
            # If this replica still needs a copy of the state, it must not wait for the copy here.
            if not self._is_ready or pace.limit == BEFORE_COPY:
                # tells the other shards of this replica not to wait for later steps of this shard
                pace.close()
                return False
            if not entry.is_at(entry.step, self._follower.ahead):
                pace.close()
            late = f"the weights of step {entry.step} did not arrive"
            if self._follower.step == entry.step:
                # before a replica joins, the other replicas call `synchronize` to end open rounds
                late = f"the other replicas did not synchronize after step {entry.step}"
            self._follow(deadline, late)
        return True

    def _is_at(self, entry: GuestEntry) -> bool:
        follower = self._follower
        return entry.is_at(follower.step, follower.ahead) and follower.admits

    def start_over(self) -> None:
        """Asks for a new copy of the state. Each shard of this replica asks, because all shards
        must load a copy together.
        """
        self._is_ready = False
        if self._pace.copy == self._copy_at_entry:
            self._pace.close()

    def _announces_change(self) -> bool:
        """Tells the existing replicas whether this replica is ready to join. Returns True if this
        replica has become ready since the last call, or has stopped being ready.
        """
        if self._has_copy() == self._is_ready:
            return False
        self._is_ready = not self._is_ready
        if self._is_ready:
            self._guest.ready()
        else:
            self._guest.withdraw()
        return True

    def _has_copy(self) -> bool:
        """True if all shards of this replica have a copy of the state, the replica that sent the
        copy still trains, and each later step arrives.
        """
        pace = self._pace
        given = self._guest.giver in self._guest.members
        return pace.limit > BEFORE_COPY and not pace.is_final and self._follower.current and given

    def _follow(self, deadline: float, late: str) -> None:
        """Follows the replica that offers the training state; if that replica is lost, follows the
        next replica that offers it.

        Raises `ReplicaLost` after `deadline`, or if the existing replicas have continued without
        this joining replica.
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
        # after the end of training, the loop of `next_entry` raises the error
        if follower.trouble and not follower.ended:
            guest.hosts.require()

    def _needs_copy(self) -> bool:
        """True if this shard needs a new copy of the state: later steps do not arrive any more, or
        the replica that sends them has left training.
        """
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
        """Applies the steps that all shards of this replica have received. If any shard needs a new
        copy of the state, all shards ask for a new copy.
        """
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
