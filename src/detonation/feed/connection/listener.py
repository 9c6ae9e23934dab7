"""The listener of a feed: lets in who knows the token, and turns strangers away without the training's notice."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from detonation.cluster.machine.interfaces import host_and_port as host_and_port
from detonation.feed.connection.frames import WANT, BadFrame, FrameSocket, table_of
from detonation.feed.connection.token import prove_to_follower

MOST_STRANGERS = 8
"""Connections that have not proved yet that they know the token; more are closed at once."""
SILENT_S = 60.0
"""Seconds between two lines of the log about strangers."""
SHORTEST_FRAMES = 4096
"""Bytes of what a follower may want."""
STUCK_S = 30.0
"""Seconds in which a follower must take some of a frame."""
_log = logging.getLogger("detonation.feed")


class Listener:
    """Listens at `address`, and calls `admit` in a thread of its own for each connection that knows the token.

    Args:
        address: "HOST:PORT"; port 0 takes a free one.
        token: From `read_token`.
        admit: Gets the connection after the handshake, the name of the other end, and what it wants.

    Raises:
        OSError: Nobody can listen there.
    """

    def __init__(self, address: str, token: bytes, admit: Callable[[FrameSocket, str, dict[str, Any]], None]) -> None:
        host, port = host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=MOST_STRANGERS)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from error
        self.port = int(self._socket.getsockname()[1])
        self._token, self._admit = token, admit
        self._places = threading.BoundedSemaphore(MOST_STRANGERS)
        self._silent_until, self._unsaid = 0.0, 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="feed-listener", daemon=True).start()

    def close(self) -> None:
        """Listens no longer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # out of file descriptors: others may be closed soon
                continue
            peer = f"{host}:{port}"
            if not self._places.acquire(blocking=False):
                self._refuse(connection, peer, "too many connections have not shown a token yet")
                continue
            threading.Thread(target=self._greet, args=(connection, peer), name="feed-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            frames = FrameSocket(connection, prove_to_follower(connection, self._token), feeds=True)
            kind, content = frames.receive(SHORTEST_FRAMES)
            if kind != WANT:
                raise BadFrame("it does not say what it wants")
            wanted = table_of(content)
        except OSError as error:  # `Refused` and `BadFrame` are among them
            self._refuse(connection, peer, str(error) or type(error).__name__)
            return
        finally:
            self._places.release()
        connection.settimeout(STUCK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._admit(frames, peer, wanted)

    def _refuse(self, connection: socket.socket, peer: str, reason: str) -> None:
        """Closes the connection, and logs that at most once in `SILENT_S`: a log must not grow by strangers."""
        with contextlib.suppress(OSError):
            connection.close()
        with self._lock:
            now = time.monotonic()
            if now < self._silent_until:
                self._unsaid += 1
                return
            more, self._unsaid, self._silent_until = self._unsaid, 0, now + SILENT_S
        also = f", and {more} more since the last such line" if more else ""
        _log.warning("refused %s: %s%s", peer, reason, also)
