"""The stream of one shard: a thread that receives data from a feed, and reconnects after a lost
connection.
"""

import os
import shutil
import socket
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detonation.cluster.position import joined_address
from detonation.feed.frames import (
    ABOUT,
    BYE,
    LONGEST_PIECE,
    SHORT,
    STATE,
    STEP_DONE,
    WANT,
    BadFrame,
    FrameSocket,
    encoded,
    host_and_port,
    records_in,
    table_of,
)
from detonation.feed.token import HANDSHAKE_S, Refused, prove_to_feed
from detonation.log.records import DamagedLog, LogRecord
from detonation.whole_files import new_file

SILENCE_S = 30.0
"""Seconds without any data after which a follower counts its feed as lost."""
PAUSES_S = (0.1, 0.2, 0.5, 1.0)
"""Seconds to wait before each attempt to reconnect; the last value repeats."""


@dataclass(frozen=True)
class Joined:
    """A received copy of the training state: the description of training, and the file that holds
    the copy. The file is deleted together with this object.
    """

    about: dict[str, Any]
    path: Path

    def __post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self.path.parent, ignore_errors=True)


@dataclass(frozen=True)
class Stepped:
    """The records of one step or of one `synchronize` call, including the record that ends it."""

    records: list[LogRecord]


def introduced(connection: socket.socket, token: bytes) -> FrameSocket:
    """Proves to a feed that this follower has the token. After this, the feed expects a `WANT`
    frame.
    """
    key = prove_to_feed(connection, token)
    connection.settimeout(SILENCE_S)
    return FrameSocket(connection, key, feeds=False)


def read_about(address: str, token: bytes) -> dict[str, Any]:
    """Returns the description of training that the feed at `address` sends to followers.

    Raises `Refused` if the feed refuses this process, or `OSError` if there is no feed.
    """
    host, port = host_and_port(address.split(",")[0])
    with socket.create_connection((host, port), HANDSHAKE_S) as connection:
        (frames := introduced(connection, token)).send(WANT, encoded({"want": "about"}))
        kind, content = frames.receive(SHORT)
        if kind != ABOUT:
            raise Refused(str(table_of(content).get("reason")))
        return table_of(content)


