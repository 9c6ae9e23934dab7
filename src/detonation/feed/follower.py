"""`follow`: keeps the exact weights of a running training in another process."""

import hashlib
import math
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

from torch import nn
from torch.distributed.tensor import DTensor

from detonation.cluster.position import host_and_port
from detonation.core.agreement import Safety
from detonation.core.flat.tensors import digest, local
from detonation.core.link import Axis
from detonation.core.optimizer import Replicated, local_parameters
from detonation.feed.pace import BEFORE_COPY, NO_LIMIT, Point
from detonation.feed.shard import (
    Moment,
    ShardFollower,
    joined_optimizer,
    reachable_moments,
)
from detonation.feed.shared_state import MakeOptimizer
from detonation.feed.stream import Joined, Stepped, Stream, close_all
from detonation.feed.token import LostFeed, checked_token
from detonation.feed.weights.folders import Folder, folder_at
from detonation.feed.weights.weight_follower import WeightFollower

LARGEST_STATE = 24
"""Largest ratio of the bytes of a training state to the bytes of the model. The largest known case
is 18: bf16 weights with fp32 moments, anchor and momentum.
"""


class Follower(AbstractContextManager["Follower"]):
    """Keeps the weights of training in a model of this process. `follow` creates it.

    Only `update` changes the model, so this process may use the model between two calls of
    `update`. If other threads use the model, let them share a lock with the thread that calls
    `update`.

    model, address: arguments of `follow`. step: the step of training; -1 before the first copy of
    the state. limit: `update` applies no received step after this point of training.
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        token: bytes,
        make: MakeOptimizer | None,
        behind: int,
        joins: bool = False,
    ) -> None:
        self.model = model
        self._token = token
        self._make = make
        self._most_behind = behind
        self._joins = joins
        self.address = address
        self._addresses = [host_and_port(each) for each in address.split(",")]
        self._changed = threading.Condition()
        meshes = [p.device_mesh for p in local_parameters(model).values() if isinstance(p, DTensor)]
        self._own_shard: int | None = None
        if meshes:
            self._own_shard = max(meshes, key=lambda mesh: mesh.size()).get_local_rank()
        self._shards = [ShardFollower(model, bool(meshes), make, joins)]
        self._streams = [self._stream(self._own_shard or 0)]
        weakref.finalize(self, close_all, self._streams)
        self._seen = self._came()
        self.step = -1
        self.limit = NO_LIMIT

    @property
    def about(self) -> dict[str, Any]:
        """Values that the feed publishes for its followers, for example the configuration of the
        run.
        """
        return dict(self._shards[0].about.get("about", {}))

    @property
    def ahead(self) -> int:
        """The optimizer's turn in training minus its step (see `Turns`). The feed sends this
        difference with each copy of the state. 0 if the feed does not let replicas join.
        """
        return int(self._shards[0].about.get("ahead", 0))

    @property
    def bytes_received(self) -> int:
        """Bytes received from the feed, including copies of the state."""
        return sum(stream.bytes_received for stream in self._streams)

    @property
    def joins(self) -> int:
        """Number of received copies of the training state: one at the start, and one after each
        lost connection.
        """
        return self._streams[0].joins

    @property
    def behind(self) -> int:
        """Number of received steps that `update` has not applied yet."""
        with self._changed:
            return sum(isinstance(event, Stepped) for event in self._streams[0].inbox)

    @property
    def ended(self) -> bool:
        """True after training has ended and the model has its final weights."""
        with self._changed:
            return all(
                stream.ended and stream.current and not stream.inbox for stream in self._streams
            )

    @property
    def current(self) -> bool:
        """True if a copy of the state has arrived, and the same connection still brings each later
        step.
        """
        return all(stream.current for stream in self._streams)

    @property
    def received(self) -> Point:
        """The last point of training that has arrived from all shards of the present feeds: a step,
        and the number of `synchronize` calls after that step. `BEFORE_COPY` before the copies of
        the state have arrived.
        """
        with self._changed:
            return min(self._received(*pair) for pair in self._pairs())

    @property
    def lost(self) -> bool:
        """True if this follower will join as a replica and has lost a connection. Such a follower
        does not reconnect: only `turn_to` makes new connections.
        """
        return any(stream.lost for stream in self._streams)

    @property
    def complete(self) -> bool:
        """True if no round is open and all messages of earlier steps have arrived. Under a scheme
        with rounds, the value is True only after training has called `synchronize`.
        """
        return all(shard.complete for shard in self._shards)

    @property
    def admits(self) -> bool:
        """True if training has reached the step of this follower, and waits there for a replica
        that joins.
        """
        return all(shard.admits for shard in self._shards)

    @property
    def trouble(self) -> str:
        """The reason why a connection was last lost; "" if no connection has been lost."""
        return next((stream.trouble for stream in self._streams if stream.trouble), "")

    @property
    def fingerprint(self) -> str:
        """Sha256 (hex) of the weights. It equals `detonation.fingerprint` on the replicas at the
        same step.
        """
        digests = (
            bytes.fromhex(digest(local_parameters(shard.module).values())) for shard in self._shards
        )
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def update(self, to: int | None = None, wait_s: float | None = None) -> int:
        """Applies the received steps to the model; returns `step`.

        After a lost connection the model may return to an earlier step, because training may have
        restarted from a checkpoint.

        If training calls `synchronize` after step `to`, `update(to=...)` may leave the model with
        the weights from before that call, because the follower learns of the call only when the
        messages of the call arrive. If the scheme has rounds, call
        `update(wait_s=...)` again until `complete` is True. The model then has the weights after
        `synchronize`.

        Args:
            to: Apply the steps up to step `to`, and wait for step `to`.
            wait_s: Longest wait in seconds: for any new step (by default 0) or, with `to`, for step
                `to` (by default no limit).

        Raises:
            LostFeed: The feed refuses this follower, ends before `to` or without sending the final
                weights, or training is past `to`.
            ValueError: Training has another model, or this process would round differently.
        """
        if wait_s is None and to is not None:
            deadline = None
        else:
            deadline = time.monotonic() + (wait_s or 0.0)
        while True:
            moved = self._advance(to)
            if to is not None and self.step > to:
                raise LostFeed(
                    f"training was at step {self.step} already when its state arrived, so update"
                    f" cannot return to step {to}"
                )
            if self.step == to or (moved and to is None):
                return self.step
            if not self._wait(deadline, to):
                return self.step

    def join(self, axis: Axis, safety: Safety | None = None) -> Replicated:
        """Continues as a replica along `axis`. Returns an optimizer over the model's parameters
        that has the received state.

        The new replica's memory of unsent values is empty, because the existing replicas keep their
        own unsent values. `join` compares the replicas before it returns. So the existing replicas
        must call `Replicated.resume_at` at this step, and other new replicas must call `join`. Do
        not call `update` after `join`, unless you use the optimizer only to save its state. If a
        message is in flight, a single new replica continues without the update of this message.
        See `replicate` for the arguments.

        Raises:
            LostFeed: No state was received yet.
            ValueError: Training has several shards, but the model is whole: make it with
                `detonation.shard` first, unless `axis` has one replica. A message is in flight, and
                `axis` has several replicas.
            Mismatch: The replicas differ.
        """
        if self.step < 0:
            raise LostFeed("no copy of the training state has arrived yet: call update before join")
        return joined_optimizer(self.model, self._shards, self._make, axis, safety or Safety())

    def turn_to(self, address: str) -> None:
        """Follows the same training through the feed at `address` from now on. First receives a
        copy of the state from this feed.
        """
        self.address = address
        self._addresses = [host_and_port(each) for each in address.split(",")]
        close_all(self._streams)
        self._streams[:] = [self._stream(self._own_shard or 0)]
        del self._shards[1:]

    def close(self) -> None:
        """Stops following training; the model keeps its weights."""
        close_all(self._streams)

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _stream(self, shard: int) -> Stream:
        tensors = *self.model.parameters(), *self.model.buffers()
        nbytes = sum(local(tensor).nbytes for tensor in tensors)
        most_bytes = LARGEST_STATE * nbytes + (64 << 20)
        if len(self._addresses) == 1:
            host = self._addresses[0][0]
            port = self._addresses[0][1] + shard
        elif shard < len(self._addresses):
            host, port = self._addresses[shard]
        else:
            raise ValueError(
                f"{len(self._addresses)} addresses were given, but training has {shard + 1} shards"
                " or more: give one address for each shard, or only that of shard 0"
            )
        return Stream(
            host,
            port,
            self._token,
            most_bytes,
            self._most_behind,
            self._changed,
            reconnects=not self._joins,
        )

    def _received(self, shard: ShardFollower, stream: Stream) -> Point:
        if not stream.came:
            return BEFORE_COPY
        moment = reachable_moments(shard.moment, stream.inbox)[-1]
        assert moment is not None
        return moment[1:]

    def _wait(self, deadline: float | None, to: int | None) -> bool:
        """Waits until an event arrives from the feed; returns False if no event can arrive before
        `deadline`.
        """
        with self._changed:
            for stream in self._streams:
                if stream.refusal is not None:
                    raise LostFeed(str(stream.refusal)) from stream.refusal
                if stream.gone and any(other.ended for other in self._streams):
                    raise LostFeed(
                        "training has ended, and the feed of one of its shards is gone:"
                        f" {stream.trouble}"
                    )
            if self.ended and to is not None:
                raise LostFeed(f"training has ended after {self.step} steps, before step {to}")
            is_last = self._came() == self._seen and self.limit == NO_LIMIT
            over = all(stream.ended for stream in self._streams) and is_last
            # the stream of one shard ended without a copy, or at another step than other streams
            if over and not self.ended:
                raise LostFeed(
                    "training has ended before its final weights arrived: this process has"
                    f" {_held(self.step)}"
                )
            rest_s = 1.0
            if deadline is not None:
                rest_s = min(1.0, deadline - time.monotonic())
            if self.ended or rest_s <= 0:
                return False
            self._changed.wait_for(lambda: self._came() != self._seen, rest_s)
        return True

    def _came(self) -> tuple[object, ...]:
        """Returns for each stream the number of received events, whether the stream has ended, and
        why the feed refused the stream. `_wait` returns when one of these values changes.
        """
        return tuple((stream.came, stream.ended, stream.refusal) for stream in self._streams)

    def _advance(self, to: int | None) -> bool:
        """Brings all shards to the last point of training that every shard can reach. Returns True
        if any shard has moved.
        """
        self._open_streams()
        limit = self.limit
        if to is not None:
            limit = min(limit, (to, math.inf))
        with self._changed:
            self._seen = self._came()
            if limit == BEFORE_COPY:
                return False
            plans = [
                reachable_moments(shard.moment, stream.inbox, limit)
                for shard, stream in self._pairs()
            ]
            goal = _last_common(plans)
            counts = []
            if goal is not None:
                counts = [len(plan) - 1 - plan[::-1].index(goal) for plan in plans]
            if not any(counts):
                self._restart_late()
                return False
            pairs = zip(counts, self._streams, strict=True)
            events = [[stream.inbox.popleft() for _ in range(count)] for count, stream in pairs]
            self._changed.notify_all()
        for taken, (shard, _) in zip(events, self._pairs(), strict=True):
            copies = [number for number, event in enumerate(taken) if isinstance(event, Joined)]
            # skip the events before the last copy of the state, because the copy includes them
            begin = max(copies, default=0)
            shard.apply(taken[begin:])
        assert goal is not None
        self.step = goal[1]
        return True

    def _restart_late(self) -> None:
        """Restarts each stream whose queue is full of steps that another shard will never receive.
        The stream of that other shard has reconnected, and has received a later copy of the state.
        """
        joined = [
            any(isinstance(event, Joined) for event in stream.inbox) for stream in self._streams
        ]
        for number, stream in enumerate(self._streams):
            others = joined[:number] + joined[number + 1 :]
            if len(stream.inbox) >= self._most_behind and any(others):
                stream.restart()

    def _open_streams(self) -> None:
        """Opens a stream for each shard of training, and closes streams without a shard. Does
        nothing before the first stream has announced the number of shards.
        """
        with self._changed:
            joined = next(
                (event for event in self._streams[0].inbox if isinstance(event, Joined)), None
            )
        if joined is None or self._own_shard is not None:
            return
        shards = int(joined.about["shards"])
        close_all(self._streams[shards:])
        del self._streams[shards:], self._shards[shards:]
        for shard in range(len(self._streams), shards):
            self._shards.append(ShardFollower(self.model, False, self._make, self._joins))
            self._streams.append(self._stream(shard))

    def _pairs(self) -> list[tuple[ShardFollower, Stream]]:
        return list(zip(self._shards, self._streams, strict=True))


def _held(step: int) -> str:
    if step < 0:
        return "no weights yet"
    return f"the weights after step {step}"


def _last_common(plans: Sequence[Sequence[Moment | None]]) -> Moment | None:
    """Returns the last moment of training (see `Moment`) that all shards can reach; None if there
    is none. `plans` holds the moments that each shard can reach.
    """
    for moment in reversed(plans[0]):
        if moment is not None and all(moment in plan for plan in plans):
            return moment
    return None


@overload
def follow(
    model: nn.Module,
    address: str,
    *,
    token: bytes | None = None,
    optimizer: MakeOptimizer | None = None,
    most_behind: int = 64,
    wait: bool = True,
    timeout_s: float = 60.0,
) -> Follower: ...


@overload
def follow(
    model: nn.Module, address: Path | Folder, *, wait: bool = True, timeout_s: float = 60.0
) -> WeightFollower: ...


def follow(
    model: nn.Module,
    address: str | Path | Folder,
    *,
    token: bytes | None = None,
    optimizer: MakeOptimizer | None = None,
    most_behind: int = 64,
    wait: bool = True,
    timeout_s: float = 60.0,
) -> Follower | WeightFollower:
    """Keeps the weights of a training that has a `Feed` in `model`, bit for bit, step by step.

    This process is not a replica: it sends nothing, and training does not wait for it. It first
    receives a copy of the training state, and after that the messages of each step. It applies
    these messages with the same optimizer as training. It needs memory for the weights and the
    optimizer state, but not for gradients. Each shard of a replica sends its own stream. If `model`
    is whole, this process merges all streams. If `detonation.shard` has cut the model into the same
    number of shards, each rank reads one stream.

    After a lost connection, the process reconnects and receives a new copy of the state.

    If `address` is a directory that `Feed.of_weights` writes, this process reads only the weights,
    and training may use any optimizer. Pass neither a token nor `optimizer` in this case. The
    process may round differently from training, and needs memory only for the model.

    Args:
        model: A model like the trained one, with any weights. You may use it between the calls of
            `Follower.update`.
        address: "HOST:PORT" of the feed of shard 0, if the feed of shard s is at this port + s; or
            the addresses of all shards, separated by commas. For a directory of weights: its
            `Path`, or a `RemoteFolder`.
        token: At least 16 bytes; None reads the environment. See `Feed`.
        optimizer: Makes the base optimizer over parameter groups, if it is neither from torch nor
            from this library.
        most_behind: Largest number of steps that may wait for `Follower.update`. If more wait, the
            feed disconnects the follower. The follower then reconnects.
        wait: True to return only after the model has its first weights.
        timeout_s: Seconds to wait for the first weights.

    Raises:
        LostFeed: The feed refuses the token, or no weights arrived in time.
        ValueError: The token is missing or too short, training has another model, or this process
            rounds differently.

    Example:
        >>> follow(nn.Linear(8, 1), "127.0.0.1", token=b"0123456789abcdef")
        Traceback (most recent call last):
        ...
        ValueError: '127.0.0.1' must be HOST:PORT, such as 127.0.0.1:7000; give a folder as a Path
    """
    if most_behind < 1:
        raise ValueError(f"most_behind is {most_behind}, must be at least 1")
    follower: Follower | WeightFollower
    if isinstance(address, str):
        _require_no_folder(address)
        follower = Follower(model, address, checked_token(token), optimizer, most_behind)
    elif token is not None or optimizer is not None:
        raise ValueError("a directory of weights takes neither token nor optimizer: leave them out")
    else:
        follower = WeightFollower(model, folder_at(address))
    deadline = time.monotonic() + timeout_s
    try:
        while wait and follower.step < 0:
            rest = deadline - time.monotonic()
            if rest <= 0 or (follower.update(wait_s=min(rest, 1.0)) < 0 and follower.ended):
                raise LostFeed(
                    f"no weights came from {address} within {timeout_s:g} s: {follower.trouble}"
                )
    except BaseException:
        follower.close()
        raise
    return follower


def _require_no_folder(address: str) -> None:
    """Raises `ValueError` if `address` seems to be the path or URL of a folder. A folder must be
    given as a `Path` or a `RemoteFolder`.
    """
    if "://" in address:
        raise ValueError(f"{address!r} must be HOST:PORT, or a folder as RemoteFolder({address!r})")
    if ":" not in address or Path(address).is_dir():
        raise ValueError(
            f"{address!r} must be HOST:PORT, such as 127.0.0.1:7000; give a folder as a Path"
        )
