"""A `torch.distributed` store made of several stores; a minority of them may be lost."""

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
    """One store made of `stores`.

    Each call ends when a majority of the stores has answered, and is linearizable, like a call of
    one store; see `register`. Any thread may call it. It raises `DistNetworkError` if no majority
    answers. A key that was removed must not be used again.

    host, port: address of a store that answered at the start.
    """

    def __init__(self, stores: Stores, timeout_s: float) -> None:
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)
        self.set_timeout(self._timeout)
        self.host = stores.host
        self.port = stores.port
        self._stores = stores
        # No thread may send requests when the interpreter ends.
        # torch keeps only the C++ part of this object alive.
        atexit.register(self.close)
        # a forked process has no such threads, and its lock may be held
        os.register_at_fork(after_in_child=partial(atexit.unregister, self.close))

    def close(self) -> None:
        """Ends the threads."""
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

    deleteKey = delete_key  # the name that torch's PrefixStore calls

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
        raise NotImplementedError("several stores do not count their keys: use one store for that")

    getNumKeys = num_keys

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        """Values of `keys`; raises `DistStoreError` if one is missing for longer than `timeout`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            found = self._values(keys)
            values = [value for value in found if value is not None]
            if len(values) == len(keys):
                return values
            if time.monotonic() > deadline:
                raise DistStoreError(f"no {first_names(keys, 3)} in the store after {timeout}")
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
    """The store at `addresses`: "HOST:PORT" of one store, or of an odd number of stores, separated
    by commas.

    Waits up to `limit_s` for it, and logs that it waits. Raises `ValueError` if no majority
    answers, or an address is wrong.
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
    """Writes the `reason` why `replica` cannot start to the store at `addresses`, where the others
    wait. Does nothing if the store is unreachable.
    """
    with suppress(DistError, RuntimeError, OSError, ValueError):
        note_refusal(meeting_store(addresses, _TELL_S), replica, reason)
