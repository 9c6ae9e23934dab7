"""Patience: a replica whose gradient is late says so in time, and the gradient travels a step later."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from detonation.core.compute.nonfinite import first_nonfinite
from detonation.core.link.communicator import StepArrivals
from detonation.core.link.link import Link
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.replicator.transfer import Transfer

MOST_LATE = 10
"""Steps in a row in which a replica may be late; then the others wait for it once, so that it is heard."""
_LEAST_POLL_S, _MOST_POLL_S = 0.005, 0.1
_log = logging.getLogger("detonation")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Patience:
    """Sends the empty message of a late replica, once another one has waited for `seconds`.

    A replica comes to a step when it has finished all collectives before it, in which this replica took part. So the
    next collective on the axis is the one of that step, and a thread may start it in the place of the loop. All
    replicas receive the same bytes, with the reason in the header: nothing else needs an agreement.

    The late gradient enters the memory, and the replica is *behind*: until it has taken the updates that it missed, its
    loop computes nothing. Its first message after them is of the memory.

    Args:
        seconds: Above 0.
        shards: Links to the other ranks of this replica, which are late together.

    Raises:
        ValueError: The messages are on an accelerator, or go through owners.
    """

    def __init__(
        self, seconds: float, replicator: GradientReplicator, arrivals: StepArrivals, shards: Sequence[Link]
    ) -> None:
        self.silent = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.attach(replicator)
        self._seconds, self._arrivals, self._shards = seconds, arrivals, shards
        self._lock = threading.RLock()  # of the axis: whoever holds it may start collectives
        self._ahead: dict[int, Transfer] = {}  # empty messages, by step
        self._status = 0  # of a late gradient that was not finite
        self._sent = self._next = -1  # the first step without a message; -1 where the thread may send none
        self._heard = self._came = self._told = -1  # the last step with a gradient in time; come to; written
        self._left, self._lap = time.monotonic(), 0.0  # the end of a step, and the time until the loop came to the next
        self._tells_at, self._depth = 0.0, 0
        self._error: Exception | None = None
        self.unread, self._warned = "", False  # why the thread could not read how far the others are
        self._wake, self._stopped = threading.Event(), threading.Event()
        poll_s = min(max(seconds / 4, _LEAST_POLL_S), _MOST_POLL_S)
        arguments = weakref.ref(self), self._wake, self._stopped, poll_s
        thread = threading.Thread(target=_watch, args=arguments, name="patience", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._wake, self._stopped)

    @property
    def behind(self) -> bool:
        """True if the gradient of the last step was late."""
        return bool(self.silent)

    def attach(self, replicator: GradientReplicator) -> None:
        """Sends the messages of `replicator` from now on."""
        device = replicator.channel.runtime.device.type
        if device != "cpu":
            raise ValueError(f"patience is for models on CPUs, this one is on {device}")
        if replicator.channel.exchange.secluded:
            raise ValueError("patience needs link='all-gather' here: an owner of rows has to answer in every step")
        self._channel, replicator.late, replicator.acts_after = replicator.channel, self, True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context of whatever communicates on the axis: the thread waits meanwhile."""
        with self._lock:
            self._next, self._depth = -1, self._depth + 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:  # one method calls another
                    self._next, self._left = -1 if self._stopped.is_set() else self._sent, time.monotonic()

    def send(self, signals: Sequence[Tensor | None], step: int) -> Transfer:
        """Sends a signal, or keeps it in memory where it is late. Collective over the shards of this replica.

        Shapes: one local shape per parameter.
        """
        now = time.monotonic()
        if self.unread and not self._warned:  # not from the thread: it is no news where training has ended
            self._warned = True
            _log.warning("a late gradient may be waited for: how far the replicas are cannot be read: %s", self.unread)
        if not self.behind:
            self._lap = now - self._left
        # it computed nothing where it is behind, and the others cannot be there yet: it waits as if it had computed
        self._came, self._tells_at = step, now + (self._lap if self.behind else 0.0)
        transfer = self.take(step)
        late = self._on_any_shard(transfer is not None)
        if late or self._status:
            transfer = transfer or self._channel.send_empty(step, 0 if late else self._status)
            self._status = self._status if late else 0
            self._keep(signals)
        else:
            transfer = self._channel.send(signals, step)
        self.silent += 1
        if not late:
            self.silent.zero_()
            self._heard = step
        self._sent = max(self._sent, step + 1)
        self._wake.set()
        return transfer

    def take(self, step: int) -> Transfer | None:
        """The empty message of `step`, if there is one."""
        if self._error:
            raise self._error
        return self._ahead.pop(step, None)

    def answer(self, step: int) -> None:
        """Sends the empty message of `step`, unless its gradient has come meanwhile, or none has for too long."""
        with self._lock, torch.no_grad():
            if step != self._next or step - self._heard > MOST_LATE:
                return
            try:
                self._ahead[step] = self._channel.send_empty(step)
            except Exception as error:  # the loop raises it, when it comes to this step
                self._error = error
            self._sent = self._next = step + 1

    def reset(self) -> None:
        """Goes on with another state. Called on all replicas between the same two steps."""
        for step in sorted(self._ahead):  # which the others have used
            self._ahead.pop(step).receive()
        self._sent = self._next = self._heard = self._came = self._told = -1
        self._arrivals.restart()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._wake.set()

    def look(self, waiting: tuple[int, float]) -> tuple[int, float]:
        """Answers where another replica has waited for long enough.

        Args:
            waiting: The step in which it was seen to wait, and since when; returned for the next look.
        """
        step, now = self._next, time.monotonic()
        if self._came > self._told and now >= self._tells_at:
            came = self._came
            self._arrivals.tell(came)
            self._told = came
        if step < 0 or self._arrivals.furthest() < step:
            return -1, now
        if waiting[0] != step:
            return step, now
        if now - waiting[1] >= self._seconds:
            self.answer(step)
        return waiting

    def _on_any_shard(self, here: bool) -> bool:
        found = torch.tensor([int(here)], dtype=torch.int64, device="cpu")
        for link in self._shards:
            found = link.collect(found).amax(0)
        return bool(found)

    def _keep(self, signals: Sequence[Tensor | None]) -> None:
        """Takes a late gradient into the memory; if it is not finite, the next message says so in its place."""
        memory, present = self._channel.memory, any(signal is not None for signal in signals)
        assert memory is not None
        status = first_nonfinite(signals, self._channel.runtime) if present else 0
        assert isinstance(status, int)
        if status:
            self._status = status
        elif present:
            memory.absorb(signals)


