"""The connection of this process to one of several stores. It also reads the identity of the
process that runs the store.
"""

import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from detonation.cluster.position import joined_address
from detonation.cluster.quorum.register import READ, Swap

_IDENTITY = "detonation/store/identity"
_CONNECT_S = 2.0
_ANSWER_S = timedelta(seconds=5)


class Connection:
    """The connection of this process to the store at `host` and `port`.

    A request may never return if the network drops packets. So each thread that sends requests to
    the store has a `Connection` of its own.

    identity: a random id of the store's process, written by the first client of the store. The id
    is lost with the process. It is "" before this client has read it. why: the reason why the store
    does not answer; "" while it answers. tried: True if an attempt to reach the store has failed.
    ended: True if no process listens at the address now, or if a new process listens there. since:
    start time of the request that still has no answer; 0 if there is no such request. told: True if
    this client has logged that the store is lost. told_members: True if this client has given the
    store the list of the run's stores.
    """

    def __init__(self, number: int, host: str, port: int) -> None:
        self.number = number
        self.host = host
        self.port = port
        self.name = joined_address(host, port)
        self.identity = ""
        self.why = "no answer yet"
        self.tried = False
        self.ended = False
        self.told = False
        self.told_members = False
        self.since = 0.0
        self._store: TCPStore | None = None

    def connect(self) -> None:
        """Connects to the store, and reads the identity of its process. Raises `OSError` or
        `DistError` if the store does not answer.
        """
        # try a plain socket first: torch retries until its timeout, and hides a refused connection
        socket.create_connection((self.host, self.port), timeout=_CONNECT_S).close()
        try:
            store = TCPStore(self.host, self.port, timeout=_ANSWER_S, use_libuv=True)
        except DistError as error:
            raise OSError("the program that listens at this address is no store") from error
        drawn = secrets.token_hex(8)
        self.identity = store.compare_set(_IDENTITY, "", drawn).decode()
        self._store = store
        self.why = ""
        self.ended = False

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def lose(self, error: Exception) -> None:
        """Records that the store does not answer because of `error`."""
        self._store = None
        self.tried = True
        self.why = str(error).partition("\n")[0].partition(". ")[0]
        if isinstance(error, OSError):
            self.why = error.strerror or self.why
        self.ended = isinstance(error, ConnectionRefusedError)

    def answers(self, requests: Mapping[str, Swap]) -> dict[str, bytes]:
        """Sends `requests` to the store. Returns, for each key, the bytes that the store holds
        afterwards.

        Raises `DistError` or `RuntimeError` if the store is lost.
        """
        assert self._store is not None
        found = {}
        keys = [key for key, request in requests.items() if request == READ]
        # `multi_get` would wait for a missing key, so `check` first looks whether all keys exist
        if len(keys) > 2 and self._store.check(keys):
            found = dict(zip(keys, self._store.multi_get(keys), strict=True))
        for key in requests.keys() - found.keys():
            found[key] = self._asked(self._store, key, *requests[key])
        return found

    @staticmethod
    def _asked(store: TCPStore, key: str, expected: bytes, desired: bytes | None) -> bytes:
        if desired is None:
            store.delete_key(key)
            return b""
        # `compare_set` accepts bytes, although torch's type hints allow only strings
        found: bytes = store.compare_set(key, expected, desired)  # type: ignore[arg-type]
        if found == expected != desired:  # for a missing key, `compare_set` returns `expected`
            return b""
        return found
