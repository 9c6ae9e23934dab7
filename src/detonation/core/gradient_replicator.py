"""GradientReplicator: every step's gradients, replaced by what the replicas agreed on, before the local step."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core.channel import Channel
from detonation.core.flat import copy, local
from detonation.core.pending import LookAhead, Pending, apply, gradients
from detonation.core.private import Private
from detonation.core.scheme import Scheme
from detonation.kernels import native


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN or infinity; it was caught before it reached the memory."""


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
            copy(gradients(self._parameters), self.channel.layout.parts(self._pending.exchange(sent.update)))
        else:
            sent.write(gradients(self._parameters))

    def after(self, step: int) -> None:
        self.ahead()

    def settle(self, step: int) -> None:
        self.back()
        apply(self._pending.landed(), self._parameters, self._base, self.channel.layout)
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

    def private(self) -> Private:
        updates = {f"update{i}": update for i, update in enumerate(self._pending.landed())}
        told = {f"told{i}": update for i, update in enumerate(self._told.landed())}
        return self.channel.private(updates | told)


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
