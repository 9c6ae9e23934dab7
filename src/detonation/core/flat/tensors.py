"""Local tensors: the shards of parameters and gradients on this rank."""

import ctypes
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_WRAPPERS = re.compile(r'(?<![^."])(?:_orig_mod|_checkpoint_wrapped_module)\.')

GradientStamp = tuple[Tensor | None, int, int]
"""A gradient, its version counter, and the version counter of its local shard. For a DTensor torch
counts the writes to these two tensors separately.
"""


def bare_name(name: str) -> str:
    """The name of a parameter or buffer without prefixes of wrappers, such as torch.compile and
    activation checkpointing.

    Example:
        >>> bare_name("layers.0._orig_mod._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return _WRAPPERS.sub("", name)


class Piece(Tensor):
    """A view of some rows of a parameter's local shard; `grad` is the view of the same rows of the
    gradient. Each piece is replicated separately.

    Two replicas can cut a parameter into shards at different rows. Pieces are cut so that all
    replicas have the same pieces, and each piece is on one rank of every replica.

    Attributes:
        whole: The parameter.
        ranks: The ranks that hold this piece, one of each replica.
        offset: First row of the piece in the parameter.
        rows: Rows of the piece in the local shard.
        largest_shape: Shape of the largest shard of any replica.
        cut: Function that cuts sharded tensors in the same way as parameters, and groups the pieces
            by `ranks`.
    """

    whole: Tensor
    ranks: tuple[int, ...]
    offset: int
    rows: slice
    whole_numel: int
    largest_shape: tuple[int, ...]
    padding_row: int | None
    cut: Callable[[Mapping[str, Tensor]], Mapping[tuple[int, ...], Mapping[str, Tensor]]]
    # torch operations on a `Piece` return plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, whole: Tensor, ranks: tuple[int, ...], offset: int, rows: slice, largest: int
    ) -> "Piece":
        """The piece that holds `rows` of the local shard of `whole`.

        largest: rows of the largest shard of any replica, for the attribute `largest_shape`.

        Shapes: any with a first dimension -> `[len(rows), ...]`.
        """
        piece = Tensor._make_subclass(cls, local(whole.detach())[rows])
        piece.whole = whole
        piece.ranks = ranks
        piece.offset = offset
        piece.rows = rows
        piece.whole_numel = whole.numel()
        piece.largest_shape = (largest, *whole.shape[1:])
        piece.padding_row = None
        row = padding_row(whole)
        if row is not None and rows.start <= row < rows.stop:
            piece.padding_row = row - rows.start
        return piece

    @property
    def grad(self) -> Tensor | None:
        gradient = self.whole.grad
        if gradient is None or gradient.is_sparse:
            return gradient
        return local(gradient)[self.rows]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is None:
            self.whole.grad = None
        elif self.whole.grad is None:  # creates zeros; the caller writes the gradient into them
            self.whole.grad = torch.zeros_like(self.whole)


def cut_like(parameter: Tensor, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Cuts `tensors` in the same way as `parameter`. If `parameter` is a `Piece`, returns the
    pieces of `tensors` that the same ranks hold; else returns `tensors`."""
    if not isinstance(parameter, Piece):
        return tensors
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    return parameter.cut(sharded).get(parameter.ranks, {})


def whole_of(parameter: Tensor) -> Tensor:
    """The parameter that contains a `Piece`; for any other tensor the tensor itself."""
    if isinstance(parameter, Piece):
        return parameter.whole
    return parameter


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The local shards of the state tensors that `optimizer` keeps for `parameter`. If `parameter`
    is a `Piece`, each tensor holds only the rows of this piece."""
    found = {}
    for key, value in sorted(optimizer.state.get(whole_of(parameter), {}).items()):
        if not isinstance(value, Tensor):
            continue
        found[key] = local(value)
        if isinstance(parameter, Piece) and found[key].shape == local(parameter.whole).shape:
            found[key] = found[key][parameter.rows]
    return found


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; for any other tensor the tensor itself.

    Shapes: any -> the local shape.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def whole_numel(tensor: Tensor) -> int:
    """Number of elements of `tensor` over all shards. If `tensor` is a plain tensor that holds a
    shard, its attribute `whole_numel` gives this number.
    """
    return int(getattr(tensor, "whole_numel", tensor.numel()))


def padding_row(tensor: Tensor) -> int | None:
    """The index of an embedding's padding row in the local shard `tensor`; None if the shard does
    not hold this row, or if the row gets gradients. Reads the attribute that `note_padding` sets.
    """
    return getattr(tensor, "padding_row", None)


def largest_local_shape(tensor: Tensor) -> tuple[int, ...]:
    """The local shape of `tensor` on the rank with the largest shard. Every rank computes the same
    shape.
    """
    if isinstance(tensor, Piece):
        return tensor.largest_shape
    shape = [*tensor.shape]
    if isinstance(tensor, DTensor):
        for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] = -(-shape[dim] // ranks)
    return tuple(shape)


def digest(tensors: Iterable[Tensor]) -> str:
    """The sha256 (hex) of the bytes of the local shards of `tensors`, in the given order.

    Waits for the device.
    """
    content = hashlib.sha256()
    for tensor in tensors:
        raw = local(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu()
        content.update(octets(raw))
    return content.hexdigest()


def octets(tensor: Tensor) -> memoryview:
    """A view of the bytes of a contiguous host tensor. The view keeps the tensor alive."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def locals_of(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The local shard of each parameter."""
    found = []
    for parameter in parameters.values():
        # `local` is inlined here, because a call per tensor at every step would take time
        if isinstance(parameter, DTensor):
            parameter = parameter._local_tensor
        found.append(parameter)
    return found