def turn_of(consensus: Any) -> AbstractContextManager[None]:
    """`Patience.turn` of a `StopConsensus`, if there is one with patience."""
    return consensus.patience.turn() if consensus and consensus.patience else nullcontext()


def in_turn(method: _Method) -> _Method:
    """A method of an optimizer that communicates: without a graph of gradients, and never beside `Patience`."""

    @wraps(method)
    def called(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        with torch.no_grad(), turn_of(optimizer._consensus):
            return method(optimizer, *arguments, **named)

    return called  # type: ignore[return-value]


def _end(thread: threading.Thread, wake: threading.Event, stopped: threading.Event) -> None:
    """Ends the thread of a `Patience`: inside the store it must not meet the end of the interpreter."""
    stopped.set()
    wake.set()
    if thread is not threading.current_thread():
        thread.join(1.0)


def _watch(found: weakref.ref[Patience], wake: threading.Event, stopped: threading.Event, poll_s: float) -> None:
    """Watches for `found`, until it is stopped or nobody uses it any more."""
    waiting = -1, 0.0
    while True:
        wake.wait(poll_s)
        wake.clear()
        patience = found()
        if patience is None or stopped.is_set():
            return
        try:
            waiting = patience.look(waiting)
        except (RuntimeError, OSError) as error:  # of the store, which may answer again, or is gone for good
            patience.unread = str(error)
        del patience
