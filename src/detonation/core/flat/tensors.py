"""Local tensors: the part of parameters and gradients that lives on this rank."""

import ctypes
import hashlib
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_WRAPPERS = re.compile(r'(?<![^."])(?:_orig_mod|_checkpoint_wrapped_module)\.')


def bare_name(name: str) -> str:
    """The name of a parameter or buffer without what wrappers put into it: torch.compile, activation checkpointing.

    Example:
        >>> bare_name("layers.0._orig_mod._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return _WRAPPERS.sub("", name)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that lives on this rank: the local shard of a DTensor, any other tensor itself.

    Shapes: any -> the local shape.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_numel(tensor: Tensor) -> int:
    """The elements of `tensor` over all shards: of a DTensor, or of a plain tensor that says so as `whole_numel`.

    Shapes: any.
    """
    return int(getattr(tensor, "whole_numel", tensor.numel()))


def padding_row(tensor: Tensor) -> int | None:
    """The row of this local shard that no gradient ever reaches, the padding of an embedding; None without one.

    Whoever knows the modules writes it to the tensor, as `padding_row`.

    Shapes: any.
    """
    return getattr(tensor, "padding_row", None)


def largest_local_shape(tensor: Tensor) -> tuple[int, ...]:
    """The local shape of `tensor` on the rank that holds the largest shard, which all ranks can tell.

    Shapes: any.
    """
    shape = [*tensor.shape]
    if isinstance(tensor, DTensor):
        for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] = -(-shape[dim] // ranks)
    return tuple(shape)


def digest(tensors: Iterable[Tensor]) -> str:
    """The sha256 (hex) of the bytes of the local shards of `tensors`, in order. Waits for the device.

    Shapes: any.
    """
    content = hashlib.sha256()
    for tensor in tensors:
        raw = local(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu()
        content.update(octets(raw))
    return content.hexdigest()


def octets(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, which lives as long as a view of it.

    Shapes: any.
    """
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def locals_of(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The part of each parameter that lives on this rank.

    Shapes: -> the local shape of each parameter.
    """
    return [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]


def local_gradients(parameters: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The local gradient of each parameter, laid out as the parameter is; None where there is none.

    Shapes: -> the local shape of each parameter.

    Raises:
        ValueError: A gradient is sparse.
    """
    found: list[Tensor | None] = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError(f"the gradient of {name} is sparse, which cannot be replicated: use sparse=False")
        if isinstance(gradient, DTensor):
            if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        found.append(gradient)
    return found


def gradients_to_fill(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The local gradient of each parameter, to write into; created with zeros where there is none.

    Shapes: -> the local shape of each parameter.
    """
    found = []
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found
