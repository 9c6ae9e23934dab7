"""The coordinates of a rank: its replica, and its shard of that replica."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from detonation.core.link.communicator import Axis
from detonation.core.schemes import Scheme

Level = tuple[Axis, Scheme]
"""A level of replication: an axis of replicas, and the scheme by which they exchange messages."""


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank, which holds shard number `shard` of replica number `replica`. Both
    numbers begin at 0.
    """

    replica: int
    replicas: int
    shard: int
    shards: int

    @property
    def name(self) -> str:
        """The name of this rank in saved states, such as "replica0-shard1"."""
        return f"replica{self.replica}-shard{self.shard}"


def coordinates_of(
    levels: Sequence[Level],
    parameters: Iterable[Tensor],
    intra_node: DeviceMesh | None,
) -> Coordinates:
    """Returns this rank's coordinates. The axes of `levels` give the number of its replica, and the
    mesh of the parameters gives the number of its shard.

    Replicas that are neighbours on the innermost level have consecutive numbers. Without DTensors a
    replica has one shard. With `intra_node` each rank of the node counts as a shard, although it
    holds the whole model.
    """
    replica = 0
    replicas = 1
    # count an axis once, even if two levels share it
    axes = dict(_axis(axis) for axis, _ in levels)
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


def sizes_of(levels: Sequence[Level]) -> list[int]:
    """Returns the number of replicas of each level, innermost first. Levels on the same axis have
    the same size.
    """
    return [_axis(axis)[1][1] for axis, _ in levels]


def replicas_along(axis: Axis, levels: Sequence[Level], own: Coordinates) -> range:
    """Returns the numbers of the replicas with which this rank exchanges messages along `axis`, the
    axis of a level.
    """
    key, (here, size) = _axis(axis)
    if size == own.replicas:
        return range(size)
    axes = dict(_axis(each) for each, _ in levels)
    inside = [*axes].index(key)
    step = math.prod(count for _, count in [*axes.values()][:inside])
    first = own.replica - here * step
    return range(first, first + size * step, step)


def key_of_axis(axis: Axis) -> object:
    """Returns a key that identifies the axis: equal axes have equal keys."""
    return _axis(axis)[0]


def placed(levels: Sequence[Level]) -> list[tuple[object, Scheme]]:
    """Returns, for each level, the key of its axis and its scheme. The key is None if the axis has
    only one replica.
    """
    keys = [key_of_axis(axis) if axis.size() > 1 else None for axis, _ in levels]
    return [(key, scheme) for key, (_, scheme) in zip(keys, levels, strict=True)]


def _axis(axis: Axis) -> tuple[object, tuple[int, int]]:
    """Returns a key that is equal for equal axes, this rank's position on the axis, and the size of
    the axis."""
    if not isinstance(axis, DeviceMesh):
        return id(axis), (axis.replica, axis.size())
    ranks = tuple(axis.mesh.flatten().tolist())
    return ranks, (ranks.index(dist.get_rank()), len(ranks))


def alike(levels: Sequence[Level]) -> bool:
    """True if all levels exchange gradients. The replicas then have equal weights and equal base
    optimizer states after every step.
    """
    return bool(levels) and all(scheme.signal == "gradients" for _, scheme in levels)
