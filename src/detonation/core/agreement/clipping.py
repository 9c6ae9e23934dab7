"""Clipping of gradients by their global norm, before the base optimizer steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core.compute.scatter_sum import added, square_root
from detonation.core.flat.tensors import local_gradients
from detonation.core.link import Axis, Communicator, communicator_of
from detonation.core.optim import SignSGD

Normed = tuple[list[Communicator], dict[str, Tensor]]
"""The communicators between ranks that hold different parts of the same parameters, and the local
parts of these parameters by name.
"""


class Clip:
    """Scales all gradients down to a global norm of at most `max_norm`, as torch's
    `clip_grad_norm_` does.

    Clipping runs after the exchange and before the step of the base optimizer. Under schemes that
    exchange gradients, the agreed update is clipped, as in hybrid sharding, so all replicas
    multiply by the same factor. Under schemes that exchange parameters, and under `none`, the
    gradients of each replica are clipped separately.

    The shards of a replica gather the norms of their gradients. This takes one collective for each
    mesh axis over which parameters are sharded. For each tensor, a rank sends 4 bytes. Each rank
    adds the received squares itself, so all ranks add them in the same order.

    SignSGD without momentum uses only the signs of gradients, and clipping changes no sign. So no
    norm is computed for this optimizer.

    Attributes:
        norm: Global norm before clipping at the last step, `[]` fp32; None if no norm was computed.

    Args:
        parameters: Parameters by name, in the model's order.
        max_norm: Above 0; infinity measures the norm without scaling.
        parts: Parts whose norms form the global norm, in this order; default: all of `parameters`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        base: Optimizer,
        max_norm: float,
        parts: Sequence[Normed] | None = None,
    ) -> None:
        self.norm: Tensor | None = None
        self._base = base
        self._max_norm = max_norm
        if parts is not None:
            self._parts = [*parts]
            return
        by_axes: dict[tuple[Axis, ...], dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            by_axes.setdefault(_sharded_over(parameter), {})[name] = parameter
        self._parts = [
            ([communicator_of(axis) for axis in axes], part) for axes, part in by_axes.items()
        ]

    def __call__(self) -> None:
        """Clips all gradients in place. Collective over the shards of a replica."""
        self.norm = None
        if isinstance(self._base, SignSGD) and self._base.moves_by_signs_alone:
            return
        norms = []
        gradients = []
        for shards, part in self._parts:
            local = local_gradients(part)
            found = norms_of(local, next(iter(part.values())).device)
            for communicator in shards:  # afterwards the norms have the same bits on all shards
                octets = found.square().view(torch.uint8)
                everyone = communicator.all_gather(octets)()  # [shards, 4 * n]
                squares = everyone.reshape(-1).view(torch.float32).view(-1, len(found))
                found = square_root(added(squares.T.double()).float())
            norms.append(found)
            gradients += [gradient for gradient in local if gradient is not None]
        self.norm = torch.linalg.vector_norm(torch.cat(norms))
        if gradients:
            scale = (self._max_norm / (self.norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)


def norms_of(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the fp32 norm of each tensor, and 0 for None. The norms have the same bits on all
    processors, for all thread counts and for all strides, because torch always adds in the same
    order.

    Shapes: n tensors of any shape -> `[n]` fp32.
    """
    found = [torch.zeros((), dtype=torch.float32, device=device)] * len(tensors)
    numbers = [number for number, tensor in enumerate(tensors) if tensor is not None]
    present = [tensor for tensor in tensors if tensor is not None]
    for at, tensor in enumerate(present):
        present[at] = tensor.contiguous()  # torch sums in address order, which depends on strides
        if tensor.dtype == torch.float64:  # torch cannot compute an fp32 norm of fp64
            present[at] = present[at].float()
    if present:
        norms = torch._foreach_norm(present, 2.0, dtype=torch.float32)
        for number, norm in zip(numbers, norms, strict=True):
            found[number] = norm
    return torch.stack(found)


def _sharded_over(parameter: Tensor) -> tuple[Axis, ...]:
    """Returns the mesh axes whose ranks hold different parts of `parameter`."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names
    if mesh.ndim > 1 and names is None:
        raise ValueError(
            "clipping needs the names of the mesh's dimensions: pass mesh_dim_names to"
            " init_device_mesh"
        )
    found = []
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() or mesh.size(dim) <= 1:
            continue
        if names is None or mesh.ndim == 1:
            found.append(mesh)
        else:
            found.append(mesh[names[dim]])
    return tuple(found)
