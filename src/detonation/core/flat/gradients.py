"""Signals of gradient schemes: the local gradients, as the parameters lie."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.flat.layout import local


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
