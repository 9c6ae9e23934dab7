"""Connections between a feed and its followers: authenticated frames of limited length, the
listener that checks the token, and the queue and sending thread of each follower.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import resource
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from detonation.cluster.interface import listener_at, listening_address
from detonation.cluster.position import host_and_port as host_and_port
from detonation.cluster.position import joined_address
from detonation.core.base_error import DetonationError
from detonation.feed.token import prove_to_follower
from detonation.log.records import LogRecord, record_of

Octets = bytes | bytearray | memoryview
ABOUT, STATE, STEP_DONE, ALIVE, BYE, WANT = range(6)
"""Kinds of frames, in this order: a description of training, a piece of the state, the records of a
step, a keep-alive, the end of the feed, and the request of a follower.
"""
LONGEST_PIECE = 1 << 22
"""Largest number of bytes of a state that one frame carries."""
SHORT = 1 << 24
"""Largest number of bytes of a description of training."""
_HEADER = struct.Struct("<B7xQ")  # header of a frame: its kind, and the length of its content
_TAG = 16


class BadFrame(DetonationError, ConnectionError):
    """A received frame is damaged or too large."""


class FrameSocket:
    """Sends and receives frames over a connection after its handshake.

    Each frame has a checksum under the `key` of the handshake. The checksum also covers the index
    of the frame. So nobody on the network can change, insert, repeat or omit a frame without
    detection. Frames are not encrypted.

    feeds: True at the feed's end of the connection.
    """

    def __init__(self, connection: socket.socket, key: bytes, feeds: bool) -> None:
        self._connection = connection
        self._key = key
        self._out = b"follower"
        self._in = b"feed"
        if feeds:
            self._out, self._in = self._in, self._out
        self._sent = self._received = 0
        self.bytes_moved = 0

    def send(self, kind: int, content: Octets = b"") -> None:
        """Sends one frame. Raises `OSError` if the other end is gone or does not read."""
        header = _HEADER.pack(kind, len(content))
        self._connection.sendall(header + self._tag(self._out, self._sent, header, content))
        self._sent += 1
        rest = memoryview(content)
        while rest:  # `sendall` would apply the timeout to the whole frame instead of each part
            rest = rest[self._connection.send(rest) :]
        self.bytes_moved += len(header) + _TAG + len(content)

    def receive(self, most: int) -> tuple[int, bytearray]:
        """Returns the kind and the content of the next frame, which may have at most `most` bytes.

        Raises `BadFrame` if the frame is longer or damaged, and `OSError` if the other end is gone.
        """
        header = self._exactly(_HEADER.size)
        kind, size = _HEADER.unpack(header)
        if size > most:
            raise BadFrame(f"a frame has {size:,} bytes, but at most {most:,} may arrive")
        tag = self._exactly(_TAG)
        content = self._exactly(size)
        if not hmac.compare_digest(
            bytes(tag), self._tag(self._in, self._received, header, content)
        ):
            raise BadFrame("a frame is damaged")
        self._received += 1
        self.bytes_moved += len(header) + _TAG + size
        return kind, content

    def close(self) -> None:
        """Closes the connection, even while a thread sends or receives on it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _tag(self, sender: bytes, number: int, header: Octets, content: Octets) -> bytes:
        state = hashlib.blake2b(
            number.to_bytes(8, "little"), key=self._key, digest_size=_TAG, person=sender
        )
        state.update(header)
        state.update(content)
        return state.digest()

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            got = self._connection.recv_into(rest)
            if not got:
                raise ConnectionResetError("the other end has closed the connection")
            rest = rest[got:]
        return found


def encoded(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode()


def table_of(content: Octets) -> dict[str, Any]:
    """Returns the content of a frame as a JSON table. Raises `BadFrame` if the content is no JSON
    table.
    """
    try:
        found = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise BadFrame("a frame holds no JSON") from error
    if not isinstance(found, dict):
        raise BadFrame("a frame holds no table")
    return found


def records_in(content: Octets) -> Iterator[LogRecord]:
    """Yields the records of a step, in order. Raises `DamagedLog` if a record is incomplete."""
    rest = memoryview(content)
    while rest:
        record, rest = record_of(rest)
        yield record


MOST_STRANGERS = 8
"""Largest number of connections that have not yet proved that they know the token."""
RESERVED_FILES = 16
"""Number of open files that followers must leave free for this rank, because gloo ends the process
when no file is left.
"""
REFUSAL_LINE_S = 60.0
"""Smallest number of seconds between two log lines about refused connections."""
SHORTEST_FRAMES = 4096
"""Largest number of bytes of the frame in which a follower sends its request."""
STUCK_S = 30.0
"""Seconds after which the feed disconnects a follower that reads nothing."""
_log = logging.getLogger("detonation.feed")


class Listener:
    """Listens on `address`, and calls `admit` in a new thread for each follower that knows the
    token.

    With port 0 the system selects a free port. The arguments of `admit` are the connection after
    the handshake, the follower's "HOST:PORT", and the follower's request. Raises `OSError` if this
    process cannot listen on `address`.
    """

    def __init__(
        self, address: str, token: bytes, admit: Callable[[FrameSocket, str, dict[str, Any]], None]
    ) -> None:
        host, port = host_and_port(address)
        try:
            self._socket = listener_at(listening_address(host), port, MOST_STRANGERS)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from error
        self.port = int(self._socket.getsockname()[1])
        self._token = token
        self._admit = admit
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._silent_until = 0.0
        self._unsaid = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="feed-listener", daemon=True).start()

    def close(self) -> None:
        """Stops listening for new followers."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts connections
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                # all file descriptors of this process are in use: wait until one is free
                time.sleep(0.1)
                continue
            peer = joined_address(host, port)
            if _few_are_left(connection.fileno()):
                self._refuse(connection, peer, "few open files are left to this process")
                continue
            if not self._strangers.acquire(blocking=False):
                self._refuse(connection, peer, "too many connections have not shown a token yet")
                continue
            threading.Thread(
                target=self._greet, args=(connection, peer), name="feed-greeting", daemon=True
            ).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            frames = FrameSocket(connection, prove_to_follower(connection, self._token), feeds=True)
            kind, content = frames.receive(SHORTEST_FRAMES)
            if kind != WANT:
                raise BadFrame(f"its first frame is of kind {kind}, not a request")
            wanted = table_of(content)
        except OSError as error:  # `Refused` and `BadFrame` are subclasses of OSError
            self._refuse(connection, peer, str(error) or type(error).__name__)
            return
        finally:
            self._strangers.release()
        connection.settimeout(STUCK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._admit(frames, peer, wanted)

    def _refuse(self, connection: socket.socket, peer: str, reason: str) -> None:
        """Closes the connection. Logs at most one line per `REFUSAL_LINE_S` seconds, so that
        foreign clients without the token cannot fill the log.
        """
        with contextlib.suppress(OSError), contextlib.closing(connection):
            with self._lock:
                now = time.monotonic()
                if now < self._silent_until:
                    self._unsaid += 1
                    return
                more = self._unsaid
                self._unsaid = 0
                self._silent_until = now + REFUSAL_LINE_S
            also = ""
            if more:
                also = f", and {more} more since the last such line"
            _log.warning("refused %s: %s%s", peer, reason, also)


def _few_are_left(descriptor: int) -> bool:
    """True if this process can open fewer than about `RESERVED_FILES` more files. The system gives
    a new file the lowest free descriptor, so the newest `descriptor` shows how many files are open.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - RESERVED_FILES


