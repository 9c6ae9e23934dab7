"""Watch: whether to go on. What one rank's ledger says stops all ranks at the same step, with the same words."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.drift import ON_DRIFT, OnDrift, differences, mended
from detonation.core.ledger import POLICIES, Ledger, Policy
from detonation.core.link import Link
from detonation.core.replicator import Replicator
from detonation.core.wire import Axis

_log = logging.getLogger("detonation")


@dataclass(frozen=True)
class Safety:
    """What to do about poison and drift.

    non_finite: what happens where a replica's gradient is not finite: "stop", or "skip" its contribution.
    verify_every: steps after which what must be equal on all replicas is compared; 0 for never.
    on_drift: where it is not: "stop", or "repair" it from the majority.
    """

    non_finite: Policy = "stop"
    verify_every: int = 0
    on_drift: OnDrift = "stop"

    def __post_init__(self) -> None:
        if self.non_finite not in POLICIES:
            raise ValueError(f"non_finite is {self.non_finite!r}, must be one of {', '.join(POLICIES)}")
        if self.on_drift not in ON_DRIFT:
            raise ValueError(f"on_drift is {self.on_drift!r}, must be one of {', '.join(ON_DRIFT)}")
        least = 1 if self.on_drift == "repair" else 0
        if self.verify_every < least:
            raise ValueError(f"verify_every is {self.verify_every}, must be at least {least} with this on_drift")


@dataclass
class Watch:
    """The ledgers of all levels, and the links over which a reason to stop reaches ranks that do not see it themselves.

    Those are the other shards of a replica, and where there are several levels, or owners that alone see what they are
    told, the replicas of each.
    """

    safety: Safety
    device: torch.device
    ledgers: list[Ledger] = field(default_factory=list)
    others: list[Link] = field(default_factory=list)

    @classmethod
    def over(cls, parameters: Mapping[str, Tensor], device: torch.device, safety: Safety) -> "Watch":
        """A watch that reaches the ranks over which `parameters` are sharded."""
        meshes = dict.fromkeys(p.device_mesh for p in parameters.values() if isinstance(p, DTensor))
        axes = [a for m in meshes for a in ([m] if m.ndim == 1 else [m[name] for name in m.mesh_dim_names or ()])]
        return cls(safety, device, others=[Link(axis) for axis in axes if axis.size() > 1])

    def level(self, names: Sequence[str], link: Link, gradients: bool) -> Ledger:
        """The ledger of one more level."""
        what = "the gradient" if gradients else "the change"
        repairs = self.safety.on_drift == "repair"
        self.ledgers.append(Ledger(names, link.replica, self.safety.non_finite, repairs, what))
        return self.ledgers[-1]

    def spread(self, axes: Sequence[Axis], replicators: Sequence[Replicator]) -> None:
        """Also reaches the replicas of each level, where those of one do not see all there is."""
        if len(axes) > 1 or any(replicator.channel.exchange.secluded for replicator in replicators):
            self.others += [Link(axis) for axis in axes]

    def check(self, step: int) -> None:
        """Raises on all ranks where a ledger of any has reason to. Collective where something arrived since then."""
        if not any(ledger.news for ledger in self.ledgers):  # the same on all ranks: exchanges follow the step alone
            return
        fatal = max(ledger.fatal << 4 | level for level, ledger in enumerate(self.ledgers))
        for link in self.others:
            fatal = int(link.collect(torch.tensor([fatal], device=self.device)).max())
        for ledger in self.ledgers:
            ledger.news = False
        if fatal >> 4:
            raise self.ledgers[fatal & 15].error(fatal >> 4, step)

    def verify(self, replicators: Sequence[Replicator], step: int) -> None:
        """Compares what must be equal on all replicas after `step` steps; repairs it, or raises `Drift`. Collective."""
        for replicator in replicators:
            channel, tensors = replicator.channel, replicator.equal()
            repaired: dict[str, Tensor] = {}
            for difference in differences(channel.link, tensors, self.device):
                if self.safety.on_drift == "repair" and difference.name in tensors:
                    repaired[difference.name] = mended(channel.link, difference, tensors[difference.name])
                    outcome = "repaired"
                else:
                    channel.ledger.drift(difference.odd[0], difference.name)
                    outcome = "all stop"
                if channel.link.replica in (0, *difference.odd):
                    _log.warning("after step %d %s: %s", step, difference, outcome)
            replicator.mend(repaired)
            channel.ledger.news = True
        self.check(step)
