"""The device mesh of replicas and shards, and the model laid out on it."""

import os
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from detonation.core.flat.tensors import local


def init_mesh(replicas: int, shards: int, device: str | None = None) -> DeviceMesh:
    """Makes the mesh ("replicate", "shard") over all ranks. Neighbouring ranks are the shards of one replica.

    Uses the process group that exists, or initialises one from the environment of a launcher such as torchrun.

    Args:
        replicas: copies of the model, usually the number of nodes.
        shards: ranks that share one copy, usually the accelerators of a node.
        device: "cuda" or "cpu"; by default "cuda" where this machine has it.

    Raises:
        ValueError: replicas * shards is not the number of ranks, or there is neither process group nor launcher.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> mesh.mesh_dim_names
        ('replicate', 'shard')
        >>> dt.leave()
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError("no process group and no launcher: start with torchrun, or initialise torch.distributed")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    if replicas < 1 or shards < 1 or replicas * shards != world:
        raise ValueError(f"{replicas} replicas x {shards} shards are {replicas * shards} ranks, the world has {world}")
    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, mixed_precision: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Shards `model` in place within each replica (FSDP2 on `mesh["shard"]`) and makes all replicas equal. Collective.

    Every rank ends up with its shard of the weights of rank 0. Each element of an outermost `nn.ModuleList` (the layers
    of a transformer) becomes an FSDP unit, unless it shares a parameter with the rest of the model; the whole model is
    the last unit.

    Args:
        mesh: the mesh of `init_mesh`.
        mixed_precision: as in `torch.distributed.fsdp.fully_shard`.

    Returns:
        `model` itself.

    Raises:
        ValueError: the mesh has no axis "replicate" or no axis "shard".

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dt.shard(torch.nn.Linear(8, 8), dt.init_mesh(replicas=1, shards=1, device="cpu"))
        >>> model.weight.placements
        (Shard(dim=0),)
        >>> dt.leave()

    Reference:
        Zhao et al., PyTorch FSDP (arXiv 2304.11277); FSDP inside the node and DeMo between nodes: From et al.,
        DeToNATION (arXiv 2502.06728).
    """
    names = mesh.mesh_dim_names or ()
    if not {"replicate", "shard"} <= {*names}:
        raise ValueError(f'the mesh has the axes {names}: pass the whole mesh, ("replicate", "shard"), as of init_mesh')
    same_weights(model, mesh["shard"])
    policy = mixed_precision or MixedPrecisionPolicy()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for unit in [*_layers(model), model]:
        uses_in_unit = Counter(id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False))
        own_parameters = bool(uses_in_unit) and all(uses[p] == count for p, count in uses_in_unit.items())
        if unit is model or own_parameters:
            sharded = fully_shard(unit, mesh=mesh["shard"], mp_policy=policy)
            if mesh.device_type == "cpu":  # gloo averages by summing first; some versions summed only
                sharded.set_force_sum_reduction_for_comms(True)
    same_weights(model, mesh["replicate"])
    return model


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of every outermost `nn.ModuleList`."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


@torch.no_grad()
def same_weights(model: nn.Module, axis: DeviceMesh) -> None:
    """Broadcasts parameters and buffers from the first rank along `axis` to all others, in place. Collective.

    Args:
        axis: one dimension of the mesh, such as `mesh["replicate"]`.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> dt.same_weights(torch.nn.Linear(8, 8), mesh["replicate"])
        >>> dt.leave()
    """
    group = axis.get_group()
    source = dist.get_global_rank(group, 0)
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if local(tensor).numel():
            dist.broadcast(local(tensor), source, group=group)
