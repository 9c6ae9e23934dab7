"""The coordinates of a rank: its replica, and its shard of that replica."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from detonation.core.link.communicator import Axis
from detonation.core.schemes import Scheme

Level = tuple[Axis, Scheme]
"""A level of replication: an axis, and the scheme along it."""


@dataclass(frozen=True)
class Coordinates:
    """Shard `shard` of replica `replica`, both counted from 0."""

    replica: int
    replicas: int
    shard: int
    shards: int

    @property
    def name(self) -> str:
        """The name of the rank in saved states."""
        return f"replica{self.replica}-shard{self.shard}"


def coordinates_of(
    levels: Sequence[Level],
    parameters: Iterable[Tensor],
    intra_node: DeviceMesh | None,
) -> Coordinates:
    """This rank's coordinates: its replica from the axes of `levels`, its shard from the mesh of
    the parameters.

    Replica numbers grow fastest along the innermost level. Without DTensors a replica is one shard.
    With `intra_node` each rank of the node counts as a shard, although it has the whole model.
    """
    replica = 0
    replicas = 1
    axes = dict(_axis(axis) for axis, _ in levels)  # two levels may share an axis
    for here, size in reversed(axes.values()):
        replica = replica * size + here
        replicas *= size
    meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
    if intra_node is not None:
        meshes.append(intra_node)
    if not meshes:
        return Coordinates(replica, replicas, 0, 1)
    (_, (shard, shards)) = _axis(max(meshes, key=lambda mesh: mesh.size()))
    return Coordinates(replica, replicas, shard, shards)


def _axis(axis: Axis) -> tuple[object, tuple[int, int]]:
    """The identity of an axis, this rank's position on it, and the size of the axis."""
    if not isinstance(axis, DeviceMesh):
        return id(axis), (axis.replica, axis.size())
    ranks = tuple(axis.mesh.flatten().tolist())
    return ranks, (ranks.index(dist.get_rank()), len(ranks))


def alike(levels: Sequence[Level]) -> bool:
    """True if replicas have equal weights and base optimizer state between any two steps, because
    all levels exchange gradients.
    """
    return bool(levels) and all(scheme.signal == "gradients" for _, scheme in levels)
