"""A subscription: one follower as its feed sees it, with a queue and a thread that sends."""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from detonation.feed.frames import ABOUT, ALIVE, BYE, LONGEST_PIECE, STATE, STEP_DONE, FrameSocket, Octets, encoded

ALIVE_S = 5.0
"""Seconds of silence after which a follower gets a sign of life."""
LEAST_WAITING = 64 << 20
"""Bytes of steps that may wait while a copy of the state is on its way; or as many as the copy has."""
_log = logging.getLogger("detonation.feed")


class Subscription:
    """Sends one follower a copy of the state, and then each step.

    Args:
        peer: The name of the other end, for the log.
        most_behind: Steps that may wait, once the follower has caught up after its copy.
    """

    def __init__(self, connection: FrameSocket, peer: str, most_behind: int) -> None:
        self.peer, self._connection, self._most_behind = peer, connection, most_behind
        self.alive = True
        self._begun = self._caught_up = False
        self._skip, self._bytes, self._most_bytes = 0, 0, LEAST_WAITING  # before `begin` nothing waits
        self._queue: deque[tuple[int, Octets, object]] = deque()  # kind, content, and the owner of its memory
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send, name="feed-sender", daemon=True)
        self._thread.start()

    def begin(self, about: Mapping[str, Any], state: Sequence[Octets], owner: object, skip: int) -> None:
        """Queues a description and the copy of the state.

        Args:
            owner: Of the memory of `state`.
            skip: Steps before the copy that are still to be offered.
        """
        size = sum(map(len, state))
        with self._changed:
            self._begun, self._skip, self._most_bytes = True, skip, max(LEAST_WAITING, size)
            self._queue.append((ABOUT, encoded({**about, "state_bytes": size}), None))
            self._queue.extend((STATE, piece, owner) for part in state for piece in _pieces(part))
            self._changed.notify()
        _log.info("%s follows from step %s on", self.peer, about.get("step"))

    def offer(self, step: Octets) -> None:
        """Queues the records of a step, or drops a follower that is too far behind."""
        with self._changed:
            if self._skip:
                self._skip -= 1
                return
            self._bytes += len(step)
            self._queue.append((STEP_DONE, step, None))
            behind = len(self._queue) > self._most_behind if self._caught_up else self._bytes > self._most_bytes
            self._changed.notify()
        if behind:
            self.drop("it is too far behind")

    def finish(self, about: Mapping[str, Any]) -> None:
        """Queues the end."""
        with self._changed:
            self._queue.append((BYE, encoded(about), None))
            self._changed.notify()

    def drop(self, reason: str) -> None:
        """Ends the connection."""
        with self._changed:
            was, self.alive = self.alive, False
            self._queue.clear()
            self._changed.notify()
        if was:
            self._connection.close()
            _log.warning("%s no longer follows: %s", self.peer, reason)

    def join(self, wait_s: float) -> None:
        """Waits until everything is sent."""
        self._thread.join(wait_s)

    def _send(self) -> None:
        kind = ALIVE
        try:
            while self.alive and kind != BYE:
                kind, content, _ = self._next()
                self._connection.send(kind, content)
            self._connection.close()
            self.alive = False
        except OSError as error:
            self.drop(str(error) or type(error).__name__)

    def _next(self) -> tuple[int, Octets, object]:
        with self._changed:
            if not self._queue:
                self._changed.wait(ALIVE_S)
            if not self._queue:
                return ALIVE, b"", None
            kind, content, owner = self._queue.popleft()
            if kind == STEP_DONE:
                self._bytes -= len(content)
            self._caught_up = (self._begun and not self._queue) or self._caught_up
            return kind, content, owner


def _pieces(part: Octets) -> list[memoryview]:
    view = memoryview(part)
    return [view[at : at + LONGEST_PIECE] for at in range(0, len(view), LONGEST_PIECE)]