ALIVE_S = 5.0
"""Seconds without a message after which the feed sends a keep-alive frame to a follower."""
LEAST_WAITING = 64 << 20
"""Bytes of steps that may always wait in the queue of a follower. If its copy of the state is
larger, the size of the copy is the limit.
"""
FEW_STEPS = 4
"""Number of steps of any size that may always wait in the queue of a follower."""


class Subscription:
    """Sends a copy of the state, and after it each step, to one follower. Lines of the log name
    this follower by `peer`.

    most_behind: largest number of steps that may wait in the queue. The queue first holds the copy
    of the state, so this limit applies only after the queue has been empty once. `offer` always
    limits the bytes in the queue, too.
    """

    def __init__(self, connection: FrameSocket, peer: str, most_behind: int) -> None:
        self.peer = peer
        self._connection = connection
        self._most_behind = most_behind
        self.alive = True
        self._begun = self._caught_up = False
        self._skip = 0
        self._bytes = 0  # bytes of the queued steps
        self._most_bytes = LEAST_WAITING
        self._queue: deque[tuple[int, Octets]] = deque()  # kind and content of each frame
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._send, name="feed-sender", daemon=True)
        self.thread.start()

    def begin(self, about: Mapping[str, Any], state: Sequence[memoryview], skip: int) -> None:
        """Queues a description of training and the copy of the state. Ignores the next `skip` calls
        of `offer`, because their steps came before the copy.
        """
        size = sum(map(len, state))
        with self._changed:
            self._begun = True
            self._skip = skip
            self._most_bytes = max(LEAST_WAITING, size)
            self._queue.append((ABOUT, encoded({**about, "state_bytes": size})))
            pieces = ((part, at) for part in state for at in range(0, len(part), LONGEST_PIECE))
            self._queue.extend((STATE, part[at : at + LONGEST_PIECE]) for part, at in pieces)
            self._changed.notify()
        _log.info("%s follows from step %s on", self.peer, about.get("step"))

    def offer(self, step: Octets) -> None:
        """Queues the records of a step. Disconnects the follower if too many steps wait in its
        queue.
        """
        with self._changed:
            if self._skip:
                self._skip -= 1
                return
            self._bytes += len(step)
            self._queue.append((STEP_DONE, step))
            behind = self._bytes > max(self._most_bytes, FEW_STEPS * len(step))
            behind |= self._caught_up and len(self._queue) > self._most_behind
            self._changed.notify()
        if behind:
            self.drop("it is too far behind")

    def finish(self, about: Mapping[str, Any]) -> None:
        with self._changed:
            self._queue.append((BYE, encoded(about)))
            self._changed.notify()

    def drop(self, reason: str) -> None:
        if self._hang_up():
            _log.warning("%s no longer follows: %s", self.peer, reason)

    def let_in(self) -> None:
        """Ends the connection to a follower that has joined training as a replica."""
        if self._hang_up():
            _log.info("%s has joined", self.peer)

    def _hang_up(self) -> bool:
        """Ends the connection. Returns False if the connection had already ended."""
        with self._changed:
            was = self.alive
            self.alive = False
            self._queue.clear()
            self._changed.notify()
        if was:
            self._connection.close()
        return was

    def _send(self) -> None:
        kind = ALIVE
        try:
            while self.alive and kind != BYE:
                kind, content = self._next()
                self._connection.send(kind, content)
            self._connection.close()
            self.alive = False
        except OSError as error:
            self.drop(str(error) or type(error).__name__)

    def _next(self) -> tuple[int, Octets]:
        with self._changed:
            if not self._queue:
                self._changed.wait(ALIVE_S)
            if not self._queue:
                return ALIVE, b""
            kind, content = self._queue.popleft()
            if kind == STEP_DONE:
                self._bytes -= len(content)
            self._caught_up = (self._begun and not self._queue) or self._caught_up
            return kind, content
