"""Local tensors: the part of parameters and gradients that lives on this rank."""

import ctypes
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_WRAPPERS = re.compile(r'(?<![^."])(?:_orig_mod|_checkpoint_wrapped_module)\.')


def bare_name(name: str) -> str:
    """The name of a parameter or buffer without what wrappers put into it: torch.compile,
    activation checkpointing.

    Example:
        >>> bare_name("layers.0._orig_mod._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return _WRAPPERS.sub("", name)


class Piece(Tensor):
    """Rows of a parameter that replicate by themselves: a view of the local shard, and of its
    gradient.

    Replicas that cut a parameter at other rows have the same pieces, each on one rank of every
    replica.

    whole: The parameter. ranks: Those that hold this piece, one of each replica. offset: Its first
    row in the parameter. rows: Its rows in the local shard. largest_shape: That of the largest
    shard of any replica. cut: Cuts other parameters alike, by those who hold their pieces.
    """

    whole: Tensor
    ranks: tuple[int, ...]
    offset: int
    rows: slice
    whole_numel: int
    largest_shape: tuple[int, ...]
    padding_row: int | None
    cut: Callable[[Mapping[str, Tensor]], Mapping[tuple[int, ...], Mapping[str, Tensor]]]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # plain results

    @classmethod
    def of(
        cls, whole: Tensor, ranks: tuple[int, ...], offset: int, rows: slice, largest: int
    ) -> "Piece":
        """The `rows` of the local shard of `whole`; `largest` rows are in the largest shard of any
        replica.

        Shapes: any with a first dimension -> `[len(rows), ...]`.
        """
        piece = Tensor._make_subclass(cls, local(whole.detach())[rows])
        piece.whole, piece.ranks, piece.offset, piece.rows = whole, ranks, offset, rows
        piece.whole_numel, piece.largest_shape = whole.numel(), (largest, *whole.shape[1:])
        row = padding_row(whole)
        piece.padding_row = (
            row - rows.start if row is not None and rows.start <= row < rows.stop else None
        )
        return piece

    @property
    def grad(self) -> Tensor | None:
        gradient = self.whole.grad
        return gradient if gradient is None or gradient.is_sparse else local(gradient)[self.rows]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.whole.grad is None and gradient is not None:  # of zeros, to write into
            self.whole.grad = torch.zeros_like(self.whole)


def cut_like(parameter: Tensor, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """`tensors`; or, where `parameter` is a `Piece`, the pieces of them that its ranks hold."""
    if not isinstance(parameter, Piece):
        return tensors
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    return parameter.cut(sharded).get(parameter.ranks, {})


def whole_of(parameter: Tensor) -> Tensor:
    """The parameter of which a `Piece` is a part; any other tensor itself."""
    return parameter.whole if isinstance(parameter, Piece) else parameter


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors that `optimizer` keeps of a parameter, as they lie on this rank; of a `Piece` its
    rows of them."""
    state = optimizer.state.get(whole_of(parameter), {})
    found = {
        key: local(tensor) for key, tensor in sorted(state.items()) if isinstance(tensor, Tensor)
    }
    if isinstance(parameter, Piece):
        shard = local(parameter.whole).shape
        found = {
            key: tensor[parameter.rows] if tensor.shape == shard else tensor
            for key, tensor in found.items()
        }
    return found


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that lives on this rank: the local shard of a DTensor, any other tensor
    itself.

    Shapes: any -> the local shape.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_numel(tensor: Tensor) -> int:
    """The elements of `tensor` over all shards: of a DTensor, or of a plain tensor that says so as
    `whole_numel`."""
    return int(getattr(tensor, "whole_numel", tensor.numel()))


def padding_row(tensor: Tensor) -> int | None:
    """The row of this local shard that no gradient ever reaches, the padding of an embedding; None
    without one.

    Whoever knows the modules writes it to the tensor, as `padding_row`.
    """
    return getattr(tensor, "padding_row", None)


def largest_local_shape(tensor: Tensor) -> tuple[int, ...]:
    """The local shape of `tensor` on the rank that holds the largest shard, which all ranks can
    tell."""
    if isinstance(tensor, Piece):
        return tensor.largest_shape
    shape = [*tensor.shape]
    if isinstance(tensor, DTensor):
        for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] = -(-shape[dim] // ranks)
    return tuple(shape)


def digest(tensors: Iterable[Tensor]) -> str:
    """The sha256 (hex) of the bytes of the local shards of `tensors`, in order.

    Waits for the device.
    """
    content = hashlib.sha256()
    for tensor in tensors:
        raw = local(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu()
        content.update(octets(raw))
    return content.hexdigest()


def octets(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, which lives as long as a view of it."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def locals_of(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The part of each parameter that lives on this rank."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]


def local_gradients(parameters: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The local gradient of each parameter, laid out as the parameter is; None where there is none.

    Each has memory of its own afterwards, because the update is written there: gradients of
    `torch.autograd.grad` may be one tensor for two parameters, or one number for many coordinates.

    Raises:
        ValueError: A gradient is sparse.
    """
    found: list[Tensor | None] = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError(
                f"the gradient of {name} is sparse, which cannot be replicated: use sparse=False"
            )
        if isinstance(gradient, DTensor):
            if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        found.append(gradient)
    present = [each for each in found if each is not None]
    addresses = {each.data_ptr() for each in present}
    if len(addresses) < len(present) or any(0 in each.stride() for each in present):
        _separate(parameters, found)
    return found


def _separate(parameters: Mapping[str, Tensor], found: list[Tensor | None]) -> None:
    """Gives memory of its own to each gradient in `found` that may share it with another one, or
    with itself."""
    addresses: set[int] = set()
    for number, parameter in enumerate(parameters.values()):
        gradient = found[number]
        if gradient is None:
            continue
        address = gradient.data_ptr()  # 0 for an empty tensor, and on the meta device
        if address and (address in addresses or 0 in gradient.stride()):
            whole: Any = whole_of(parameter)
            whole.grad = whole.grad.clone(memory_format=torch.contiguous_format)
            found[number] = local(parameter.grad)  # type: ignore[arg-type]
        addresses.add(address)


def gradients_to_fill(
    parameters: Mapping[str, Tensor], unused: Collection[int] = ()
) -> list[Tensor]:
    """The local gradient of each parameter, to write into; created with zeros where there is none.

    The parameters whose numbers are in `unused` have no gradient afterwards: what is written for
    them goes to spare memory.
    """
    found = []
    for number, parameter in enumerate(parameters.values()):
        if number in unused:
            parameter.grad = None
            found.append(torch.empty_like(local(parameter)))
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found
