"""The pace of a newcomer: its shards apply the same copies of the state, and the same steps."""

import math
from dataclasses import dataclass

from detonation.cluster.survive.agreement import axis_key
from detonation.cluster.survive.membership import Membership

Point = tuple[float, float]
"""A step, and the number of `synchronize` calls since that step."""
BEFORE_COPY: Point = (-1, 0)
NO_LIMIT: Point = (math.inf, math.inf)


@dataclass(frozen=True)
class ToldPace:
    """The last `point` that one shard has received since a copy of the state.

    is_final: this shard receives nothing more after this copy, so it needs a new one.
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
    """Limits what one shard of a newcomer applies to what all its shards have received.

    Loading a copy and applying a step are collective over the shards, but each shard has its own
    connection. If one shard loses it, the shards stop at the same point, and all take a new copy.

    The rule: a shard tells what it has received. After a shard has told that this is final, all
    shards do so. Then the last shared point cannot change any more, so all shards know it.

    limit: the last point that this shard may apply now. copy: number of the present copy.
    is_final: this shard needs a new copy. is_over: all shards do, and `limit` is the end.

    Args:
        member: This shard of the newcomer.
    """

    def __init__(self, member: Membership) -> None:
        self._store = member.store
        self._newcomer = member.replica
        self._shard = member.shard
        self._shards = member.shards
        self.copy = -1
        self.next_copy()

    def next_copy(self) -> None:
        """Goes on to the next copy, of which nothing has come yet. All shards call it after
        `is_over`.
        """
        self.copy += 1
        self.limit = BEFORE_COPY
        self.is_final = self.is_over = False
        self._tell(ToldPace(BEFORE_COPY, False))

    def close(self) -> None:
        """This shard receives nothing more after this copy."""
        if not self.is_final:
            self.is_final = True
            self._tell(ToldPace(self._told.point, True))

    def exchange(self, point: Point) -> None:
        """Tells that this shard has received all up to `point`, and reads what the others tell."""
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
