"""Signals of gradient schemes: the local gradients, as the parameters lie, and the refusal of what is not finite."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.flat import local
from detonation.kernels import native


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN or infinity; it was caught before it reached the memory."""


def gradient(name: str, parameter: Tensor) -> Tensor | None:
    """The local gradient, laid out as the parameter is."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise ValueError(f"the gradient of {name} is sparse, which cannot be replicated: use sparse=False")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def refuse_non_finite(signals: Mapping[str, Tensor | None], step: int, replica: int) -> None:
    """One NaN would win top-k for ever and freeze its chunk on every replica, so none may reach the memory."""
    present = {name: signal for name, signal in signals.items() if signal is not None and signal.numel()}
    if not present:
        return
    tensors = list(present.values())
    library = native.load_for(*tensors)
    if library and all(tensor.dtype == torch.float32 for tensor in tensors):
        found = library.beyond(tensors, torch.finfo(torch.float32).max)
    else:
        finite = torch.stack([norm.float() for norm in torch._foreach_norm(tensors, ord=torch.inf)]).isfinite()
        found = -1 if finite.all() else int(finite.logical_not().nonzero()[0])
    if found >= 0:
        name = list(present)[found]
        raise NonFiniteGradient(f"the gradient of {name} is not finite on replica {replica} at step {step}")
