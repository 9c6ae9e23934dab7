"""The other side of a guest: a rank that trains, and where the guest finds the state."""

import math

from detonation.cluster.survive.agreement import coming_key, copy_key, feed_key
from detonation.cluster.survive.membership import Membership


class Host:
    """One rank's dealings with a replica that comes in, by the store."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @property
    def guest(self) -> int | None:
        """A replica that asks to come in, or waits for its step; None without one."""
        return self.membership.guest if self.membership.guest_asks else None

    def offer(self, guest: int, address: str) -> None:
        """Lets a guest know where it finds the state of this shard."""
        self.membership.store.set(feed_key(guest, self.membership.shard), address)

    def copy_step(self, guest: int, step: int) -> float:
        """The step after which all shards give their guest a copy; infinity until the guests of all are there.

        The shards of a replica are in the same step, or in two that follow each other.
        """
        store, shard, shards = self.membership.store, self.membership.shard, self.membership.shards
        store.set(coming_key(guest, shard), "1")
        if shard == 0 and store.check([coming_key(guest, each) for each in range(shards)]):
            store.compare_set(copy_key(guest), "", str(step + (2 if shards > 1 else 0)))
        return int(store.get(copy_key(guest))) if store.check([copy_key(guest)]) else math.inf
