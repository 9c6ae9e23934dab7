"""Counts: what a run went on without, over all its starts: contributions by their parameter, and messages."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from detonation.train.loop.session import Session


@dataclass(frozen=True)
class Counts:
    """skipped: contributions left out because a gradient was not finite, by parameter; refused: messages."""

    skipped: dict[str, int] = field(default_factory=dict)
    refused: int = 0


NOTHING = Counts()


def saved(extra: Mapping[str, Any]) -> Counts:
    """What a checkpoint says of the starts before it; nothing where it says so in other than numbers."""
    skipped, refused = extra.get("skipped"), extra.get("refused")
    by_name = skipped.items() if isinstance(skipped, dict) else ()
    return Counts({name: n for name, n in by_name if type(n) is int}, refused if type(refused) is int else 0)


def counted(session: Session, before: Counts) -> Counts:
    """Those of this start and of those `before` it, the same on every rank. Collective."""
    names = [name for name, _ in session.model.named_parameters()]
    skipped, refused = session.optimizer.skipped_by_parameter, session.optimizer.refused
    mine = torch.tensor([*(skipped.get(name, 0) for name in names), refused], device=session.device)
    everyone = torch.tensor(session.world.tell(mine)()).view(-1, session.config.mesh.shards, len(mine))
    # what a shard tells all its replicas see, but for what an owner alone is told; shards tell for themselves
    *here, refused = everyone.amax(0).sum(0).tolist()
    together = Counter(before.skipped) + Counter(dict(zip(names, here, strict=True)))
    return Counts(dict(together.most_common()), before.refused + refused)
