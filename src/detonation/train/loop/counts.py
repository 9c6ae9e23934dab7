"""Counts of skipped contributions, by parameter, and of refused messages, over all starts of a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from detonation.train.loop.session import Session


@dataclass(frozen=True)
class Counts:
    """Contributions `skipped` because a gradient was not finite, by parameter, and messages `refused`."""

    skipped: dict[str, int] = field(default_factory=dict)
    refused: int = 0


NOTHING = Counts()


def saved(extra: Mapping[str, Any]) -> Counts:
    """The counts in a checkpoint's `extra`; values that are no whole numbers count as none."""
    skipped, refused = extra.get("skipped"), extra.get("refused")
    by_name = skipped.items() if isinstance(skipped, dict) else ()
    return Counts({name: n for name, n in by_name if type(n) is int}, refused if type(refused) is int else 0)


def counted(session: Session, before: Counts) -> Counts:
    """The counts of this start and of those `before` it, the same on every rank. Collective."""
    names = [name for name, _ in session.model.named_parameters()]
    skipped, refused = session.optimizer.stats.skipped_by_parameter, session.optimizer.stats.refused
    mine = torch.tensor([*(skipped.get(name, 0) for name in names), refused], device=session.device)
    everyone = torch.tensor(session.world.all_gather(mine)()).view(-1, session.config.mesh.shards, len(mine))
    # All replicas see the faults of a shard, except those that its owner alone sees: the maximum over replicas counts.
    *here, refused = everyone.amax(0).sum(0).tolist()
    together = Counter(before.skipped) + Counter(dict(zip(names, here, strict=True)))
    return Counts(dict(together.most_common()), before.refused + refused)
