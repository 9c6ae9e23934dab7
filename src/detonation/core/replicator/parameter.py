"""ParameterReplicator: replicas train alone for a round, then all move to a common anchor."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from detonation.core.flat.layout import copy, local
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.local_state import Private
from detonation.core.replicator.outer import OuterSGD, Start
from detonation.core.round import Round
from detonation.core.schemes.scheme import Scheme


class ParameterReplicator:
    """Lets the replicas train alone for a round, then moves all of them to a common anchor.

    The signal is where the round began - parameters; the update that all agreed on is the gradient of an outer SGD on
    the anchor. The anchor is fp32 and bitwise equal on all replicas. With a delay the message has that many steps to
    arrive. How far the parameters then follow the anchor is the scheme's `follow` and `keep`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel, scheme: Scheme, round: Round) -> None:
        assert scheme.outer is not None
        self.channel = channel
        self._parameters, self._round = parameters, round
        self._follows, self._keep = scheme.follow, scheme.keep
        self._cycle = scheme.codec.selection.period if scheme.follow == "told" else 1  # messages that tell everything
        self._settled_at = torch.zeros((), dtype=torch.int64)
        self._arriving: Callable[[], Tensor] | Tensor | None = None
        self._untold: Tensor | None = None
        self._lost: bool | Tensor = False
        self._steps_left = torch.zeros((), dtype=torch.int64)  # until the message lands; 0 where none is on its way
        self._anchor = OuterSGD(self._where(), scheme.outer)
        ahead = scheme.follow == "share"
        self._start = Start(self._anchor.flat, scheme.outer, channel.link.replicas) if ahead else None

    def before(self, step: int) -> None:
        pass

    def after(self, step: int) -> None:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._land()
        if self._round.ends(step):
            self._send(step)
            if not self._round.delay:
                self._land()

    def settle(self, step: int) -> None:
        if step == self._settled_at:
            return
        if self._steps_left:
            self._land()
        if self._cycle > 1 or not self._round.ends(step - 1):
            first = -(-step // self._cycle) * self._cycle
            for each in range(first, first + self._cycle):
                self.channel.ledger.catch_up(math.inf)  # each message tells what its sender heard before it
                self._send(each)
                self._land()
        copy(self._weights(), self.shared())
        if self._start:
            self._start.flat.copy_(self._anchor.flat)
        self._settled_at.fill_(step)

    def back(self) -> None:
        pass

    def ahead(self) -> None:
        pass

    def shared(self) -> list[Tensor]:
        return self.channel.layout.parts(self._anchor.flat)

    def equal(self) -> dict[str, Tensor]:
        names = [slot.name for slot in self.channel.layout.slots]
        return {
            name + suffix: part
            for suffix, flat in self._agreed().items()
            for name, part in zip(names, self.channel.layout.parts(flat), strict=True)
        }

    def mend(self, tensors: Mapping[str, Tensor]) -> None:
        for suffix, flat in self._agreed().items():
            self.channel.layout.write(flat, [tensors.get(slot.name + suffix) for slot in self.channel.layout.slots])

    def private(self) -> Private:
        flats = {"anchor": self._anchor.flat, **self._anchor.state(), **(self._start.state() if self._start else {})}
        settled = {"settled_at": self._settled_at}
        if not self._round.delay:
            return self.channel.private(flats, settled)
        return self.channel.private(flats | {"arriving": self._arrived()}, settled | {"steps_left": self._steps_left})

    def _agreed(self) -> dict[str, Tensor]:
        """What is the same on all replicas, by what is said behind the names of its parameters."""
        return {"": self._anchor.flat} | {f" ({kind})": flat for kind, flat in self._anchor.state().items()}

    def _send(self, step: int) -> None:
        moved = (self._start or self._anchor).flat - self._where()
        sent = self.channel.send(self.channel.layout.parts(moved), step)
        self._arriving = sent.update
        self._steps_left.fill_(self._round.delay)
        self._lost = sent.silent
        if sent.told is not None and self._start:
            self._start.follow(self._anchor.flat, sent.told)
            copy(self._weights(), self.channel.layout.parts(self._start.flat))
        elif sent.told is not None:
            self._untold = moved - sent.told

    def _land(self) -> None:
        """Moves the anchor by what arrived, and the parameters after it."""
        self._anchor.step(self._arrived())
        self._arriving = None
        self._steps_left.zero_()
        if self._follows == "share":
            return
        target = self._anchor.flat
        if self._untold is not None:
            target = target - self._untold
        elif self._keep:
            target = target.lerp(self._where(), self._keep)
        if isinstance(self._lost, Tensor):
            target = torch.where(self._lost, self._anchor.flat, target)
        elif self._lost:  # the weights here are not finite: nothing of where they have got to is kept
            target = self._anchor.flat
        copy(self._weights(), self.channel.layout.parts(target))

    def _arrived(self) -> Tensor:
        """The update on its way, waited for; zeros where there is none."""
        if self._arriving is None:
            self._arriving = self.channel.layout.zeros(self.channel.device)
        elif not isinstance(self._arriving, Tensor):
            self._arriving = self._arriving()
        return self._arriving

    def _where(self) -> Tensor:
        return self.channel.layout.flatten(self._weights(), self.channel.device)  # [rows, chunk]

    def _weights(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]
