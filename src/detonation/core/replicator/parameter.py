"""ParameterReplicator: replicas train alone for a round, then all move to a common anchor."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from detonation.core.flat.layout import copy
from detonation.core.flat.tensors import locals_of
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.local_state import LocalState
from detonation.core.replicator.outer import EagerStart, OuterSGD
from detonation.core.round import Round
from detonation.core.schemes.scheme import ParameterScheme


class ParameterReplicator(Replicator):
    """Lets the replicas train alone for a round, then moves all of them to a common anchor.

    The signal is start of the round - parameters; the update that all agree on is the gradient of an outer SGD on the
    anchor. The anchor is fp32 and bitwise equal on all replicas. With a delay the message has that many steps to
    arrive. The scheme's `resume_from` and `keep` decide how far the parameters then follow the anchor.
    """

    acts_before = False

    def __init__(
        self, parameters: Mapping[str, Tensor], channel: Channel, scheme: ParameterScheme, round: Round
    ) -> None:
        super().__init__(parameters, channel)
        self._round, self._resume_from, self._keep = round, scheme.resume_from, scheme.keep
        self._cycle = scheme.codec.selection.period if scheme.resume_from == "sent" else 1  # messages that send all
        self._synchronized_at = torch.zeros((), dtype=torch.int64, device="cpu")
        self._arriving: Callable[[], Tensor] | Tensor | None = None
        self._unsent: Tensor | None = None
        self._lost: bool | Tensor = False
        self._steps_left = torch.zeros(
            (), dtype=torch.int64, device="cpu"
        )  # until the message lands; 0 where none is on its way
        self._anchor = OuterSGD(self._position(), scheme.outer)
        eager = scheme.resume_from == "own_share"
        self._start = EagerStart(self._anchor.flat, scheme.outer, channel.link.replicas) if eager else None

    def after(self, step: int) -> None:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._land()
        if self._round.ends(step):
            self._send(step)
            if not self._round.delay:
                self._land()

    def synchronize(self, step: int) -> None:
        if step == self._synchronized_at:
            return
        if self._steps_left:
            self._land()
        if self._cycle > 1 or not self._round.ends(step - 1):
            first = -(-step // self._cycle) * self._cycle
            for each in range(first, first + self._cycle):
                self.counts.catch_up(math.inf)  # each message carries a digest of those before it
                self._send(each)
                self._land()
        copy(locals_of(self.parameters), self.shared_weights())
        if self._start:
            self._start.flat.copy_(self._anchor.flat)
        self._synchronized_at.fill_(step)

    def shared_weights(self) -> list[Tensor]:
        return self.layout.parts(self._anchor.flat)

    def replicated(self) -> dict[str, Tensor]:
        return {
            slot.name + suffix: part
            for suffix, flat in self._agreed().items()
            for slot, part in zip(self.layout.slots, self.layout.parts(flat), strict=True)
        }

    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        for suffix, flat in self._agreed().items():
            self.layout.write(flat, [tensors.get(slot.name + suffix) for slot in self.layout.slots])

    def local_state(self) -> LocalState:
        flats = {"anchor": self._anchor.flat, **self._anchor.state(), **(self._start.state() if self._start else {})}
        others = {"synchronized_at": self._synchronized_at}
        if self._round.delay:
            flats["arriving"] = self._arrived()
            others["steps_left"] = self._steps_left
        return self.channel.local_state(flats, others)

    def _agreed(self) -> dict[str, Tensor]:
        """The flats that are the same on all replicas, by the suffix of their parameters' names."""
        return {"": self._anchor.flat} | {f" ({kind})": flat for kind, flat in self._anchor.state().items()}

    def _send(self, step: int) -> None:
        moved = (self._start or self._anchor).flat - self._position()
        transfer = self.channel.send(self.layout.parts(moved), step)
        self._arriving, self._lost = transfer.decode, transfer.is_empty
        self._steps_left.fill_(self._round.delay)
        if transfer.own_update is not None and self._start:
            self._start.advance(self._anchor.flat, transfer.own_update)
            copy(locals_of(self.parameters), self.layout.parts(self._start.flat))
        elif transfer.own_update is not None:
            self._unsent = moved - transfer.own_update

    def _land(self) -> None:
        """Moves the anchor by the update that arrived, and the parameters after it."""
        self._anchor.step(self._arrived())
        self._arriving = None
        self._steps_left.zero_()
        if self._resume_from == "own_share":
            return
        target = anchor = self._anchor.flat
        if self._unsent is not None:
            target = anchor - self._unsent
        elif self._keep:
            target = anchor.lerp(self._position(), self._keep)
        if isinstance(self._lost, Tensor):
            target = torch.where(self._lost, anchor, target)
        elif self._lost:  # the weights here are not finite: nothing of their own movement is kept
            target = anchor
        copy(locals_of(self.parameters), self.layout.parts(target))

    def _arrived(self) -> Tensor:
        """The update in flight, after waiting for it; zeros where there is none."""
        if self._arriving is None:
            self._arriving = self.layout.zeros(self.channel.runtime.device)
        elif not isinstance(self._arriving, Tensor):
            self._arriving = self._arriving()
        return self._arriving

    def _position(self) -> Tensor:
        """The parameters as a flat."""  # [rows, chunk]
        return self.layout.flatten(locals_of(self.parameters), self.channel.runtime.device)
