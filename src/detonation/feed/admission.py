"""Replicas that come in while others train: the door of those that train, and the way in for a
newcomer."""

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable
from functools import partial

from torch import nn

from detonation.cluster.survive.agreement import ReplicaLost
from detonation.cluster.survive.elastic_axis import Guest
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.cluster.survive.users import AxisUser
from detonation.core.agreement.safety import Safety
from detonation.core.optimizer.replicated import Replicated
from detonation.feed.follower import Follower
from detonation.feed.publisher import Feed
from detonation.feed.shard import MakeOptimizer
from detonation.feed.token import checked_token
from detonation.log.records import Tapes

_log = logging.getLogger("detonation.feed")


class Admission:
    """Lets replicas come in that ask for it. Each rank of each replica has one, and calls
    `after_step` in its loop.

    The ranks of the first replica that stays open a feed for the newcomer, which takes a copy of
    the state, and follows until all agree on a step. Without a newcomer this costs nothing.

    Args:
        model: The trained model.
        optimizer: Made by `replicate` over an elastic axis.
        host: An address of this machine that newcomers reach; by default that towards the store.
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
                "nobody comes in under several levels: start all replicas with the run"
            )
        if not isinstance(axis, AxisUser):
            raise ValueError(
                "only an elastic axis lets replicas in: make it with detonation.elastic"
            )
        self._model, self._optimizer, self._user, self._axis = model, optimizer, axis, axis.axis
        self._host, self._token = host, None if token is None else checked_token(token)
        self._feed: Feed | None = None
        self._guest = -1
        self._copy_turn = math.inf  # before which the guest gets no copy

    def after_step(self) -> None:
        """Opens a feed where a newcomer asks for it, and closes it once the newcomer is in, or
        gone."""
        guest = self._axis.host.guest
        if self._feed is not None:
            self._feed.flush()  # the last step before the newcomer's must not wait for another
            if self._feed.followers and math.isinf(self._copy_turn):
                turn = self._user.turn_of(self._optimizer.step_count)
                self._copy_turn = self._axis.host.copy_turn(self._guest, turn)
            self._feed.first_copy = self._user.step_of(self._copy_turn)
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

    def _open(self, guest: int) -> None:
        gc.collect()  # a dropped optimizer is none, also where a cycle of references kept it
        if len(self._axis.users.present) > 1:
            raise ValueError(
                "several optimizers use the axis, and a newcomer takes the state of one"
            )
        way = self._axis.way_to(guest)
        host = self._host or ("127.0.0.1" if way is None else way.address)
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._feed = Feed(self._model, self._optimizer, address, token=self._token)
        # the shards of a newcomer step together, from copies of the same step
        self._feed.first_copy = self._copy_turn = math.inf
        self._feed.ahead = self._user.turns_ahead
        self._before = self._optimizer.observer
        self._optimizer.record(
            self._feed if self._before is None else Tapes([self._before, self._feed])
        )
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
    """Comes in as a new replica of a training that goes on elsewhere. Collective over the shards of
    this replica.

    Weights and optimizer state come from a replica with an `Admission`, while it trains on. All
    agree on a step; from there on this replica is one of them: bit for bit, or close where it
    rounds otherwise. Its memory is empty.

    Args:
        model: As the trained one, with any weights; sharded with the mesh of `guest` as the others
            are.
        guest: This replica.
        token: As in `Feed`.
        optimizer: As in `follow`.
        safety: As in `replicate`, the same as that of the others.
        timeout_s: Seconds to wait for each answer of the others.

    Returns:
        The optimizer, at the step at which this replica came in (`step_count`), and the axis.

    Raises:
        ReplicaLost: Nobody has let this replica in in time, training ended before, or the others
            went on without it.
        LostFeed: The feed refuses this replica.
        ValueError: The training is of another model or number of shards, or there is no token or a
            shorter one.

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
            follow = partial(_follow, guest, follower, timeout_s)
            follow("no weights came", lambda: follower.step >= 0)
            guest.ready()
            follow(
                "the others did not agree on a step",
                lambda: guest.entry() is not None or follower.ended,
            )
            if (entry := guest.entry()) is None:
                raise ReplicaLost(
                    f"training ended after {follower.step} steps, before replica {guest.number}"
                    " came in"
                )
            step = entry.step
            # by the turn: after training went back, the same step is another one
            follow(
                f"the weights of step {step} did not come",
                lambda: follower.step == step and follower.ahead == entry.turn - step,
            )
            # with a delay the others receive what is on its way before this replica comes in
            follow(f"the others did not synchronize after step {step}", lambda: follower.complete)
            axis = guest.come_in(entry, timeout_s)
            joined = follower.join(axis, safety)
        joined.verify()  # as the others do
        undo.pop_all()
    return joined, axis


def _follow(
    guest: Guest,
    follower: Follower,
    timeout_s: float,
    late: str,
    has_come: Callable[[], bool],
) -> None:
    """Follows the replica that offers the state, or another one if that is lost, until `has_come`.

    Raises `ReplicaLost` after `timeout_s`, and where the others have gone on without `guest`.
    """
    deadline = time.monotonic() + timeout_s
    while not has_come():
        if time.monotonic() > deadline:
            lost = f": {follower.trouble}" if follower.trouble else ""
            raise ReplicaLost(f"{late} for replica {guest.number} within {timeout_s:g} s{lost}")
        guest.let_in()
        follower.turn_to(guest.addresses(0))
        follower.update(wait_s=0.05)
