"""Checks that each replica number belongs to one process, and that all replicas were started with
equal counts of replicas and shards.

Replicas that are separate worlds get their numbers from users. A user may give one number to two
replicas, or different counts to replicas. The replicas meet in a store. While a rank waits for the
other replicas, it repeatedly writes a claim of its number to this store, each time with a higher
count. So a claim that changes belongs to a live process, and claims of earlier starts do not
matter.
"""

import json
import os
import platform
import secrets
import time

from torch.distributed.distributed_c10d import Store

from detonation.cluster.processes.refusal import RefusedStart, note_refusal

_LOOK_S = 0.25
_SIZE = "detonation/counts"


def this_process() -> str:
    """Returns a name of this process that is clear to users on other machines, too."""
    return f"process {os.getpid()} on {platform.node()}"


class Claim:
    """The claim of a rank to its number. `rank` belongs to `replica` of `replicas` with `shards`
    ranks each.

    The methods compare this claim with the claims of other processes. If another process claims the
    same number, or has other counts of replicas or shards, the methods write the reason to the
    store for the waiting ranks, and raise `RefusedStart`.
    """

    def __init__(self, store: Store, replica: int, replicas: int, shards: int, rank: int) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a connection per thread
        self._replica = replica
        self._size = f"{replicas} replicas x {shards} shards"
        self._key = _key(rank)
        self._own = [secrets.token_hex(4), this_process(), self._size]
        self._first = self._read(_key(0))
        self._count = 0
        self._looked = 0.0
        self.look()

    def look(self) -> None:
        """Writes the claim again, and compares it with the claims of other processes. The rank
        calls this method repeatedly while it waits.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        found = self._read(self._key)
        self._store.set(self._key, json.dumps([*self._own, self._count]))
        # before this object wrote its first claim, `found` may be a claim of an earlier start
        if self._count:
            self._require_own(found)
        self._count += 1
        first = self._read(_key(0))
        if first != self._first and first:
            self._require_size(first[2])

    def offer(self, axis: Store) -> None:
        """Writes to the store `axis` how many replicas and shards this rank was started with. Only
        the first rank calls this method. `hold` compares the counts of each other rank with these.
        """
        axis.set(_SIZE, self._size)

    def hold(self, axis: Store) -> None:
        """Claims the number of this rank in the store `axis`, which only this start of the run
        uses.

        Raises `RefusedStart` if another process claimed this number, or if the first rank was
        started with another count of replicas or shards.
        """
        claim = json.dumps(self._own)
        self._require_own(json.loads(axis.compare_set(self._key, "", claim)))
        self._require_size(axis.compare_set(_SIZE, "", self._size).decode())

    def _read(self, key: str) -> list[str]:
        """Returns the claim under `key` in the store; an empty list if there is none."""
        claim: list[str] = json.loads(self._store.compare_set(key, "", "").decode() or "[]")
        return claim

    def _require_own(self, claim: list[str]) -> None:
        if claim[0] == self._own[0]:
            return
        self._refuse(
            f"{claim[1]} and {self._own[1]} are both replica {self._replica}: give each replica"
            " its own --replica"
        )

    def _require_size(self, size: str) -> None:
        if size == self._size:
            return
        self._refuse(
            f"replica {self._replica} was started with {self._size}, replica 0 with {size}:"
            " give all replicas the same --replicas and --shards"
        )

    def _refuse(self, reason: str) -> None:
        note_refusal(self._store, self._replica, reason, waiting=True)
        raise RefusedStart(reason)


def _key(rank: int) -> str:
    return f"detonation/claim/{rank}"
