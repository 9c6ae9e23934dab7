"""Refusal of a start: if one replica's set-up fails, all replicas end.

A replica is *preparing* until it has done all its own checks; then it is *prepared*. If a preparing
replica fails, it writes the reason to the store in which the others wait for it. The others end
with that reason unless all replicas are already prepared. They survive the loss of a replica that
wrote no reason.

Before replicas have met, their store may contain reasons of an earlier start. So a reason is valid
for `FRESH_S`, once for each rank, and until its replica starts again.
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
"""Seconds in which replicas that are started together meet or refuse."""
_CONNECT_S = 3.0
_LOOK_S = 0.25
_KEY = "detonation/refused"
_REFUSED = "refused"


class RefusedStart(SecondaryFailure, ValueError):
    """Another replica cannot start, so this one must not start either."""


class Preparation:
    """The start of one rank, after the replicas have met. Its methods are called in several
    threads.

    store: the store in which the replicas agree; its keys belong to this start only.
    """

    def __init__(self, store: Store, replica: int, rank: int) -> None:
        self._store = store
        self._replica = replica
        self._rank = rank
        self._announces = self._all_prepared = False

    def begin(self) -> None:
        """Allows other replicas to refuse until all are `prepared`, even after training steps."""
        self._announces = True

    def prepared(self) -> None:
        """Announces that this rank's set-up has ended. The others then survive its loss."""
        self._store.set(_prepared(self._rank), "1")

    def refuse(self, reason: str) -> None:
        """Ends the start of all replicas with `reason`, because this replica's set-up failed.

        Later reasons are ignored.
        """
        with suppress(DistError, RuntimeError):  # the store is lost
            self._store.compare_set(
                _REFUSED, "", f"replica {self._replica} did not start: {reason}"
            )

    def refused(self, store: Store, ranks: Sequence[int], under_way: bool) -> RefusedStart | None:
        """The error of another replica that did not start; None after all `ranks` are prepared.

        store: a separate connection. under_way: True if training has begun; ranks that do not
        announce the end of their set-up then count as prepared.
        """
        if self._all_prepared or (under_way and not self._announces):
            return None
        self._all_prepared = store.check([_prepared(rank) for rank in ranks])
        if self._all_prepared or not store.check([_REFUSED]):
            return None
        return RefusedStart(store.get(_REFUSED).decode())


def is_prepared(store: Store, rank: int) -> bool:
    """True if the set-up of `rank` has ended. `store` is the store of its axis."""
    return bool(store.check([_prepared(rank)]))


def refuse_start(host: str, port: int, replica: int, reason: str) -> None:
    """Writes the `reason` why `replica` cannot start to the store in which the others wait, if the
    store is reachable.
    """
    with suppress(DistError, TimeoutError, RuntimeError, OSError):
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
        store = TCPStore(host, port, timeout=timedelta(seconds=_CONNECT_S))
        note_refusal(store, replica, reason)


def note_refusal(store: Store, replica: int, reason: str) -> None:
    """Writes the `reason` why `replica` cannot start to `store`."""
    said = {"replica": replica, "reason": reason, "when": time.time(), "name": secrets.token_hex(4)}
    store.set(_KEY, json.dumps(said))


def refusals(store: Store, replica: int, rank: int) -> Callable[[], None]:
    """Makes a function for `rank`, of `replica`, that raises `RefusedStart` if another replica
    cannot start."""
    store = store.clone()  # type: ignore[attr-defined]  # one for each thread
    text = _text(store)
    # a refusal from an earlier start of this replica
    if text and json.loads(text)["replica"] == replica:
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
    """The newest refusal; "" for none. It uses one request, so that no rank can remove the refusal
    in between.
    """
    return str(store.compare_set(_KEY, "", "").decode())
