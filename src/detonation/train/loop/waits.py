"""Who waits for whom: the seconds that each replica of a run waited for the slowest one and for the network."""

from collections.abc import Sequence
from typing import Any


class Waits:
    """The seconds of waiting between replicas, summed since the start; the same on every rank.

    Ranks send what they were busy and waited since their last report along with their losses, so it costs no message.
    Between two reports all wait for the replica that was busy for longest: no longer than it was busy beyond them. The
    rest of their waiting is the network's. Where the number of replicas changes the sums begin anew.

    >>> waits = Waits()
    >>> waits.meet([[1.0, 2.5], [1.0, 3.0]], shards=1)
    >>> waits.meet([[3.0, 0.5], [4.0, 0.0]], shards=1)
    >>> waits.table()
    {'seconds': [[0.0, 0.5], [0.0, 0.0]], 'network_s': [2.5, 3.0], 'slowest': 1, 'lasted_s': 7.5}
    """

    def __init__(self) -> None:
        self.own = (0.0, 0.0)
        self._seconds: list[list[float]] = []
        self._network: list[float] = []
        self._lasted = 0.0

    def add(self, seconds: float, waited: float) -> None:
        """Takes in a step of this rank of `seconds`, of which it `waited` some."""
        busy, before = self.own
        self.own = (busy + seconds - waited, before + waited)

    def meet(self, reports: Sequence[Sequence[float]], shards: int) -> None:
        """Takes in the `own` seconds of all ranks, in rank order; they count as reported then.

        shards: Ranks of each replica; they wait for each other in backward, and their mean counts.
        """
        self.own = (0.0, 0.0)
        groups = [reports[first : first + shards] for first in range(0, len(reports), shards)]
        busy, waited = ([sum(rank[i] for rank in group) / len(group) for group in groups] for i in (0, 1))
        replicas = range(len(groups))
        if len(self._network) != len(groups):
            self._seconds, self._network, self._lasted = (
                [[0.0 for _ in replicas] for _ in replicas],
                [0.0] * len(groups),
                0.0,
            )
        last = max(replicas, key=busy.__getitem__)
        for replica in replicas:
            for_it = min(waited[replica], busy[last] - busy[replica])
            self._seconds[replica][last] += for_it
            self._network[replica] += waited[replica] - for_it
        self._lasted += sum([*busy, *waited]) / len(groups)

    def table(self, most: int = 1_000_000) -> dict[str, Any]:
        """The sums by name; {} before the first report, and where there is one replica or more than `most`.

        `seconds[i][j]` that replica i waited for replica j, `network_s` of each replica, the `slowest`, and `lasted_s`,
        the mean over replicas of the seconds of the steps.
        """
        if not 2 <= len(self._network) <= most:
            return {}
        caused = [sum(column) for column in zip(*self._seconds, strict=True)]
        seconds, slowest = [list(row) for row in self._seconds], max(range(len(caused)), key=caused.__getitem__)
        return {"seconds": seconds, "network_s": [*self._network], "slowest": slowest, "lasted_s": self._lasted}
