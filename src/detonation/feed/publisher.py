"""The feed: what a rank of training sends to processes that follow it, without ever waiting for
them."""

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
from detonation.core.agreement.buffers import persistent_buffers
from detonation.core.flat.tensors import local
from detonation.core.optimizer.replicated import Replicated
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

FAILED_S = 60.0
"""Seconds after which a copy that failed is tried again."""
REST = 100.0
"""Copies of the state take at most one part in so many of the training's time."""
_log = logging.getLogger("detonation.feed")


class Feed(StepRecorder):
    """Serves the weights of training to processes that follow it: a copy of the state, and then
    each step's messages.

    Each rank of one replica, whichever, has a feed: `optimizer.record(feed)`. The rank of shard s
    listens at the port of `address` + s. Whoever comes gets a copy of the state after the step that
    is under way, and from there on the messages of all replicas, as they travelled. Training never
    waits for a follower: threads send, and one that is too far behind is dropped, and comes again.
    Without followers a step costs nothing.

    A follower needs its token (`DETONATION_TOKEN`, or a file that `DETONATION_TOKEN_FILE` names).
    Nothing is encrypted.

    Args:
        model: The trained model.
        optimizer: Made by `replicate`, with one level.
        address: "HOST:PORT" of the interface to listen at; port 0 takes a free one.
        token: At least 16 bytes, in the place of that of the environment.
        most_behind: Steps that wait for a follower until it is dropped.
        most_followers: Followers at a time.
        about: JSON values for the followers, such as the configuration of the run.
        run: A name of this start of the training, the same for all shards.

    Raises:
        ValueError: There is no token or a shorter one, the address is none, or the optimizer cannot
            be followed.
        OSError: Nobody can listen there.

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
        self._model, self._most_behind, self._most_followers = model, most_behind, most_followers
        self._about: dict[str, Any] = {"about": dict(about or {}), "run": run}
        self._run, self._returns = run, 0  # to earlier states
        self._lock = threading.Lock()  # of the two lists
        self._coming: list[Subscription] = []
        self._subscribed: list[Subscription] = []
        self._levels: object = None  # of which the followers know
        self._next_copy = 0.0
        self.first_copy = 0.0
        """The step before which no follower gets a copy."""
        self.ahead: Callable[[], int] = lambda: 0
        """A number for followers with each copy; see `Follower.ahead`."""
        self._synchronized = 0  # calls of `synchronize` since the last step
        self._sent: dict[int, bytes] = {}  # the buffers of the model, as they were sent last
        self.records = self._closed = False
        host, port = host_and_port(address)
        shard = optimizer.coordinates.shard
        self._first_shard = shard == 0
        bracketed = f"[{host}]" if ":" in host else host
        self._listener = Listener(
            f"{bracketed}:{port + shard if port else 0}", checked_token(token), self._admit
        )
        self.address = f"{bracketed}:{self._listener.port - (shard if port else 0)}"
        """That followers need."""

    @staticmethod
    def of_weights(
        model: nn.Module,
        target: Path | str | Folder | None,
        *,
        dtype: torch.dtype | None = None,
        base_every: int | None = None,
    ) -> WeightFeed:
        """A feed of weights alone, as files that any number of readers poll: for any training loop
        and any optimizer.

        Call `publish(step)` after each step, or after as many as you like. A file has the values
        that changed since the call before, exactly. In bf16 that is about 0.01 bytes per parameter
        at a learning rate of 1e-6. The first file, and others at times, are bases, which have all
        weights, so that a reader can begin there. The two newest bases stay, with the differences
        since the older; files before are removed.

        It keeps a copy of the published weights on the device of the model.

        Args:
            model: In training, also sharded by FSDP2: then each rank calls `publish`.
            target: A directory, which is made; or a URL with "://" that fsspec knows; None on each
                rank of a sharded model but the one that writes.
            dtype: To which floating-point weights are rounded, such as torch.bfloat16 of fp32
                weights; readers hold a model of this type. Left out, each is published as it is;
                fp32 weights change almost all at each step.
            base_every: The differences after which there is a base; left out, as many as have the
                bytes of a base.

        Raises:
            ValueError: `dtype` is no floating-point type, or `base_every` is below 1.
            OSError: The directory cannot be made.

        Example:
            >>> import tempfile, torch, detonation as dt
            >>> from pathlib import Path
            >>> trained, served = nn.Linear(8, 1), nn.Linear(8, 1).bfloat16()
            >>> adam, folder = torch.optim.AdamW(trained.parameters()), tempfile.TemporaryDirectory()
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
        """The number of processes that follow, or wait for their copy."""
        with self._lock:
            return sum(each.alive for each in (*self._coming, *self._subscribed))

    def end(self, what: str, optimizer: Replicated) -> None:
        """Ends a step, or a call of `synchronize`."""
        messages, goes_on = self.take_messages(what, optimizer)
        self._synchronized = 0 if what == "step" else self._synchronized + 1
        if (
            not goes_on
        ):  # a name of its own: the same steps of another shard may still be those taken before
            self._returns += 1
            self._about["run"] = f"{self._run}, returned {self._returns} times"
            self._drop_all("training went back to an earlier state")
        if not self._coming and not self._subscribed:
            return
        if optimizer.build() is not self._levels:
            self._drop_all(
                "replicas, settings or trained parameters have changed (it joins, or takes a copy)"
            )
            self._levels = optimizer.build()
        if self._subscribed:
            self.add_written()
            self.add(messages + self._extras(optimizer), what, optimizer)
        due = time.monotonic() >= self._next_copy and optimizer.step_count >= self.first_copy
        if self._coming and due:
            try:
                self._let_in(optimizer)
            except (
                Exception
            ) as error:  # whatever it is, as a lack of memory for the copy: training goes on
                _log.exception("no copy of the state for followers")
                self._next_copy = time.monotonic() + FAILED_S
                self._drop_all(f"there is no copy of the state: {error}")
        self._sort_out()
        if self.records:
            self.note(optimizer)

    def close(self, ended: bool = True, wait_s: float = 10.0) -> None:
        """Sends what is left to each follower, at most for `wait_s` seconds, and listens no longer.

        Followers of a training that has not `ended` wait for its next start.
        """
        self._listener.close()
        self.take_last_writes()
        self.flush()
        with self._lock:
            self._closed = True
            everyone = [*self._coming, *self._subscribed]
            self._coming, self._subscribed = [], []
        for each in everyone:
            each.finish(
                {
                    "ended": ended,
                    "reason": "training has ended" if ended else "training has stopped",
                }
            )
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
        """Takes in a follower; called by the threads of the listener."""
        kind, answer = ABOUT, dict(self._about["about"])
        if wanted.get("want") != "about":
            with self._lock:
                here = sum(each.alive for each in (*self._coming, *self._subscribed))
                if here < self._most_followers and not self._closed:
                    self._coming.append(Subscription(connection, peer, self._most_behind))
                    return
            kind, answer = (
                BYE,
                {"ended": False, "reason": f"it has {here} followers, and takes no more"},
            )
        with contextlib.suppress(OSError):
            connection.send(kind, encoded(answer))
        connection.close()

    def _let_in(self, optimizer: Replicated) -> None:
        """Gives those who wait a copy of the state after this step."""
        began = time.monotonic()
        with self._lock:
            coming, self._coming = [each for each in self._coming if each.alive], []
        if not coming:
            return
        try:
            require_followable(
                optimizer
            )  # by now the collectives are known, and whether replicas are close
        except ValueError as error:
            for each in coming:
                each.finish({"ended": False, "reason": str(error)})
            return
        with self._lock:
            self._subscribed += coming
        state = shared_content(take_snapshot(self._model, optimizer, alone=True))
        told = {"synchronized": self._synchronized, "ahead": self.ahead()}
        about = describe_training(optimizer) | self._about | told
        for each in coming:
            each.begin(about, state, self.waiting)
        self._options = []  # all options of the groups come with the next step
        self._sent = {}
        now = time.monotonic()
        self._next_copy = now + REST * (now - began)

    def _sort_out(self) -> None:
        with self._lock:
            self._subscribed = [each for each in self._subscribed if each.alive]
        self.records = bool(self._subscribed)
        if not self.records:
            self.forget()

    def _drop_all(self, reason: str) -> None:
        self.forget()
        for each in self._subscribed:
            each.drop(reason)
        self._sort_out()

    def _extras(self, optimizer: Replicated) -> list[tuple[int, int, Readback]]:
        """The tensors that a follower needs beside the messages: the norm for clipping, and the
        buffers."""
        step, found = optimizer.step_count, []
        norm = optimizer.stats.grad_norm if optimizer.settings.clip else None
        if norm is not None:
            found.append((NORM, step, Readback(norm.detach().reshape(1).clone())))
        for index, buffer in enumerate(
            persistent_buffers(self._model).values() if self._first_shard else ()
        ):
            found.append(
                (BUFFERS + index, step, Readback(local(buffer.detach()).clone().reshape(-1)))
            )
        return found

    def _is_new(self, record: LogRecord) -> bool:
        """False for a buffer that has not changed since it was sent: most models have some that
        never do."""
        if record.kind != MESSAGE or not BUFFERS <= record.place < NORM:
            return True
        content = bytes(record.content)
        same = self._sent.get(record.place) == content
        self._sent[record.place] = content
        return not same
