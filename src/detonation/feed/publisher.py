"""The feed: a rank of training sends its updates to followers, and never waits for them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detonation.checkpoint.snapshot import take_snapshot
from detonation.cluster.position import joined_address
from detonation.core.agreement import persistent_buffers
from detonation.core.flat.tensors import local
from detonation.core.optimizer import Replicated
from detonation.core.runtime import Readback
from detonation.feed.frames import (
    ABOUT,
    BYE,
    FrameSocket,
    Listener,
    Subscription,
    encoded,
    host_and_port,
)
from detonation.feed.shared_state import (
    BUFFERS,
    NORM,
    describe_training,
    require_followable,
    shared_content,
)
from detonation.feed.token import checked_token
from detonation.feed.weights.folders import Folder
from detonation.feed.weights.weight_feed import WeightFeed
from detonation.log.records import MESSAGE, LogRecord, StepRecorder

LAST_COPY_S = 300.0
"""Longest time in seconds for which a feed that ends sends last copies of the state."""
FAILED_S = 60.0
"""Seconds after a failed copy of the state before the feed tries again."""
REST = 100.0
"""Smallest time from one copy of the state to the next, in multiples of the time that one copy
takes. So copies use at most 1 % of the training time.
"""
_log = logging.getLogger("detonation.feed")


class Feed(StepRecorder):
    """Sends the weights of training to followers: first a copy of the state, then the messages of
    each step.

    Each rank of one replica has a feed: `optimizer.record(feed)`. The rank of shard s listens on
    the port of `address` plus s. A new follower gets a copy of the state after the current step,
    and from then on the unchanged messages of all replicas. Training never waits for a follower,
    because threads send the data. A follower with too many queued steps is disconnected, and
    reconnects by itself. Without followers, steps need no extra time.

    A follower needs the same token as the feed: `DETONATION_TOKEN`, or the content of the file that
    `DETONATION_TOKEN_FILE` names. The connection is authenticated, but not encrypted.

    Args:
        model: The trained model.
        optimizer: Made by `replicate`, with one level.
        address: "HOST:PORT" of the interface to listen at; for port 0 the system selects a port.
        token: At least 16 bytes; None reads the environment.
        most_behind: Largest number of steps that may wait for a follower. With more steps, the feed
            disconnects the follower.
        most_followers: Largest number of followers at a time.
        about: JSON values for the followers, such as the configuration of the run.
        run: Name of this start of the training, the same for all shards.

    Raises:
        ValueError: The token is missing or too short, the address is not valid, or the optimizer
            cannot be followed.
        OSError: This process cannot listen at `address`.

    Example:
        >>> import torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> trained, served = nn.Linear(8, 1), nn.Linear(8, 1)
        >>> adam = torch.optim.AdamW(trained.parameters())
        >>> optimizer = dt.replicate(adam, trained, LoopbackCommunicator(2), dt.full())
        >>> feed = dt.Feed(trained, optimizer, "127.0.0.1:0", token=b"0123456789abcdef")
        >>> optimizer.record(feed)
        >>> with dt.follow(served, feed.address, token=b"0123456789abcdef", wait=False) as follower:
        ...     while follower.step < 3:
        ...         trained(torch.ones(1, 8)).sum().backward()
        ...         optimizer.step()
        ...         _ = follower.update(wait_s=0.01)
        ...     optimizer.record(None)
        ...     feed.close()
        ...     _ = follower.update(to=optimizer.step_count)
        >>> torch.equal(served.weight, trained.weight)
        True
    """

    reader = "each follower"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Replicated,
        address: str,
        *,
        token: bytes | None = None,
        most_behind: int = 64,
        most_followers: int = 8,
        about: Mapping[str, Any] | None = None,
        run: str = "",
    ) -> None:
        super().__init__()
        for name, value in (("most_behind", most_behind), ("most_followers", most_followers)):
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        require_followable(optimizer)
        self._model = model
        self._most_behind = most_behind
        self._most_followers = most_followers
        self._about: dict[str, Any] = {"about": dict(about or {}), "run": run}
        self._run = run
        self._returns = 0  # number of times that training returned to an earlier state
        self._lock = threading.Lock()  # protects `_coming` and `_subscribed`
        self._coming: list[Subscription] = []
        self._subscribed: list[Subscription] = []
        self._levels: object = None  # the optimizer's levels at the most recent copy of the state
        self._next_copy = 0.0
        self.first_copy = 0.0
        """The feed sends no copy of the state before this step. If this step is set, the feed makes
        no pause between two copies.
        """
        self.ahead: Callable[[], int] = lambda: 0
        """Returns the optimizer's turn minus its step, which followers read as `Follower.ahead`.
        The feed sends this difference with each copy of the state.
        """
        self.has_joined: Callable[[], bool] = lambda: False
        """Returns True if the process that follows this feed has joined training as a replica."""
        self._synchronized = 0  # number of `synchronize` calls since the most recent step
        self._joins = False  # True if the most recent `synchronize` call lets a replica join
        self._sent: dict[int, bytes] = {}  # the model's buffers as they were last sent
        self.records = self._closed = False
        host, port = host_and_port(address)
        shard = optimizer.coordinates.shard
        self._first_shard = shard == 0
        if not port:
            shard = 0  # port 0: each shard listens on a free port that the system selects
        address = joined_address(host, port + shard)
        self._listener = Listener(address, checked_token(token), self._admit)
        self.address = joined_address(host, self._listener.port - shard)
        """The address to pass to `follow`."""

    @staticmethod
    def of_weights(
        model: nn.Module,
        target: Path | str | Folder | None,
        *,
        dtype: torch.dtype | None = None,
        base_every: int | None = None,
    ) -> WeightFeed:
        """Creates a feed of only the weights: files that any number of readers poll. It works with
        any training loop and any optimizer.

        Call `publish(step)` after each step, or less often. A file contains the exact values that
        changed since the previous call. In bf16, at a learning rate of 1e-6, a file has about 0.01
        bytes per parameter of the model. Some files are bases: the first file, and later files at
        intervals. A base contains all weights, so that a reader can start there. The feed keeps the
        two newest bases and all differences after the older of these bases, and removes earlier
        files.

        The feed keeps a copy of the published weights on the device of the model.

        Args:
            model: The trained model. If FSDP2 shards it, each rank calls `publish`.
            target: A directory, which is made if it is missing, or a URL with "://" for fsspec.
                If the model is sharded, one rank writes, and all other ranks pass None.
            dtype: The type to which floating-point weights are rounded, such as torch.bfloat16 for
                fp32 weights. Readers have a model of this type. By default weights are not rounded,
                but almost all fp32 weights change at each step.
            base_every: Number of differences between two bases. By default there is a new base
                when the differences have as many bytes as the last base.

        Raises:
            ValueError: `dtype` is no floating-point type, or `base_every` is below 1.
            OSError: The directory cannot be made.

        Example:
            >>> import tempfile, torch, detonation as dt
            >>> from pathlib import Path
            >>> trained, served = nn.Linear(8, 1), nn.Linear(8, 1).bfloat16()
            >>> adam = torch.optim.AdamW(trained.parameters())
            >>> folder = tempfile.TemporaryDirectory()
            >>> with dt.Feed.of_weights(trained, folder.name, dtype=torch.bfloat16) as feed:
            ...     for step in range(3):
            ...         trained(torch.ones(1, 8)).sum().backward()
            ...         adam.step()
            ...         _ = feed.publish(step + 1)
            >>> follower = dt.follow(served, Path(folder.name))
            >>> follower.step, follower.ended, torch.equal(served.weight, trained.weight.bfloat16())
            (3, True, True)
            >>> folder.cleanup()
        """
        return WeightFeed(model, target, dtype, base_every)

    @property
    def followers(self) -> int:
        """Number of connected processes: those that follow training, and those that wait for their
        copy of the state.
        """
        with self._lock:
            return sum(each.alive for each in (*self._coming, *self._subscribed))

    @property
    def is_asked(self) -> bool:
        """True if a follower waits for a copy of the state."""
        with self._lock:
            return any(each.alive for each in self._coming)

    def disconnect(self, reason: str) -> None:
        """Disconnects the followers that already have a copy of the state, so that they reconnect
        and ask for another copy.
        """
        self.forget()
        for each in self._subscribed:
            each.drop(reason)
        self._sort_out()

    def _end_subscriptions(self) -> None:
        """Disconnects the followers after a change of the optimizer's levels."""
        if self.has_joined():
            for each in self._subscribed:
                each.let_in()
        self.disconnect(
            "replicas, settings or trained parameters have changed, so it needs a new copy"
        )

    def end(self, what: str, optimizer: Replicated) -> None:
        """Sends the records of the step or of the `synchronize` call that has just ended to the
        followers.
        """
        messages, goes_on = self.take_messages(what, optimizer)
        self._joins = what == "join"
        if what == "step":
            self._synchronized = 0
        else:
            self._synchronized += 1
        if not goes_on:
            # step numbers repeat now: the new run name distinguishes the new steps from the old
            self._returns += 1
            self._about["run"] = f"{self._run}, returned {self._returns} times"
            self.disconnect("training went back to an earlier state")
        if not self._coming and not self._subscribed:
            return
        if optimizer.build() is not self._levels:
            self._end_subscriptions()
            self._levels = optimizer.build()
        if self._subscribed:
            self.add_written()
            self.add(messages + self._extras(optimizer), what, optimizer)
        if what == "join":
            self.flush()  # training now waits for the replica that joins
        due = time.monotonic() >= self._next_copy and optimizer.step_count >= self.first_copy
        if self._coming and due:
            try:
                self._let_in(optimizer)
            except Exception as error:  # errors such as out of memory must not end training
                _log.exception("no copy of the state for followers")
                self._next_copy = time.monotonic() + FAILED_S
                self.disconnect(f"there is no copy of the state: {error}")
        self._sort_out()
        if self.records:
            self.note(optimizer)

    def close(self, ended: bool = True, wait_s: float = 10.0) -> None:
        """Stops listening. Sends the queued steps to the followers for at most `wait_s` seconds in
        total.

        If training has `ended`, followers that wait for a copy of the state get a last copy, for
        at most `LAST_COPY_S` seconds. Otherwise followers wait until training starts again.
        """
        self._listener.close()
        self.take_last_writes()
        self.flush()
        if ended and self._optimizer is not None:
            if self.is_asked:
                wait_s = max(wait_s, LAST_COPY_S)
            try:
                self._let_in(self._optimizer, ended)
            except Exception:  # without this copy of the state, followers raise `LostFeed`
                _log.exception("no last copy of the state for followers")
        with self._lock:
            self._closed = True
            everyone = [*self._coming, *self._subscribed]
            self._coming = []
            self._subscribed = []
        reason = "training has stopped"
        if ended:
            reason = "training has ended"
        for each in everyone:
            each.finish({"ended": ended, "reason": reason})
        deadline = time.monotonic() + wait_s
        for each in everyone:
            each.thread.join(max(0.0, deadline - time.monotonic()))

    def hand_on(self, records: Sequence[LogRecord]) -> None:
        content = b"".join(
            part for record in filter(self._is_new, records) for part in record.parts()
        )
        for each in self._subscribed:
            each.offer(content)

    def _admit(self, connection: FrameSocket, peer: str, wanted: Mapping[str, Any]) -> None:
        """Accepts or refuses a follower. The threads of the listener call this method."""
        kind = ABOUT
        answer = dict(self._about["about"])
        if wanted.get("want") != "about":
            with self._lock:
                here = sum(each.alive for each in (*self._coming, *self._subscribed))
                if here < self._most_followers and not self._closed:
                    self._coming.append(Subscription(connection, peer, self._most_behind))
                    return
            kind = BYE
            answer = {
                "ended": False,
                "reason": f"it has {here} followers, the most that it accepts",
            }
        with contextlib.suppress(OSError):
            connection.send(kind, encoded(answer))
        connection.close()

    def _let_in(self, optimizer: Replicated, ended: bool = False) -> None:
        """Sends a copy of the state after this step to all followers that wait for a copy."""
        began = time.monotonic()
        with self._lock:
            coming = [each for each in self._coming if each.alive]
            self._coming = []
        if not coming:
            return
        try:
            # check again, because the collectives and `closeness` are unknown before the first step
            require_followable(optimizer)
        except ValueError as error:
            for each in coming:
                each.finish({"ended": ended, "reason": str(error)})
            return
        with self._lock:
            self._subscribed += coming
        state = shared_content(take_snapshot(self._model, optimizer))
        told = {"synchronized": self._synchronized, "ahead": self.ahead(), "joins": self._joins}
        about = describe_training(optimizer) | self._about | told
        for each in coming:
            each.begin(about, state, self.waiting)
        self._options = []  # makes the next step send all options of all parameter groups
        self._sent = {}
        now = time.monotonic()
        if not self.first_copy:
            self._next_copy = now + REST * (now - began)

    def _sort_out(self) -> None:
        with self._lock:
            self._subscribed = [each for each in self._subscribed if each.alive]
        self.records = bool(self._subscribed)
        if not self.records:
            self.forget()

    def _extras(self, optimizer: Replicated) -> list[tuple[int, int, Readback]]:
        """Returns the tensors that a follower needs in addition to the messages: the gradient norm
        for clipping, and the model's buffers.
        """
        step = optimizer.step_count
        found = []
        norm = optimizer.stats.grad_norm
        if optimizer.settings.clip and norm is not None:
            found.append((NORM, step, Readback(norm.detach().reshape(1).clone())))
        if self._first_shard:
            for index, buffer in enumerate(persistent_buffers(self._model).values()):
                copied = local(buffer.detach()).clone().reshape(-1)
                found.append((BUFFERS + index, step, Readback(copied)))
        return found

    def _is_new(self, record: LogRecord) -> bool:
        """False if `record` holds a buffer of the model that has not changed since it was last
        sent; otherwise True. Most models have buffers that never change.
        """
        if record.kind != MESSAGE or not BUFFERS <= record.place < NORM:
            return True
        content = bytes(record.content)
        same = self._sent.get(record.place) == content
        self._sent[record.place] = content
        return not same
