"""Mesh: which rank is which shard of which replica, and the model laid out on it."""

import os
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from detonation.core.flat.layout import local


def init_mesh(replicas: int, shards: int, device: str | None = None) -> DeviceMesh:
    """The mesh ("replicate", "shard") over all ranks: neighbouring ranks are the shards of one replica.

    Joins the process group that is there, or makes it from a launcher's environment (torchrun's). device: "cuda" or
    "cpu", by default what this machine has.

    Raises `ValueError` where replicas * shards is not the number of ranks.
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
    """Shards `model` in place inside each node (FSDP2 on `mesh["shard"]`), with the same weights on every replica.

    Each element of an outermost `nn.ModuleList` (the layers of a transformer) becomes a unit of its own, unless it
    shares a parameter with the rest of the model; the model is the last unit. Weights are those of the first rank.
    mixed_precision: as in `torch.distributed.fsdp.fully_shard`.
    """
    same_weights(model, mesh["shard"])
    policy = mixed_precision or MixedPrecisionPolicy()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for unit in [*_layers(model), model]:
        mine = Counter(id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False))
        if unit is model or (mine and all(uses[parameter] == count for parameter, count in mine.items())):
            sharded = fully_shard(unit, mesh=mesh["shard"], mp_policy=policy)
            if mesh.device_type == "cpu":  # gloo averages by summing first; some versions summed only
                sharded.set_force_sum_reduction_for_comms(True)
    same_weights(model, mesh["replicate"])
    return model


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


@torch.no_grad()
def same_weights(model: nn.Module, axis: DeviceMesh) -> None:
    """Gives all ranks along `axis` the parameters and buffers of the first one. Collective."""
    group = axis.get_group()
    source = dist.get_global_rank(group, 0)
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if local(tensor).numel():
            dist.broadcast(local(tensor), source, group=group)
