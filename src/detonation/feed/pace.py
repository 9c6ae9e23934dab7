"""Keeps the shards of a joining replica in step: all of them apply the same copies of the state and
the same steps.
"""

import math
from dataclasses import dataclass

from detonation.cluster.survive.agreement import axis_key
from detonation.cluster.survive.membership import Membership

Point = tuple[float, float]
"""A point of training: a step, and the number of `synchronize` calls since that step."""
BEFORE_COPY: Point = (-1, 0)
NO_LIMIT: Point = (math.inf, math.inf)


@dataclass(frozen=True)
class ToldPace:
    """The last point of training (`point`) that one shard has received since a copy of the state.

    is_final: True if this shard receives no later steps until it loads a new copy of the state.
    """

    point: Point
    is_final: bool

    @classmethod
    def of(cls, words: bytes) -> "ToldPace":
        step, synchronized, is_final = map(int, words.split())
        return cls((step, synchronized), bool(is_final))

    def __str__(self) -> str:
        step, synchronized = self.point
        return f"{step} {synchronized} {self.is_final:d}"


class SharedPace:
    """Lets one shard of a joining replica apply only what all shards of this replica have received.

    Loading a copy of the state and applying a step are collective over the shards, but each shard
    has its own connection. If one shard loses its connection, all shards stop at the same point of
    training, and all of them load a new copy.

    Each shard announces the last point of training that it has received. If a shard needs a new
    copy of the state, it receives nothing more before this copy, and announces its point as final.
    Then all other shards announce their points as final, too. After that no point changes any more,
    so all shards know the last point that all of them have received.

    limit: the last point up to which this shard may apply steps now. copy: index of the current
    copy. is_final: True if this shard has announced its point as final. is_over: True if all shards
    have announced final points; `limit` is then the last point that all shards have received.

    Args:
        member: The membership of this shard of the joining replica.
    """

    def __init__(self, member: Membership) -> None:
        self._store = member.store
        self._newcomer = member.replica
        self._shard = member.shard
        self._shards = member.shards
        self.copy = -1
        self.next_copy()

    def next_copy(self) -> None:
        """Prepares for the next copy of the state, from which no shard has received anything yet.
        All shards call this method after `is_over` has become True.
        """
        self.copy += 1
        self.limit = BEFORE_COPY
        self.is_final = self.is_over = False
        self._tell(ToldPace(BEFORE_COPY, False))

    def close(self) -> None:
        """Announces that this shard receives no more steps after the current copy of the state."""
        if not self.is_final:
            self.is_final = True
            self._tell(ToldPace(self._told.point, True))

    def exchange(self, point: Point) -> None:
        """Announces that this shard has received everything up to `point`, and reads the
        announcements of the other shards.
        """
        if not self.is_final and point != self._told.point:
            self._tell(ToldPace(point, False))
        keys = [self._key(shard) for shard in range(self._shards)]
        if not self._store.check(keys):
            return
        told = [ToldPace.of(self._store.get(key)) for key in keys]
        if any(shard.is_final for shard in told):
            self.close()
        self.limit = min(shard.point for shard in told)
        self.is_over = all(shard.is_final for shard in told)

    def _tell(self, received: ToldPace) -> None:
        self._told = received
        self._store.set(self._key(self._shard), str(received))

    def _key(self, shard: int) -> str:
        return axis_key("pace", self._newcomer, shard, self.copy)