class Stream:
    """Receives data from the feed at `host`, `port` into `inbox`, and notifies `changed` of each
    new event.

    Neither a copy of the state nor the records of one step may have more than `most_bytes`. While
    `most_waiting` events wait in `inbox`, the stream reads no data. If this lasts too long, the
    feed disconnects this follower.

    reconnects: if True, the stream reconnects after a lost connection and asks for another copy of
    the state. If False, the stream is `lost` after that.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        most_bytes: int,
        most_waiting: int,
        changed: threading.Condition,
        reconnects: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self._where = joined_address(host, port)
        self.inbox: deque[Joined | Stepped] = deque()
        self.ended = False
        self.refusal: Exception | None = None
        self.trouble = ""
        self.bytes_received = self.joins = self.came = 0
        # True if a copy of the state has arrived over the present connection.
        # Stays True after a connection that has announced the end of training.
        self.current = False
        self.failures = 0  # number of failed attempts since the last copy of the state
        self.lost = False  # True if no more data can arrive, because this stream does not reconnect
        self._reconnects = reconnects
        self._has_asked = False  # True after this stream has asked for a copy of the state
        self._token = token
        self._most_bytes = most_bytes
        self._most_waiting = most_waiting
        self._changed = changed
        self._frames: FrameSocket | None = None
        self._dropped = False  # True after `restart`: ignore all data of this connection
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow-{port}", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> bool:
        """True if the feed is unreachable and has not announced the end of training."""
        # while the stream is connected, `failures` still counts earlier attempts to connect
        return not self.ended and self._frames is None and self.failures >= len(PAUSES_S)

    def close(self) -> None:
        """Ends the connection. The receiving thread ends soon after that."""
        self._closed.set()
        self._hang_up()
        with self._changed:
            self._changed.notify_all()

    def restart(self) -> None:
        """Drops the queued events and the connection, so that the stream gets a new copy of the
        state. The caller must hold `changed`.
        """
        self.inbox.clear()
        self.current = False
        self._dropped = True
        self._hang_up()
        self._changed.notify_all()

    def _hang_up(self) -> None:
        # read `_frames` once, because the receiving thread may set it to None
        frames = self._frames
        if frames is not None:
            frames.close()

    def _run(self) -> None:
        while not (self._closed.is_set() or self.ended or self.lost or self.refusal):
            joins = self.joins
            self._dropped = False
            try:
                self._follow()
            except (OSError, DamagedLog, UnicodeError) as error:
                # OSError includes `Refused` and `BadFrame`; an invalid host raises UnicodeError
                self.trouble = f"{self._where}: {error or type(error).__name__}"
                if isinstance(error, Refused | UnicodeError):
                    self.refusal = Refused(self.trouble)
            finally:
                self._hang_up()
                with self._changed:
                    self._frames = None
                    self.current &= self.ended
                    if self.joins > joins:
                        self.failures = 0
                    else:
                        self.failures += 1
                    self._changed.notify_all()
            if not self.ended:
                self._pause()

    def _pause(self) -> None:
        """Waits before the next attempt to connect. A stream that does not reconnect counts as lost
        after this wait.
        """
        self._closed.wait(PAUSES_S[min(self.failures, len(PAUSES_S) - 1)])
        with self._changed:
            self.lost = self._has_asked and not self._reconnects
            self._changed.notify_all()

    def _follow(self) -> None:
        with socket.create_connection((self.host, self.port), HANDSHAKE_S) as connection:
            # set `_frames` before sending the request: once a feed answers, `gone` must be False
            frames = self._frames = introduced(connection, self._token)
            frames.send(WANT, encoded({"want": "state"}))
            self._has_asked = True
            about: dict[str, Any] = {}
            while not self._closed.is_set():
                before = frames.bytes_moved
                kind, content = frames.receive(self._most_bytes if about else SHORT)
                self.bytes_received += frames.bytes_moved - before
                if kind == ABOUT:
                    about = table_of(content)
                    self._put(self._joined(frames, about))
                    self.joins += 1
                elif kind == STEP_DONE and about:
                    self._put(Stepped(list(records_in(content))))
                elif kind == BYE:
                    said = table_of(content)
                    self.ended = said.get("ended") is True
                    self.trouble = f"{self._where}: {str(said.get('reason'))[:200]}"
                    return
                elif content:
                    raise BadFrame(f"a frame of kind {kind} is not expected here")

    def _joined(self, frames: FrameSocket, about: dict[str, Any]) -> Joined:
        """Receives a copy of the state, and writes it to a file."""
        size = about.get("state_bytes")
        if type(size) is not int or not 0 < size <= self._most_bytes:
            raise Refused(
                f"the feed sends a state of {str(size)[:30]} bytes, but the state of this model has"
                f" at most {self._most_bytes:,} bytes: give the model that is trained"
            )
        joined = Joined(
            about, Path(tempfile.mkdtemp(prefix="detonation-follow-")) / "state.safetensors"
        )
        with os.fdopen(new_file(joined.path), "wb") as file:
            while size:
                before = frames.bytes_moved
                kind, content = frames.receive(min(LONGEST_PIECE, size))
                self.bytes_received += frames.bytes_moved - before
                if kind != STATE:
                    raise BadFrame(f"a frame of kind {kind} arrived within a copy of the state")
                file.write(content)
                size -= len(content)
        return joined

    def _put(self, event: Joined | Stepped) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.inbox) < self._most_waiting or self._closed.is_set()
            )
            if self._dropped:  # after `restart` the next event must be a copy of the state
                raise ConnectionResetError(
                    "the queued steps of this shard were too far from those of the other shards, so"
                    " this shard needs a new copy of the state"
                )
            self.inbox.append(event)
            self.current = self.current or isinstance(event, Joined)
            self.came += 1
            self._changed.notify_all()


def close_all(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.close()
