"""Frames: what a feed sends, in pieces whose length is bounded before memory is taken, each with a keyed checksum."""

import contextlib
import hashlib
import hmac
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from detonation.core.base_error import DetonationError
from detonation.log.records import LogRecord, record_of

Octets = bytes | bytearray | memoryview
ABOUT, STATE, STEP_DONE, ALIVE, BYE, WANT = range(6)
"""The kinds of frames: a description, a piece of the state, the records of a step, a sign of life, the end, and what
a follower wants."""
LONGEST_PIECE = 1 << 22
"""The longest piece of a state, in bytes."""
SHORT = 1 << 24
"""The longest description, in bytes."""
_HEADER = struct.Struct("<B7xQ")  # kind, bytes
_TAG = 16


class BadFrame(DetonationError, ConnectionError):
    """A frame is damaged, or larger than it may be."""


class FrameSocket:
    """Sends or receives frames over a connection whose ends have proved that they know the token.

    A frame has a checksum under the key of the connection, which covers its number: somebody on the way can neither
    change, insert, repeat nor leave out a frame. Anybody on the way can read it.

    Args:
        key: From the handshake.
        feeds: Whether this is the feed's end.
    """

    def __init__(self, connection: socket.socket, key: bytes, feeds: bool) -> None:
        self._connection, self._key = connection, key
        self._out, self._in = (b"feed", b"follower") if feeds else (b"follower", b"feed")
        self._sent = self._received = 0
        self.bytes_moved = 0

    def send(self, kind: int, content: Octets = b"") -> None:
        """Sends one frame. Raises `OSError` where the other end is gone, or takes nothing for too long."""
        header = _HEADER.pack(kind, len(content))
        self._connection.sendall(header + self._tag(self._out, self._sent, header, content))
        self._sent += 1
        self._connection.sendall(content)
        self.bytes_moved += len(header) + _TAG + len(content)

    def receive(self, most: int) -> tuple[int, bytearray]:
        """The kind and the content of the next frame.

        Args:
            most: The bytes that the content may have.

        Raises:
            BadFrame: It is longer, or its checksum is wrong.
            OSError: The other end is gone.
        """
        header = self._exactly(_HEADER.size)
        kind, size = _HEADER.unpack(header)
        if size > most:
            raise BadFrame(f"a frame of {size:,} bytes, but at most {most:,} may arrive")
        tag = self._exactly(_TAG)
        content = self._exactly(size)
        if not hmac.compare_digest(bytes(tag), self._tag(self._in, self._received, header, content)):
            raise BadFrame("a frame is damaged")
        self._received += 1
        self.bytes_moved += len(header) + _TAG + size
        return kind, content

    def close(self) -> None:
        """Ends the connection, also for a thread that is sending or receiving."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _tag(self, sender: bytes, number: int, header: Octets, content: Octets) -> bytes:
        state = hashlib.blake2b(number.to_bytes(8, "little"), key=self._key, digest_size=_TAG, person=sender)
        state.update(header)
        state.update(content)
        return state.digest()

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            got = self._connection.recv_into(rest)
            if not got:
                raise ConnectionResetError("the feed has closed the connection")
            rest = rest[got:]
        return found


def encoded(table: Mapping[str, Any]) -> bytes:
    """A table as the content of a frame."""
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode()


def table_of(content: Octets) -> dict[str, Any]:
    """The content of a frame as a JSON table. Raises `BadFrame` for anything else."""
    try:
        found = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise BadFrame("a frame holds no JSON") from error
    if not isinstance(found, dict):
        raise BadFrame("a frame holds no table")
    return found


def records_in(content: Octets) -> Iterator[LogRecord]:
    """The records of a step, one after another. Raises `DamagedLog` where they are not whole."""
    rest = memoryview(content)
    while rest:
        record, rest = record_of(rest)
        yield record
