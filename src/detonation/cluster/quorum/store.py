"""A `torch.distributed` store that is made of several stores. A minority of these stores may be
lost.
"""

import atexit
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import Store

from detonation.choices import first_names
from detonation.cluster.position import store_addresses
from detonation.cluster.processes.refusal import note_refusal
from detonation.cluster.processes.rendezvous import reached_store
from detonation.cluster.quorum.register import Change, adds, compares, reads, writes
from detonation.cluster.quorum.stores import Stores

_TIMEOUT_S = 300.0
_POLL_S = 0.005
_TELL_S = 3.0


class QuorumStore(Store):
    """One `torch.distributed` store that keeps its keys in all `stores`.

    Each call ends when a majority of the stores has answered. The calls of all clients are
    linearizable, as on a single store; see `register`. Any thread may make a call. A call raises
    `DistNetworkError` if no majority of the stores answers. No client may use a key again after its
    removal.

    host, port: address of one of the stores that answered at the start.
    """

    def __init__(self, stores: Stores, timeout_s: float) -> None:
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)
        self.set_timeout(self._timeout)
        self.host = stores.host
        self.port = stores.port
        self._stores = stores
        # The threads must not send requests while the interpreter ends.
        # The exit handler also keeps this Python object alive: torch keeps only its C++ part.
        atexit.register(self.close)
        # In a forked process `close` could wait for ever: the copied lock may never be released.
        os.register_at_fork(after_in_child=partial(atexit.unregister, self.close))

    def close(self) -> None:
        """Ends the threads that send requests to the stores."""
        self._stores.close()
        atexit.unregister(self.close)

    def clone(self) -> "QuorumStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._change(key, writes(_bytes(value)))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        change = compares(_bytes(expected_value), _bytes(desired_value))
        found: bytes = self._change(key, change)
        return found

    def add(self, key: str, amount: int) -> int:
        total: int = self._change(key, adds(amount))
        return total

    def delete_key(self, key: str) -> bool:
        self._stores.remove(key)
        return True

    deleteKey = delete_key  # torch's PrefixStore calls the method by this name

    def check(self, keys: list[str]) -> bool:
        return None not in self._values(keys)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._await(keys, self._timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout or self._timeout)

    def has_extended_api(self) -> bool:
        return False

    def num_keys(self) -> int:
        raise NotImplementedError(
            "several stores cannot count their keys: use one store to count keys"
        )

    getNumKeys = num_keys

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        """Waits until all `keys` exist, and returns their values. Raises `DistStoreError` if a key
        is still missing after `timeout`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            found = self._values(keys)
            values = [value for value in found if value is not None]
            if len(values) == len(keys):
                return values
            if time.monotonic() > deadline:
                raise DistStoreError(f"no key {first_names(keys, 3)} in the store after {timeout}")
            time.sleep(_POLL_S)

    def _values(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._stores.changed(dict.fromkeys(keys, reads))

    def _change(self, key: str, change: Change) -> Any:
        return self._stores.changed({key: change})[0]


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return value


def meeting_store(addresses: str, limit_s: float = _TIMEOUT_S) -> Store:
    """Returns the store at which all ranks meet. `addresses` is "HOST:PORT" of one store, or the
    addresses of an odd number of stores, separated by commas.

    Waits at most `limit_s` seconds until the store answers, and logs that it waits. Raises
    `ValueError` if no majority of the stores answers, or if an address is wrong.
    """
    named = store_addresses(addresses)
    if len(named) == 1:
        return reached_store(*named[0], limit_s)
    stores = Stores(named, limit_s)
    try:
        stores.agree(limit_s)
    except BaseException:
        stores.close()
        raise
    return QuorumStore(stores, limit_s)


def refuse_replica(addresses: str, replica: int, reason: str) -> None:
    """Tells the other replicas the `reason` why `replica` cannot start. Writes the reason into the
    store at `addresses`, which replicas read while they wait. Does nothing if the store is
    unreachable.
    """
    with suppress(DistError, RuntimeError, OSError, ValueError):
        note_refusal(meeting_store(addresses, _TELL_S), replica, reason)
