"""Watch: whether to go on. What one rank's ledger says stops all ranks at the same step, with the same words."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.agreement.desync import ON_DRIFT, OnDrift, differences, mended
from detonation.core.integrity import readback
from detonation.core.integrity.fault_counts import POLICIES, Ledger, Policy
from detonation.core.link.communicator import Axis
from detonation.core.link.link import Link
from detonation.core.replicator.base import Replicator

_log = logging.getLogger("detonation")


@dataclass(frozen=True)
class Safety:
    """What to do about poison and drift.

    non_finite: what happens where a replica's gradient is not finite: "stop", or "skip" its contribution. On an
    accelerator "stop" skips it too, and stops a step later, or two.
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

    On an accelerator nobody waits to learn of a reason: what a step gave is read when the next one begins, and when the
    one after that does where it must first reach such ranks.
    """

    safety: Safety
    device: torch.device
    ledgers: list[Ledger] = field(default_factory=list)
    others: list[Link] = field(default_factory=list)
    _asked: tuple[readback.Later, int] | None = None  # the gravest reason of all ranks, and the step that gave it

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

    def begin(self, step: int) -> None:
        """Raises on all ranks where earlier steps gave reason to, and `check` did not wait to know. Collective."""
        if not readback.late(self.device):
            return
        self._raise_asked()
        fatal = self._fatal(step - 1)
        if fatal is not None and self.others:
            self._asked = readback.Later(self._gravest(fatal)), step - 1
        elif fatal:
            self._raise(fatal, step - 1)

    def check(self, step: int) -> None:
        """Raises on all ranks where a ledger of any has reason to, if that needs no wait for a device. Collective."""
        if not readback.late(self.device):
            self._decide(step, step)

    def conclude(self, step: int) -> None:
        """The same after `step` steps, when nothing is on its way any more; waits where it must."""
        self._decide(step, math.inf)

    def catch_up(self, until: float) -> None:
        """Counts in all ledgers what was to arrive at steps up to `until`."""
        for ledger in self.ledgers:
            ledger.catch_up(until)

    def _decide(self, step: int, until: float) -> None:
        self._raise_asked()
        fatal = self._fatal(until)
        if fatal is not None:
            self._raise(int(self._gravest(fatal)) if self.others else fatal, step)

    def _fatal(self, until: float) -> int | None:
        """The gravest reason of this rank's ledgers; None where nothing was to arrive at the steps up to `until`."""
        self.catch_up(until)
        news = [ledger.news(until) for ledger in self.ledgers]
        if not any(news):
            return None
        return max(ledger.fatal << 4 | level for level, ledger in enumerate(self.ledgers))

    def _gravest(self, fatal: int) -> Tensor:
        """That of all ranks. Collective."""  # [1] int64
        told = torch.full((1,), fatal, device=self.device)
        for link in self.others:
            told = link.collect(told).amax(0)
        return told

    def _raise_asked(self) -> None:
        asked, self._asked = self._asked, None
        if asked:
            (fatal,), step = asked[0].read(), asked[1]
            self._raise(fatal, step)

    def _raise(self, fatal: int, step: int) -> None:
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
            channel.ledger.expect(step - 1)
        self._decide(step, step - 1)
