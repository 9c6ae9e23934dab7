"""The links between the nodes that the shards of one replica lie on."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from detonation.cluster.machine.position import launch_position
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.core.link.communicator import Axis
from detonation.core.link.link import Link
from detonation.core.link.link_speed import LinkSpeed
from detonation.wire.wire import ShardWire


def shard_links(mesh: DeviceMesh, wire: ShardWire) -> tuple[Link, dist.ProcessGroup | None]:
    """The link between the nodes of a replica, and the group of this rank's node; None for nodes of one rank.

    Neighbouring ranks of the axis "shard" are the ranks of a node. Collective over all ranks of the world.

    Raises:
        ValueError: The shards do not lie on at least two nodes of equally many ranks.
    """
    shards = mesh["shard"].size()
    nodes = wire.nodes if wire.nodes is not None else _nodes_of_launcher(shards)
    if nodes < 2 or shards % nodes:
        raise ValueError(
            f"the {shards} shards of a replica cannot lie on {nodes} nodes with equally many each: a shard wire needs "
            "at least 2 nodes; give shard_wire(nodes=...), or leave it out if a replica fits into one node"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(f"the mesh has {mesh.size()} of the {dist.get_world_size()} ranks: pass the mesh of all ranks")
    split = split_shards(mesh, nodes)
    between: Axis = split["shard_node"]
    if wire.link:
        between = ThrottledCommunicator(split["shard_node"], LinkSpeed.parse(wire.link))
    link = Link(between)
    link.require_same({"shard wire": repr(wire)}, torch.device(mesh.device_type), {})
    return link, split.get_group("shard_local") if shards > nodes else None


def split_shards(mesh: DeviceMesh, nodes: int) -> DeviceMesh:
    """The ranks of `mesh` with the axes "shard_node" and "shard_local" in the place of "shard". Collective."""
    names, sizes = [*(mesh.mesh_dim_names or ())], [*mesh.mesh.shape]
    at = names.index("shard")
    sizes[at : at + 1], names[at : at + 1] = [nodes, sizes[at] // nodes], ["shard_node", "shard_local"]
    return DeviceMesh(mesh.device_type, mesh.mesh.view(sizes), mesh_dim_names=tuple(names))


def _nodes_of_launcher(shards: int) -> int:
    position = launch_position(os.environ)
    ranks = position.local_world_size if position else None
    if ranks is None:
        raise ValueError("the launcher does not say how many ranks a node has: give shard_wire(nodes=...)")
    return max(1, shards // ranks)
