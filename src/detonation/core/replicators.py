"""Replicators: where a scheme meets the training step. Gradients before the local step, parameters after H of them."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.channel import Channel
from detonation.core.flat import copy, local
from detonation.core.rounds import Round
from detonation.core.schemes import Outer


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN or infinity; it was caught before it reached the memory."""


class Replicator(Protocol):
    """One level of replication around the step of the base optimizer."""

    channel: Channel

    def before(self, step: int) -> None: ...

    def after(self, step: int) -> None: ...

    def settle(self, step: int) -> None:
        """Ends a round that is still open after `step` steps, so that the replicas hold the same weights."""
        ...

    def shared(self) -> list[Tensor]:
        """One tensor a parameter that must be bitwise equal on all replicas between steps."""
        ...

    def state(self) -> dict[str, list[Tensor]]:
        """What this replica must keep to go on: by kind, one tensor a parameter, sharing memory."""
        ...


class GradientReplicator:
    """Replaces each gradient by the update that all replicas agreed on, before the base optimizer sees it.

    A parameter that requires a gradient and has none counts as zero, on every replica alike.
    """

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel) -> None:
        self.channel = channel
        self._parameters = parameters

    def before(self, step: int) -> None:
        signals = [_gradient(name, parameter) for name, parameter in self._parameters.items()]
        _refuse_non_finite(dict(zip(self._parameters, signals, strict=True)), step, self.channel.link.replica)
        update = self.channel.send(signals, step)()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        copy(gradients, self.channel.layout.views(update))

    def after(self, step: int) -> None:
        pass

    def settle(self, step: int) -> None:
        pass

    def shared(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]

    def state(self) -> dict[str, list[Tensor]]:
        memory = self.channel.memory
        return {"residual": memory.views} if memory else {}


class ParameterReplicator:
    """Lets the replicas train alone for a round, then moves all of them to a common anchor.

    The signal is anchor - parameters; the update that all agreed on is the gradient of an outer SGD on the anchor.
    The anchor is fp32 and bitwise equal on all replicas.
    """

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel, round: Round, outer: Outer) -> None:
        self.channel = channel
        self._parameters, self._round = parameters, round
        self._anchor = torch.nn.Parameter(channel.layout.flatten(self._weights(), channel.device))  # [rows, chunk]
        self._outer = torch.optim.SGD([self._anchor], outer.lr, outer.momentum, nesterov=outer.nesterov)
        if outer.momentum:  # from the start, so that there is one state to save and to load, before a round and after
            self._outer.state[self._anchor]["momentum_buffer"] = torch.zeros_like(self._anchor)

    def before(self, step: int) -> None:
        pass

    def after(self, step: int) -> None:
        if self._round.ends(step):
            self._exchange(step)

    def settle(self, step: int) -> None:
        if step % self._round.every:
            self._exchange(step)

    def shared(self) -> list[Tensor]:
        return self._views(self._anchor)

    def state(self) -> dict[str, list[Tensor]]:
        moments = self._outer.state[self._anchor]
        return {"anchor": self.shared()} | {name: self._views(flat) for name, flat in moments.items()}

    def _exchange(self, step: int) -> None:
        moved = self._anchor - self.channel.layout.flatten(self._weights(), self.channel.device)
        self._anchor.grad = self.channel.send(self._views(moved), step)()
        self._outer.step()
        self._anchor.grad = None
        copy(self._weights(), self.shared())

    def _weights(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.channel.layout.views(flat.detach())


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
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(present.values()), ord=torch.inf)])
    finite = largest.isfinite()
    if not finite.all():
        name = list(present)[int(finite.logical_not().nonzero()[0])]
        raise NonFiniteGradient(f"the gradient of {name} is not finite on replica {replica} at step {step}")
