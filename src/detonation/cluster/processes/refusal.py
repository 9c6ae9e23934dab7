"""Start of a run of several replicas that one of them refuses: a fault of set-up ends all, and
is never survived.

A replica is *preparing* until everything that it can find out by itself is known to be in order,
then it is *prepared*. A replica that fails while it prepares leaves its reason in the store where
the others wait for it. They end with that reason, as long as they know that not all are prepared. A
replica that is lost without a reason is survived as ever.

Before replicas have met, their store may have reasons of an earlier start. So a reason counts for
`FRESH_S`, for each rank once, and goes away when its replica comes again.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from detonation.cluster.processes.failure import SecondaryFailure

FRESH_S = 60.0
"""Replicas that are started together meet, or refuse, within this time."""
_CONNECT_S = 3.0
_LOOK_S = 0.25
_KEY = "detonation/refused"
_REFUSED = "refused"


class RefusedStart(SecondaryFailure, ValueError):
    """Another replica cannot start, so that none does."""


class Preparation:
    """Start of one rank of replicas that have met. The methods are those of several threads.

    store: Where they agree; its keys are of this start alone.
    """

    def __init__(self, store: Store, replica: int, rank: int) -> None:
        self._store = store
        self._replica = replica
        self._rank = rank
        self._announces = self._all_prepared = False

    def begin(self) -> None:
        """Lets others refuse until all are `prepared`, however many steps there have been."""
        self._announces = True

    def prepared(self) -> None:
        """Lets the others know that the set-up of this rank is over: they survive its loss."""
        self._store.set(_prepared(self._rank), "1")

    def refuse(self, reason: str) -> None:
        """Ends the start of all, because the set-up of this replica failed; the first reason
        counts."""
        with suppress(DistError, RuntimeError):  # nobody can hear of it
            self._store.compare_set(
                _REFUSED, "", f"replica {self._replica} did not start: {reason}"
            )

    def refused(self, store: Store, ranks: Sequence[int], under_way: bool) -> RefusedStart | None:
        """Why another replica did not start, by `store`, another connection; None from when all
        `ranks` are prepared.

        Ranks that do not announce the end of their set-up have it behind them once they are
        `under_way`.
        """
        if self._all_prepared or (under_way and not self._announces):
            return None
        self._all_prepared = store.check([_prepared(rank) for rank in ranks])
        if self._all_prepared or not store.check([_REFUSED]):
            return None
        return RefusedStart(store.get(_REFUSED).decode())


def is_prepared(store: Store, rank: int) -> bool:
    """True if the set-up of `rank` is over, by the store where its axis agrees."""
    return bool(store.check([_prepared(rank)]))


def refuse_start(host: str, port: int, replica: int, reason: str) -> None:
    """Leaves the `reason` why `replica` cannot start at the store where the others wait, if there
    is one."""
    with suppress(DistError, TimeoutError, RuntimeError, OSError):
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
        store = TCPStore(host, port, timeout=timedelta(seconds=_CONNECT_S))
        note_refusal(store, replica, reason)


def note_refusal(store: Store, replica: int, reason: str) -> None:
    """Leaves the `reason` why `replica` cannot start."""
    said = {"replica": replica, "reason": reason, "when": time.time(), "name": secrets.token_hex(4)}
    store.set(_KEY, json.dumps(said))


def refusals(store: Store, replica: int, rank: int) -> Callable[[], None]:
    """A function that raises `RefusedStart` where another replica cannot start. `rank` has come as
    `replica`."""
    store = store.clone()  # type: ignore[attr-defined]  # one for each thread
    text = _text(store)
    if text and json.loads(text)["replica"] == replica:  # an earlier start of this one
        store.compare_set(_KEY, text, "")
    looked = time.monotonic() - _LOOK_S

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < _LOOK_S:
            return
        looked = time.monotonic()
        said = _said(store)
        if not said or said["replica"] == replica or abs(time.time() - said["when"]) > FRESH_S:
            return
        if store.add(f"{_KEY}/{said['name']}/{rank}", 1) == 1:
            raise RefusedStart(f"replica {said['replica']} did not start: {said['reason']}")

    return look


def _prepared(rank: int) -> str:
    return f"prepared/{rank}"


def _said(store: Store) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(_text(store) or "{}")
    return said


def _text(store: Store) -> str:
    """Newest refusal; "" for none. One request, so that no other rank comes in between."""
    return str(store.compare_set(_KEY, "", "").decode())
