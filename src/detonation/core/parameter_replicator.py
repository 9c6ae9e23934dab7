"""ParameterReplicator: replicas train alone for a round, then all move to a common anchor."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from detonation.core.channel import Channel
from detonation.core.flat import copy, local
from detonation.core.private import Private
from detonation.core.rounds import Round
from detonation.core.scheme import Scheme


class ParameterReplicator:
    """Lets the replicas train alone for a round, then moves all of them to a common anchor.

    The signal is anchor - parameters; the update that all agreed on is the gradient of an outer SGD on the anchor.
    The anchor is fp32 and bitwise equal on all replicas. With a delay the message has that many steps to arrive, and
    the parameters that then follow the anchor keep the share `keep` of where they have got to meanwhile.
    """

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel, scheme: Scheme, round: Round) -> None:
        assert scheme.outer is not None
        outer = scheme.outer
        self.channel = channel
        self._parameters, self._round, self._keep = parameters, round, scheme.keep
        self._settled_at = torch.zeros((), dtype=torch.int64)
        self._arriving: Callable[[], Tensor] | Tensor | None = None
        self._steps_left = torch.zeros((), dtype=torch.int64)  # until the message lands; 0 where none is on its way
        self._anchor = torch.nn.Parameter(channel.layout.flatten(self._weights(), channel.device))  # [rows, chunk]
        self._outer = torch.optim.SGD([self._anchor], outer.lr, outer.momentum, nesterov=outer.nesterov)
        if outer.momentum:  # from the start, so that there is one state to save and to load, before a round and after
            self._outer.state[self._anchor]["momentum_buffer"] = torch.zeros_like(self._anchor)

    def before(self, step: int) -> None:
        pass

    def after(self, step: int) -> None:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._land(self._keep)
        if self._round.ends(step):
            self._send(step)
            if not self._round.delay:
                self._land(self._keep)

    def settle(self, step: int) -> None:
        if step == self._settled_at:
            return
        if self._steps_left:
            self._land(1.0)
        if not self._round.ends(step - 1) or self._round.delay:
            self._send(step)
            self._land(0.0)
        copy(self._weights(), self.shared())
        self._settled_at.fill_(step)

    def back(self) -> None:
        pass

    def ahead(self) -> None:
        pass

    def shared(self) -> list[Tensor]:
        return self.channel.layout.parts(self._anchor.detach())

    def private(self) -> Private:
        flats = {"anchor": self._anchor.detach(), **self._outer.state[self._anchor]}
        settled = {"settled_at": self._settled_at}
        if not self._round.delay:
            return self.channel.private(flats, settled)
        return self.channel.private(flats | {"arriving": self._arrived()}, settled | {"steps_left": self._steps_left})

    def _send(self, step: int) -> None:
        moved = self._anchor.detach() - self.channel.layout.flatten(self._weights(), self.channel.device)
        self._arriving = self.channel.send(self.channel.layout.parts(moved), step).update
        self._steps_left.fill_(self._round.delay)

    def _land(self, keep: float) -> None:
        """Moves the anchor by what arrived, and the parameters to it but for a share of `keep`."""
        self._anchor.grad = self._arrived()
        self._outer.step()
        self._anchor.grad, self._arriving = None, None
        self._steps_left.zero_()
        target = self._anchor.detach()
        if keep:
            target = target.lerp(self.channel.layout.flatten(self._weights(), self.channel.device), keep)
        copy(self._weights(), self.channel.layout.parts(target))

    def _arrived(self) -> Tensor:
        """The update on its way, waited for; zeros where there is none."""
        if self._arriving is None:
            self._arriving = self.channel.layout.zeros(self.channel.device)
        elif not isinstance(self._arriving, Tensor):
            self._arriving = self._arriving()
        return self._arriving

    def _weights(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]
