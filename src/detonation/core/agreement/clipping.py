"""Clipping by the global norm of the gradients that the base optimizer is about to step on."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core.compute.scatter_sum import added, square_root
from detonation.core.flat.tensors import local_gradients
from detonation.core.link.communicator import Axis, Communicator, communicator_of
from detonation.core.optim.signsgd import SignSGD

Normed = tuple[list[Communicator], dict[str, Tensor]]
"""Parameters or pieces of them, and the communicators between those who hold different parts of
them."""


class Clip:
    """Scales all gradients down to a global norm of at most `max_norm`, as torch's
    `clip_grad_norm_` does.

    It runs between the exchange and the step of the base optimizer. Under a scheme of gradients it
    clips the update that the replicas agreed on, which is what hybrid sharding clips; all replicas
    scale by the same bits. Under a scheme of parameters, and under `none`, it clips the gradient of
    each replica.

    The shards of a replica gather the norms of their gradients: one collective per mesh axis that
    parameters are sharded over, of 4 bytes per tensor. Each rank adds them by itself, so that
    replicas agree however networks add. SignSGD without momentum moves by signs, which clipping
    leaves as they are: nothing is computed then.

    norm: before clipping, `[]` fp32, of the last step; None where nothing was computed.

    Args:
        parameters: By name, in the model's order.
        max_norm: Above 0; infinity measures the norm and scales nothing.
        parts: Whose norms make the global one, in this order; those of `parameters` when left out.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        base: Optimizer,
        max_norm: float,
        parts: Sequence[Normed] | None = None,
    ) -> None:
        self.norm: Tensor | None = None
        self._base, self._max_norm = base, max_norm
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
        """Scales the gradients in place. Collective over the shards of a replica."""
        self.norm = None
        if isinstance(self._base, SignSGD) and self._base.moves_by_signs_alone:
            return
        norms, gradients = [], []
        for shards, part in self._parts:
            local = local_gradients(part)
            found = norms_of(local, next(iter(part.values())).device)
            for communicator in shards:  # the norms over all shards, the same bits on each
                everyone = communicator.all_gather(
                    found.square().view(torch.uint8)
                )()  # [shards, 4 * n]
                squares = everyone.reshape(-1).view(torch.float32).view(-1, len(found)).T.double()
                found = square_root(added(squares).float())
            norms.append(found)
            gradients += [gradient for gradient in local if gradient is not None]
        self.norm = torch.linalg.vector_norm(torch.cat(norms))
        if gradients:
            torch._foreach_mul_(gradients, (self._max_norm / (self.norm + 1e-6)).clamp(max=1.0))


def norms_of(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The norm of each tensor in fp32, 0 for None: by torch, whose order does not depend on
    processor and threads.

    Shapes: n tensors of any shape -> `[n]` fp32.
    """
    wide = torch.float64  # torch computes the norm of no such tensor in fp32
    found = [
        tensor.float() if tensor.dtype == wide else tensor
        for tensor in tensors
        if tensor is not None
    ]
    norms = iter(torch._foreach_norm(found, 2.0, dtype=torch.float32) if found else ())
    zero = torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([zero if tensor is None else next(norms) for tensor in tensors])


def _sharded_over(parameter: Tensor) -> tuple[Axis, ...]:
    """The mesh axes whose ranks hold different parts of `parameter`."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names
    dims = [
        dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()
    ]
    if mesh.ndim > 1 and names is None:
        raise ValueError(
            "a mesh of several dimensions needs names for clipping: mesh_dim_names of"
            " init_device_mesh"
        )
    return tuple(
        mesh if names is None or mesh.ndim == 1 else mesh[names[dim]]
        for dim in dims
        if mesh.size(dim) > 1
    )
