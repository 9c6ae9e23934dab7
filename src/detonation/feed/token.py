"""The secret token that a feed and its followers share, and the handshake with which each end
proves that it has this token.
"""

import hmac
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from detonation.core.base_error import DetonationError

TOKEN = "DETONATION_TOKEN"
TOKEN_FILE = "DETONATION_TOKEN_FILE"
SHORTEST = 16
HANDSHAKE_S = 5.0
"""Seconds in which a new connection must prove that it has the token."""
# the first bytes of each handshake: a fixed name, then two bytes for the version of the handshake
_MAGIC = b"DTFEED\x00\x01"
_NONCE = 32
# the answer that refuses a token; without this answer, a refused follower would reconnect
_REFUSAL = bytes(32)


class Refused(DetonationError, ConnectionError):
    """The other end of a connection is neither a feed nor a follower, or has a different token."""


class LostFeed(DetonationError, ConnectionError):
    """A follower has lost its feed permanently, or could not reach the feed in time."""


def read_token(env: Mapping[str, str] | None = None) -> bytes:
    """Reads the token from `DETONATION_TOKEN`, or from the file that `DETONATION_TOKEN_FILE` names.

    env: environment variables; by default the variables of this process. A token is never a
    command-line argument, because all users of a machine can read command lines.

    Raises `ValueError` if the token is missing, shorter than 16 bytes, or in a file that other
    users may read.

    Example:
        >>> read_token({"DETONATION_TOKEN": "0123456789abcdef"})
        b'0123456789abcdef'
    """
    if env is None:
        env = os.environ
    where = TOKEN
    token = env.get(TOKEN, "").strip().encode()
    if not token and (name := env.get(TOKEN_FILE, "")):
        where = f"the file {name}"
        token = _file_content(Path(name)).strip()
    if not token:
        raise ValueError(
            f"a feed and its followers need a token: set {TOKEN}, or {TOKEN_FILE} to a file; make"
            " one with openssl rand -hex 16"
        )
    return _long_enough(token, f"the token in {where}")


def checked_token(token: bytes | None) -> bytes:
    """Returns `token`, or the result of `read_token` if `token` is None.

    Raises `ValueError` as `read_token` does, and `TypeError` for text.
    """
    if token is None:
        return read_token()
    if not isinstance(token, bytes):
        raise TypeError(f"the token is of type {type(token).__name__}, must be bytes")
    return _long_enough(token, "the token")


def prove_to_follower(connection: socket.socket, token: bytes) -> bytes:
    """Runs the feed's side of the handshake; returns the key that authenticates the frames.

    Raises the same errors as `prove_to_feed`.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    mine = secrets.token_bytes(_NONCE)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(_MAGIC + mine)
    answer = receive_exactly(connection, _NONCE + 32, deadline)
    nonces = mine + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _proof(token, b"follower", nonces)):
        connection.sendall(_REFUSAL)
        raise Refused("it does not know the token")
    connection.sendall(_proof(token, b"feed", nonces))
    return _proof(token, b"frames", nonces)


def prove_to_feed(connection: socket.socket, token: bytes) -> bytes:
    """Runs the follower's side of the handshake; returns the key that authenticates the frames.

    Raises `Refused` if the other end is no feed or has another token, and `OSError` if it is gone.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    opening = receive_exactly(connection, len(_MAGIC) + _NONCE, deadline)
    if opening[: len(_MAGIC)] != _MAGIC:
        raise Refused("there is no feed of this version of detonation")
    mine = secrets.token_bytes(_NONCE)
    nonces = opening[len(_MAGIC) :] + mine
    connection.sendall(mine + _proof(token, b"follower", nonces))
    answer = receive_exactly(connection, 32, deadline)
    if answer == _REFUSAL:
        raise Refused("the feed has refused the token")
    if not hmac.compare_digest(answer, _proof(token, b"feed", nonces)):
        raise Refused("the other end does not know the token")
    return _proof(token, b"frames", nonces)


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Returns the next `count` bytes of a connection.

    Raises `ConnectionError` if the connection ends before, and `TimeoutError` at the `deadline`.
    """
    found = b""
    while len(found) < count:
        rest = deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError(
                f"the connection timed out: only {len(found)} of {count} bytes have arrived"
            )
        connection.settimeout(rest)
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        found += part
    return found


def _long_enough(token: bytes, name: str) -> bytes:
    if len(token) < SHORTEST:
        raise ValueError(f"{name} has {len(token)} bytes, must have at least {SHORTEST}")
    return token


def _proof(token: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, what + nonces, "sha256")


def _file_content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ValueError(f"other users may read the token in {path}: chmod 600 it")
            return file.read(4096)
    except OSError as error:
        raise ValueError(f"the token in {path} cannot be read: {error.strerror}") from error
