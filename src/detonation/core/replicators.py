"""Replicators: where a scheme meets the training step. Gradients before the local step, parameters after H of them."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core.channel import Channel
from detonation.core.flat import copy, local
from detonation.core.pending import LookAhead, Pending, gradients
from detonation.core.rounds import Round
from detonation.core.scheme import Scheme
from detonation.kernels import native


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN or infinity; it was caught before it reached the memory."""


class Replicator(Protocol):
    """One level of replication around the step of the base optimizer."""

    channel: Channel

    def before(self, step: int) -> None: ...

    def after(self, step: int) -> None: ...

    def settle(self, step: int) -> None:
        """Ends after `step` steps what is still open, so that the replicas hold the same weights."""
        ...

    def back(self) -> None:
        """To the weights that the replicas agreed on last, from where the next gradient is to be taken."""
        ...

    def ahead(self) -> None:
        """Undoes `back`."""
        ...

    def shared(self) -> list[Tensor]:
        """One tensor a parameter that must be bitwise equal on all replicas between steps."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What this replica must keep to go on, as `kind.parameter`, sharing memory."""
        ...


class GradientReplicator:
    """Replaces each gradient by the update that all replicas agreed on, before the base optimizer sees it.

    With a delay it is the update of an earlier step, and with `lookahead` the gradient was taken where this replica
    expected to be. A parameter that requires a gradient and has none counts as zero, on every replica alike.
    """

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel, base: Optimizer, scheme: Scheme) -> None:
        self.channel = channel
        self._parameters, self._base = parameters, base
        self._delayed = scheme.round.delay > 0
        self._pending = Pending(channel.layout, scheme.round.delay, channel.device)
        self._told = Pending(channel.layout, scheme.round.delay if scheme.lookahead else 0, channel.device)
        self._lookahead = LookAhead(parameters, base, channel.layout) if scheme.lookahead else None

    def before(self, step: int) -> None:
        self.back()
        signals = [_gradient(name, parameter) for name, parameter in self._parameters.items()]
        _refuse_non_finite(dict(zip(self._parameters, signals, strict=True)), step, self.channel.link.replica)
        sent = self.channel.send(signals, step)
        if sent.told is not None:
            self._told.exchange(sent.told)
        if self._delayed:
            copy(gradients(self._parameters), self.channel.layout.views(self._pending.exchange(sent.update)))
        else:
            sent.write(gradients(self._parameters))

    def after(self, step: int) -> None:
        self.ahead()

    def settle(self, step: int) -> None:
        self.back()
        for update in self._pending.landed():
            copy(gradients(self._parameters), self.channel.layout.views(update))
            self._base.step()
        self._pending.clear()
        self._told.clear()

    def back(self) -> None:
        if self._lookahead:
            self._lookahead.back()

    def ahead(self) -> None:
        if self._lookahead:
            self._lookahead.move(self._told.landed())

    def shared(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]

    def state(self) -> dict[str, Tensor]:
        named = self.channel.named
        state = self.channel.state()
        for kind, pending in (("update", self._pending), ("told", self._told)):
            for i, update in enumerate(pending.landed()):
                state |= named(f"{kind}{i}", update)
        return state


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
        self._settled_at = 0
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
        self._settled_at = step

    def back(self) -> None:
        pass

    def ahead(self) -> None:
        pass

    def shared(self) -> list[Tensor]:
        return self.channel.layout.views(self._anchor.detach())

    def state(self) -> dict[str, Tensor]:
        named = self.channel.named
        state = self.channel.state() | named("anchor", self._anchor.detach())
        for kind, flat in self._outer.state[self._anchor].items():
            state |= named(kind, flat)
        if self._round.delay:
            state |= named("arriving", self._arrived()) | {"steps_left": self._steps_left}
        return state

    def _send(self, step: int) -> None:
        moved = self._anchor.detach() - self.channel.layout.flatten(self._weights(), self.channel.device)
        self._arriving = self.channel.send(self.channel.layout.views(moved), step).update
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
        copy(self._weights(), self.channel.layout.views(target))

    def _arrived(self) -> Tensor:
        """The update on its way, waited for; zeros where there is none."""
        if self._arriving is None:
            self._arriving = self.channel.layout.zeros(self.channel.device)
        elif not isinstance(self._arriving, Tensor):
            self._arriving = self._arriving()
        return self._arriving

    def _weights(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]


def _gradient(name: str, parameter: Tensor) -> Tensor | None:
    """The local gradient, laid out as the parameter is."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise ValueError(f"the gradient of {name} is sparse, which cannot be replicated: use sparse=False")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def _refuse_non_finite(signals: Mapping[str, Tensor | None], step: int, replica: int) -> None:
    """One NaN would win top-k for ever and freeze its chunk on every replica, so none may reach the memory."""
    present = {name: signal for name, signal in signals.items() if signal is not None and signal.numel()}
    if not present:
        return
    tensors = list(present.values())
    library = native.load_for(*tensors)
    if library and all(tensor.dtype == torch.float32 for tensor in tensors):
        found = library.non_finite(tensors)
    else:
        finite = torch.stack([norm.float() for norm in torch._foreach_norm(tensors, ord=torch.inf)]).isfinite()
        found = -1 if finite.all() else int(finite.logical_not().nonzero()[0])
    if found >= 0:
        name = list(present)[found]
        raise NonFiniteGradient(f"the gradient of {name} is not finite on replica {replica} at step {step}")