def local_gradients(parameters: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The local gradient of each parameter, sharded like the parameter; None for a parameter
    without a gradient.

    The update is written into each gradient later. So a gradient is replaced by a copy if it shares
    memory with another gradient, or if several of its coordinates share memory. For example,
    `torch.autograd.grad` may return one tensor for two parameters, or an expanded number.

    Raises:
        ValueError: A gradient is sparse.
    """
    found: list[Tensor | None] = []
    addresses: set[int] = set()
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            found.append(None)
            continue
        if gradient.is_sparse:
            raise ValueError(
                f"the gradient of {name} is sparse, which cannot be replicated: use sparse=False"
            )
        shard = gradient
        if isinstance(gradient, DTensor):
            if not isinstance(parameter, DTensor) or gradient._spec is not parameter._spec:
                gradient = _resharded(parameter, gradient)
            shard = gradient._local_tensor
        address = shard.data_ptr()  # the address is 0 for an empty tensor and on the meta device
        if address and (address in addresses or 0 in shard.stride()):
            shard = _separated(parameter)
        addresses.add(address)
        found.append(shard)
    return found


def reshard_gradients(parameters: Iterable[Tensor]) -> None:
    """Shards each gradient like its parameter. Under tensor parallelism, backward may leave sums
    that no rank has added yet (`Partial`), or whole gradients of sharded weights. Collective over
    the shards if a gradient must be resharded.
    """
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            _resharded(parameter, parameter.grad)


def _resharded(parameter: Tensor, gradient: DTensor) -> DTensor:
    """Returns `gradient` sharded like `parameter`. A resharded gradient also becomes
    `parameter.grad`."""
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return gradient


def gradient_stamps(parameters: Mapping[str, Tensor]) -> dict[str, GradientStamp]:
    """The stamp of each gradient (see `GradientStamp`), by the name of its parameter. A write to
    the gradient changes its stamp."""
    found: dict[str, GradientStamp] = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            found[name] = (None, 0, 0)
            continue
        shard = gradient
        if isinstance(gradient, DTensor):
            shard = gradient.to_local()
        found[name] = (gradient, gradient._version, shard._version)
    return found


def _separated(parameter: Tensor) -> Tensor:
    """Copies the gradient of `parameter` to memory that no other tensor shares, and returns the
    local shard of the copy."""
    whole = whole_of(parameter)
    assert whole.grad is not None
    whole.grad = whole.grad.clone(memory_format=torch.contiguous_format)
    gradient = parameter.grad
    assert gradient is not None
    return local(gradient)


def gradients_to_fill(parameters: Mapping[str, Tensor], unused: Collection[int]) -> list[Tensor]:
    """Returns the local gradient of each parameter, as a tensor to write into. A missing gradient
    is created as zeros.

    Each gradient gets the strides of its parameter, because fused optimizer steps read parameter
    and gradient in the order of addresses. Also, sums over other strides round differently. A
    parameter whose index is in `unused` has no gradient afterwards; for such a parameter a
    temporary tensor is returned.
    """
    found = []
    for number, parameter in enumerate(parameters.values()):
        if number in unused:
            parameter.grad = None
            found.append(torch.empty_like(local(parameter)))
            continue
        gradient = parameter.grad
        if gradient is None or gradient.stride() != parameter.stride():
            parameter.grad = None  # the setter of `Piece.grad` replaces no existing gradient
            parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        found.append(gradient)
    return found
