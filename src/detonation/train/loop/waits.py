"""Who waits for whom: the seconds that each replica of a run waited for the slowest one and for the network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from detonation.train.loop.world import World


@dataclass
class Waiting:
    """The time of each step of this rank: `busy` seconds of its own, and seconds in which it `waited` for others.

    `ends` are the positions after which all ranks have met: after each step, or at the end of a round.
    """

    busy: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, seconds: float, waited: float, met: bool) -> None:
        """Takes in a step of `seconds`, of which the rank `waited` some."""
        self.busy.append(seconds - waited)
        self.waited.append(waited)
        if met:
            self.ends.append(len(self.busy))


def gathered_waits(world: World, own: Waiting, shards: int, device: torch.device) -> dict[str, Any]:
    """`waits_between` of the steps that all replicas took, the same on every rank; {} where there are none. Collective.

    Args:
        shards: Ranks of each replica; they wait for each other in backward, and their mean counts.
    """
    begins = [0, *own.ends[:-1]]
    spans = list(zip(begins, own.ends, strict=True)) if own.ends else []
    counts = world.all_gather(torch.tensor([len(spans)], dtype=torch.int64, device=device))()
    common = int(min(count for (count,) in counts))  # a replica that came later has taken the latest steps alone
    if not common:
        return {}
    sums = [[sum(values[first:end]) for first, end in spans[-common:]] for values in (own.busy, own.waited)]
    mine = torch.tensor(sums, dtype=torch.float32, device=device).view(-1)
    ranks = torch.tensor(world.all_gather(mine)()).view(-1, shards, 2, common).mean(1)
    return waits_between(ranks[:, 0].T.tolist(), ranks[:, 1].T.tolist())


def waits_between(busy: Sequence[Sequence[float]], waited: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The seconds that each replica waited for each other one, by name for `summary.json`.

    Between two meetings all wait for the replica that was busy for longest: no longer than it was busy beyond them. The
    rest of their waiting is the network's.

    Args:
        busy, waited: Seconds of each replica, for each time between two meetings.

    Returns:
        `seconds[i][j]` that replica i waited for replica j, `network_s` of each replica, the `slowest`, and `lasted_s`,
        the mean over replicas of the seconds of the steps.

    >>> waits_between(busy=[[1.0, 3.0], [1.0, 4.0]], waited=[[2.5, 0.5], [3.0, 0.0]])
    {'seconds': [[0.0, 5.0], [0.0, 0.0]], 'network_s': [0.5, 0.5], 'slowest': 1, 'lasted_s': 7.5}
    """
    replicas = len(busy[0])
    seconds, network = [[0.0] * replicas for _ in range(replicas)], [0.0] * replicas
    for lasted, lost in zip(busy, waited, strict=True):
        last = max(range(replicas), key=lasted.__getitem__)
        for replica in range(replicas):
            for_it = min(lost[replica], lasted[last] - lasted[replica])
            seconds[replica][last] += for_it
            network[replica] += lost[replica] - for_it
    caused = [sum(row[replica] for row in seconds) for replica in range(replicas)]
    lasted_s = sum(map(sum, [*busy, *waited])) / replicas
    slowest_one = max(range(replicas), key=caused.__getitem__)
    return {"seconds": seconds, "network_s": network, "slowest": slowest_one, "lasted_s": lasted_s}
