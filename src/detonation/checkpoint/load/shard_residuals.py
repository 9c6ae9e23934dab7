"""Elastic loading of a shard wire: the gradients that no node has sent yet, in a world of another shape.

The references need no merging: the next gather is exact. A rank's residual belongs to shards of other nodes. The
residuals of all nodes for one shard are added up, in the coordinates of its parameters, and the node before the new
owner's takes their sum. FSDP2 divides the sum of gradients by the number of ranks, so a sum is scaled by its change.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.box import Box
from detonation.checkpoint.files.reader import CheckpointReader, TensorPart, assemble
from detonation.core.link.coordinates import Coordinates
from detonation.wire.units import ShardUnit, load_shard_state, shard_units

SHARD = "shard.0."
"""The beginning of the keys of a shard wire's state."""
_RESIDUAL = f"{SHARD}residual."


def merge_shard_state(saved: CheckpointReader, model: nn.Module, own: Coordinates) -> str:
    """Continues from the residuals of `saved`; returns in words the state that had to be dropped. Collective."""
    names = {k.removeprefix(_RESIDUAL) for k in saved.file(0, 0).keys if k.startswith(_RESIDUAL)}
    state = {}
    for unit in (unit for unit in shard_units(model) if unit.reduce is not None):
        for name, parameter in unit.parameters.items():
            one_axis = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1  # not tensor-parallel, too
            if name in names and parameter.requires_grad and one_axis:
                state[f"residual.{name}"] = _residual(saved, unit, name, parameter, own)
    load_shard_state(model, state)
    lost = len(names) - len(state)
    return f"; dropped: gradients of {lost} parameters that a shard wire had not sent" if lost else ""


def _residual(saved: CheckpointReader, unit: ShardUnit, name: str, parameter: Tensor, own: Coordinates) -> Tensor:
    """This rank's residual for one parameter: all that was not sent of the shard in the next node, zero for others."""
    nodes, node, size = unit.link.replicas, unit.link.replica, unit.sizes()[name]
    local_ranks = own.shards // nodes
    owner = (node + 1) % nodes * local_ranks + own.shard % local_ranks
    box = Box.of_shard(parameter, owner, own.shards)
    before = saved.manifest.replicas
    total = sum((_unsent(saved, name, box, replica) for replica in range(before)), torch.zeros(box.shape))
    mean = total.mul_(own.shards / saved.manifest.shards / before).reshape(-1)
    residual = torch.zeros(nodes - 1, size)
    others = [other for other in range(nodes) if other != node]
    residual[others.index((node + 1) % nodes), : len(mean)] = mean
    return residual


def _unsent(saved: CheckpointReader, name: str, box: Box, replica: int) -> Tensor:
    """The part `box` of the gradients of one parameter that the nodes of a saved replica have not sent."""
    files = saved.shards(replica)
    residuals = [file.tensor(f"{_RESIDUAL}{name}") for file in files]  # [nodes - 1, size] each
    nodes = len(residuals[0]) + 1
    local_ranks = len(files) // nodes
    pieces = []
    for shard, file in enumerate(files):
        at, place = divmod(shard, local_ranks)
        senders = [node for node in range(nodes) if node != at]
        rows = [residuals[node * local_ranks + place][at - (at > node)] for node in senders]
        part = file.boxes[f"model.{name}"]
        unsent = torch.stack(rows).sum(0)[: torch.Size(part.shape).numel()].view(part.shape)
        pieces.append(TensorPart(part, unsent.dtype, unsent.__getitem__))
    return assemble(pieces, box, name)
