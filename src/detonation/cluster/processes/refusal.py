"""Refusal of a start: if the set-up of one rank or replica fails, all ranks end, each with the
reason.

A rank of a launcher's world that cannot start still meets the other ranks, and sends them the
reason.

A replica is *preparing* until it has done all its own checks; after that it is *prepared*. If a
preparing replica fails, it writes the reason to the store in which the other replicas wait for it.
The other replicas end with that reason, unless all replicas are already prepared. If a replica is
lost without a reason in the store, the other replicas continue.

Before replicas have met, their store may contain reasons of an earlier start. So a reason that a
rank finds at its start counts only until it is `FRESH_S` seconds old, and only once for each rank.
A failed replica that starts again removes its reason. A reason that arrives while the rank waits
always counts, because clocks of machines may differ.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from detonation.cluster.devices import device_name, require_own_devices
from detonation.cluster.position import LaunchPosition
from detonation.cluster.processes.failure import SecondaryFailure, describe
from detonation.cluster.processes.rendezvous import rendezvous_store, wait_until_read

FRESH_S = 60.0
"""Seconds within which ranks or replicas that are started together must meet or refuse the
start.
"""
_LOOK_S = 0.25
_KEY = "detonation/refused"
_REFUSED = "refused"


class RefusedStart(SecondaryFailure, ValueError):
    """Raised on a rank that must not start, because another rank or replica cannot start.

    rank: in a world that a launcher started, the lowest number of a rank that cannot start.
    """

    rank = 0


def refuse_world(position: LaunchPosition, error: ValueError) -> ValueError:
    """Sends the reason why this rank cannot start to the other ranks of a launcher's world. Waits
    for these ranks at most `FRESH_S` seconds.

    Returns the error that this rank must raise: a `RefusedStart` if a rank with a lower number
    cannot start either.
    """
    if position.world_size == 1:
        return error
    try:
        store = rendezvous_store(position, timeout_s=FRESH_S)
        _compare(store, position, ["", describe(error)])
    except RefusedStart as refused:
        if refused.rank < position.rank:
            return refused
    except (RuntimeError, OSError, ValueError):  # not all other ranks connected in time
        return error
    return error


def require_start(store: Store, position: LaunchPosition, device: torch.device) -> None:
    """Raises an error on all ranks if a rank cannot start, if two ranks share a GPU, or if some
    ranks use GPUs and others the CPU.

    Collective: a rank that cannot start calls `refuse_world` instead of this function.
    """
    _compare(store, position, [device_name(device, socket.gethostname()), ""])


def _compare(store: Store, position: LaunchPosition, own: Sequence[str]) -> None:
    """Exchanges the device name of each rank and, if a rank cannot start, the reason.

    Raises `RefusedStart` or `ValueError` after all ranks have read the names and reasons.
    """
    keys = [f"detonation/start/{rank}" for rank in range(position.world_size)]
    store.set(keys[position.rank], json.dumps(own))
    names, reasons = zip(*map(json.loads, store.multi_get(keys)), strict=True)
    try:
        for rank, reason in enumerate(reasons):
            if reason:
                refused = RefusedStart(f"rank {rank} did not start: {reason}")
                refused.rank = rank
                raise refused
        require_own_devices(names)
    except ValueError:
        wait_until_read(store, position.rank, position.world_size)
        raise


class Preparation:
    """Ends the start of all replicas if one replica cannot start. Each rank has one `Preparation`,
    from the moment when the replicas have connected until all ranks have ended their set-up.
    Several threads call its methods.

    store: the store in which ranks announce that their set-up has ended or failed; its keys belong
    to this start only.
    """

    def __init__(self, store: Store, replica: int, rank: int) -> None:
        self._store = store
        self._replica = replica
        self._rank = rank
        self._announces = self._all_prepared = False

    def begin(self) -> None:
        """From now on, this rank ends if another replica refuses the start. This holds until all
        replicas are `prepared`, even if training steps have begun.
        """
        self._announces = True

    def prepared(self) -> None:
        """Announces that this rank's set-up has ended. From now on the other replicas survive the
        loss of this rank.
        """
        self._store.set(_prepared(self._rank), "1")

    def refuse(self, reason: str) -> None:
        """Ends the start of all replicas with `reason`, because the set-up of this replica failed.

        Reasons that come later are ignored.
        """
        with suppress(DistError, RuntimeError):  # nothing can be written to a lost store
            self._store.compare_set(
                _REFUSED, "", f"replica {self._replica} did not start: {reason}"
            )

    def refused(self, store: Store, ranks: Sequence[int], under_way: bool) -> RefusedStart | None:
        """Returns the error to raise if a replica refused the start. Returns None if no replica
        did, or if all `ranks` are prepared.

        store: a store on a separate connection. under_way: True if training has begun; the method
        then returns None unless this rank has called `begin`.
        """
        if self._all_prepared or (under_way and not self._announces):
            return None
        self._all_prepared = store.check([_prepared(rank) for rank in ranks])
        if self._all_prepared or not store.check([_REFUSED]):
            return None
        return RefusedStart(store.get(_REFUSED).decode())


def is_prepared(store: Store, rank: int) -> bool:
    """True if the set-up of `rank` has ended. `store` is the store of the rank's mesh axis."""
    return bool(store.check([_prepared(rank)]))


def note_refusal(store: Store, replica: int, reason: str, waiting: bool = False) -> None:
    """Writes a refusal into `store`: the `reason` why `replica` cannot start.

    waiting: True if the reason is only for ranks that already wait in the store, not for ranks that
    start later.
    """
    said = {"replica": replica, "reason": reason, "when": time.time(), "name": secrets.token_hex(4)}
    if waiting:
        said["when"] = 0.0
    store.set(_KEY, json.dumps(said))


def refusals(store: Store, replica: int, rank: int) -> Callable[[], None]:
    """Returns a function that raises `RefusedStart` if another replica cannot start. A rank calls
    this function repeatedly while it waits.
    """
    store = store.clone()  # type: ignore[attr-defined]  # a connection per thread
    earlier = _said(store)
    # remove a refusal that an earlier start of this replica has written
    if earlier.get("replica") == replica:
        store.compare_set(_KEY, json.dumps(earlier), "")
    looked = time.monotonic() - _LOOK_S

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < _LOOK_S:
            return
        looked = time.monotonic()
        said = _said(store)
        if not said or said["replica"] == replica:
            return
        if said == earlier and abs(time.time() - said["when"]) > FRESH_S:
            return
        if store.add(f"{_KEY}/{said['name']}/{rank}", 1) == 1:
            raise RefusedStart(f"replica {said['replica']} did not start: {said['reason']}")

    return look


def _prepared(rank: int) -> str:
    return f"prepared/{rank}"


def _said(store: Store) -> dict[str, Any]:
    """Returns the newest refusal; an empty dictionary if there is none. Reads the refusal in one
    request: between two requests another rank could remove it.
    """
    said: dict[str, Any] = json.loads(store.compare_set(_KEY, "", "").decode() or "{}")
    return said
