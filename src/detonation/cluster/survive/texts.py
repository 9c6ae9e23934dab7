"""Texts between ranks of which some may be lost meanwhile, through the store where the replicas meet."""

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from detonation.cluster.survive.membership import Membership
from detonation.core.link.elastic_communicator import PeerLost

_POLL_S = 0.01
_TEXT, _LOST = b"+", b"-"


class StoreTexts:
    """Gathers texts of the ranks of some replicas; any thread may use it, one at a time.

    The store keeps the first value of a key. So where a rank is lost, either all others have its text or none has.

    Args:
        members: The replicas, by the numbers with which they began.
        channel: A name that no other texts had.
    """

    def __init__(self, membership: Membership, members: Sequence[int], channel: str) -> None:
        self._membership, self._channel, self._count = membership, channel, 0
        self._store: Store = membership.store.clone()  # type: ignore[attr-defined]  # one connection for each thread
        self._ranks = [member * membership.shards + shard for member in members for shard in range(membership.shards)]
        self.rank, self.world_size = self._ranks.index(membership.rank), len(self._ranks)

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank. Collective; raises `PeerLost` on all that are left where one is lost."""
        self._count += 1
        keys = [self._key(self._count, rank) for rank in self._ranks]
        self._first(keys[self.rank], _TEXT + text.encode(errors="surrogateescape"))
        while not self._store.check(keys):
            lost = [rank // self._membership.shards not in self._membership.members for rank in self._ranks]
            for key in (key for key, gone in zip(keys, lost, strict=True) if gone):
                self._first(key, _LOST)
            self._membership.call_if_left()
            time.sleep(_POLL_S)
        values = self._store.multi_get(keys)
        if self._count > 1:  # which all have read
            self._store.delete_key(self._key(self._count - 1, self._ranks[self.rank]))
        if any(value[:1] == _LOST for value in values):
            raise PeerLost("a replica was lost meanwhile")
        return [value[1:].decode(errors="surrogateescape") for value in values]

    def broadcast(self, text: str) -> str:
        """The text of the first rank. Collective, as `gather`."""
        return self.gather(text if not self.rank else "")[0]

    def _first(self, key: str, value: bytes) -> None:
        self._store.compare_set(key, "", value)  # type: ignore[arg-type]

    def _key(self, count: int, rank: int) -> str:
        return f"texts/{self._channel}/{count}/{rank}"
