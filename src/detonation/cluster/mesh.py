"""Makes the device mesh of replicas and shards, shards a model on it, and compares replicas."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from detonation.choices import checks_keywords
from detonation.cluster.init import GROUP_TIMEOUT_S, join_world, set_group_timeouts, watch_waiting
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.cluster.position import LaunchPosition, launch_position
from detonation.cluster.uneven import UnevenAxis, UnevenMesh, sizes_of_nodes
from detonation.core.agreement import persistent_buffers
from detonation.core.flat.tensors import digest, local
from detonation.core.link import Axis, Link, carries, require_device
from detonation.core.optimizer import local_parameters
from detonation.link_speed import SLOW_BACKENDS, LinkSpeed
from detonation.wire.units import join_units, resync_weights
from detonation.wire.wire import ShardWire


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the elements of every outermost `nn.ModuleList`, such as the layers of a
    transformer. An element without a forward method, such as a nested list, is divided further.
    """
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from layers_of(child)
            continue
        for layer in child:
            yield from _called_parts(layer)


def _called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields `module`, or the outermost modules inside it that have a forward method.

    The hooks of FSDP run only in `forward`, so a module that is never called cannot be a unit.
    """
    if getattr(module.forward, "__func__", None) is not nn.Module.forward:
        yield module
        return
    for part in module.children():
        yield from _called_parts(part)


def slow_axis_backend(axis: str, device: str, chosen: str | None) -> dict[int | str, Any] | None:
    """Returns the argument `backend_override` of `init_device_mesh` for the axis between replicas.
    Returns None if the default process group suffices.

    With NCCL, this axis gets its own NCCL communicator, even if the axis contains all ranks. The
    kernels of this communicator run on a high-priority stream, so that short messages between
    replicas do not wait for the kernels of backward. `chosen` is one of `SLOW_BACKENDS`, or None.
    """
    if chosen is not None:
        return {axis: chosen}
    if device != "cuda":
        return None
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if backends.get("cuda") != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # give this process group the default timeout of new groups instead of that of `Options`
    options._timeout = distributed_c10d._get_default_timeout(dist.get_backend())
    # The new process group must support each device type that the default process group supports.
    # If NCCL is the only backend, the plain name "nccl" lets NCCL split the default process group.
    name = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    if set(backends.values()) == {"nccl"}:
        name = "nccl"
    return {axis: (name, options)}


def shard_links(mesh: DeviceMesh, wire: ShardWire) -> tuple[Link, dist.ProcessGroup | None]:
    """Returns the link between the nodes of a replica, and the process group of the ranks on this
    node. The group is None if each node has one rank of the replica.

    Collective over all ranks of the world. The ranks of a node are neighbours on the axis "shard".

    Raises:
        ValueError: The shards are not on at least two nodes with equally many ranks.
    """
    if isinstance(mesh, UnevenMesh):
        raise ValueError(
            "shard_wire needs replicas of equally many ranks: start as many ranks for each"
            " replica, or leave shard_wire out"
        )
    shards = mesh["shard"].size()
    if wire.nodes is not None:
        nodes = wire.nodes
    else:
        nodes = max(1, shards // _ranks_of_a_node("shard_wire(nodes=...)"))
    if nodes < 2 or shards % nodes:
        raise ValueError(
            f"the {shards} shards of a replica cannot be divided equally among {nodes} nodes,"
            " and shard_wire needs at least 2 nodes: pass shard_wire(nodes=...), or leave"
            " shard_wire out if a replica fits into one node"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} of the {dist.get_world_size()} ranks: pass the mesh of all"
            " ranks"
        )
    split = split_shards(mesh, nodes)
    between: Axis = split["shard_node"]
    if wire.link:
        between = ThrottledCommunicator(split["shard_node"], LinkSpeed.parse(wire.link))
    link = Link(between)
    link.require_same({"shard wire": repr(wire)}, torch.device(mesh.device_type), {})
    group = None
    if shards > nodes:
        group = split.get_group("shard_local")
    return link, group


def split_shards(mesh: DeviceMesh, nodes: int) -> DeviceMesh:
    """Splits the axis "shard" of `mesh` into "shard_node" between nodes and "shard_local" inside a
    node.

    Collective over all ranks of `mesh`.
    """
    names = [*(mesh.mesh_dim_names or ())]
    sizes = [*mesh.mesh.shape]
    at = names.index("shard")
    sizes[at : at + 1] = [nodes, sizes[at] // nodes]
    names[at : at + 1] = ["shard_node", "shard_local"]
    return DeviceMesh(mesh.device_type, mesh.mesh.view(sizes), mesh_dim_names=tuple(names))


def init_mesh(
    replicas: int | None = None,
    shards: int | Sequence[int] | None = None,
    device: str | None = None,
    timeout_s: float | None = None,
    slow_backend: str | None = None,
) -> DeviceMesh:
    """Makes the device mesh with the axes "replicate" and "shard" over all ranks. Neighbouring
    ranks are the shards of one replica.

    Uses the existing process group, or initialises one from the environment of a launcher such as
    torchrun. If there is neither a group nor a launcher, this process is a world of one rank.

    Args:
        replicas: number of copies of the model, usually the number of nodes; by default it follows
            from the number of ranks and `shards`.
        shards: number of ranks that share one copy, usually the accelerators of a node; by default
            the ranks of a node, or the number of ranks divided by `replicas`. If nodes have
            different numbers of ranks, you may pass a list: `[4, 2]`. The mesh then has the same
            two axes, but is not a `DeviceMesh` of torch. All replicas have the same weight in
            means.
        device: "cuda" or "cpu"; by default this rank's GPU, and the CPU only if no GPU is visible.
        timeout_s: seconds for which a collective waits for a rank before it raises, in all process
            groups; above 0. By default 1800 s if this call initialises the process group, or else
            the timeout of that group.
        slow_backend: "gloo" sends messages between replicas over TCP from host memory, while NCCL
            serves the ranks of a node. By default the backend of the device sends all messages.
            With "gloo", and always with NCCL, the axis has its own communicator.

    A rank that waits for 30 s in a step logs which ranks have not begun that step. After 60 s the
    waiting rank ends with exit code 1 if those ranks have left the run.

    Raises:
        ValueError: slow_backend is not supported; replicas * shards is not the number of ranks;
            shards is None and the launcher does not say how many ranks a node has; or the machine
            shows a GPU that this rank cannot use (`device="cpu"` then trains on the CPU).

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dt.init_mesh(device="cpu")  # 1 replica x 1 shard
        >>> mesh.mesh_dim_names
        ('replicate', 'shard')
        >>> dt.leave()
    """
    _check_choices(timeout_s, slow_backend)
    if timeout_s is None and not dist.is_initialized():
        timeout_s = GROUP_TIMEOUT_S
    position = launch_position(os.environ)
    world = _world_size(position)
    if shards is None and replicas is None:
        shards = _shards_of_nodes(world, position, device)
    sizes = _sizes(replicas, shards, world)
    taken = join_world(device)
    mesh = _mesh_of(sizes, taken.type, slow_axis_backend("replicate", taken.type, slow_backend))
    # set timeouts last, when all groups of the mesh exist: a new group has torch's default timeout
    if timeout_s is not None:
        set_group_timeouts(timeout_s)
    watch_waiting()
    return mesh


def _check_choices(timeout_s: float | None, slow_backend: str | None) -> None:
    if slow_backend not in (None, *SLOW_BACKENDS):
        raise ValueError(
            f"slow_backend is {slow_backend!r}, must be {' or '.join(map(repr, SLOW_BACKENDS))}, or"
            " None"
        )
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s}, must be above 0")


def _world_size(position: LaunchPosition | None) -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if position:
        return position.world_size
    return 1


def _shards_of_nodes(
    world: int, position: LaunchPosition | None, device: str | None
) -> int | Sequence[int]:
    """Returns how many ranks a node has, according to the launcher; a list of these counts if the
    nodes have different numbers of ranks.

    Collective if the ranks are on several machines.
    """
    if world == 1:
        return 1
    of_this_node = _ranks_of_a_node("shards, or set LOCAL_WORLD_SIZE")
    if position and position.one_machine:
        return of_this_node
    return sizes_of_nodes(of_this_node, join_world(device))


def _mesh_of(sizes: Sequence[int], device: str, slow: dict[int | str, Any] | None) -> DeviceMesh:
    """Makes the mesh of replicas that have `sizes` ranks; `slow` is the backend between
    replicas.
    """
    if len({*sizes}) == 1:
        axes = (len(sizes), sizes[0])
        return init_device_mesh(
            device, axes, mesh_dim_names=("replicate", "shard"), backend_override=slow
        )
    backend = None
    if slow:
        backend = slow["replicate"]
    return cast(DeviceMesh, UnevenMesh(sizes, device, backend))


def _remedy(sizes: Sequence[int], world: int) -> str:
    """Returns advice for a user whose replicas' `sizes` do not add up to `world` ranks."""
    if world == 1 and launch_position(os.environ) is None and sum(sizes) > 1:
        script = "your_script.py"
        if sys.argv[0].endswith(".py"):
            script = sys.argv[0]
        return f"start the ranks with torchrun --nproc-per-node {sum(sizes)} {script}"
    return "pass replicas alone, or shards alone"


def _sizes(replicas: int | None, shards: int | Sequence[int] | None, world: int) -> list[int]:
    """Returns the number of ranks of each replica. Raises `ValueError` if the numbers do not add up
    to `world`.
    """
    if isinstance(shards, int | None):
        if shards is None:
            shards = world // max(1, replicas or 1)
        if replicas is None:
            replicas = world // max(1, shards)
        sizes = [shards] * replicas
        asked = f"{replicas} replicas x {shards} shards"
    else:
        sizes = [*shards]
        count = len(shards)
        if replicas is not None:
            count = replicas
        asked = f"{count} replicas of {sizes} shards"
    if sum(sizes) != world or min(sizes, default=0) < 1 or replicas not in (None, len(sizes)):
        raise ValueError(
            f"{asked} are {sum(sizes)} ranks, but the world has {world}: {_remedy(sizes, world)}"
        )
    return sizes


def _ranks_of_a_node(remedy: str) -> int:
    position = launch_position(os.environ)
    if position is None or position.local_world_size is None:
        raise ValueError(f"the launcher does not say how many ranks a node has: pass {remedy}")
    return position.local_world_size


@checks_keywords("argument of shard", mp_policy="mixed_precision")
def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    mixed_precision: MixedPrecisionPolicy | None = None,
    wire: ShardWire | None = None,
) -> nn.Module:
    """Shards `model` in place within each replica, with FSDP2 on `mesh["shard"]`, and gives all
    replicas the same weights. Collective.

    Afterwards every rank holds its shard of the weights of rank 0. Each element of an outermost
    `nn.ModuleList`, such as a layer of a transformer, becomes an FSDP unit. The exception is an
    element that shares a parameter with the rest of the model. If an element has no forward method,
    such as a nested list, its parts become units. The model itself becomes the last unit.

    Args:
        mesh: the mesh of `init_mesh`.
        mixed_precision: as in `torch.distributed.fsdp.fully_shard`; set its `reduce_dtype`, because
            the default differs between versions of torch. By default gradients keep the dtype of
            their parameters, in every version.
        wire: made by `shard_wire`, for replicas whose shards are on several nodes: compresses the
            messages between these nodes.

    Returns:
        `model` itself.

    Raises:
        ValueError: the mesh has no axis "replicate" or no axis "shard"; `mixed_precision` is no
            policy; or there is a `wire`, but the shards are not on several nodes with equally many
            ranks.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> model = dt.shard(torch.nn.Linear(8, 8), mesh)
        >>> model.weight.placements
        (Shard(dim=0),)
        >>> dt.leave()

    Reference:
        Zhao et al., PyTorch FSDP (arXiv 2304.11277); FSDP inside the node and DeMo between nodes:
        From et al., DeToNATION (arXiv 2502.06728).
    """
    names = mesh.mesh_dim_names or ()
    if not {"replicate", "shard"} <= {*names}:
        raise ValueError(
            f"the mesh has the axes {names}: pass the whole mesh of init_mesh,"
            ' ("replicate", "shard")'
        )
    if not isinstance(mixed_precision, MixedPrecisionPolicy | None):
        raise ValueError(
            f"mixed_precision is {mixed_precision!r}, must be a policy of torch.distributed.fsdp:"
            " MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    links = None
    if wire:
        links = shard_links(mesh, wire)
    same_weights(model, mesh["shard"])
    policy = mixed_precision or MixedPrecisionPolicy()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    units: list[FSDPModule] = []
    for unit in [*layers_of(model), model]:
        uses_in_unit = Counter(
            id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False)
        )
        own_parameters = bool(uses_in_unit) and all(
            uses[p] == count for p, count in uses_in_unit.items()
        )
        if unit is model or own_parameters:
            sharded = fully_shard(unit, mesh=mesh["shard"], mp_policy=policy)
            # let FSDP divide the sum: in older versions of torch, gloo's average is only a sum
            if mesh.device_type == "cpu":
                sharded.set_force_sum_reduction_for_comms(True)
            units.append(sharded)
    if wire and links:
        join_units(model, units, wire, *links)
    same_weights(model, mesh["replicate"])
    return model


@torch.no_grad()
def same_weights(model: nn.Module, axis: DeviceMesh) -> None:
    """Copies the parameters and buffers of the first rank along `axis` to all other ranks of the
    axis, in place. Collective.

    Args:
        axis: one dimension of the mesh, such as `mesh["replicate"]`.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> dt.same_weights(torch.nn.Linear(8, 8), mesh["replicate"])
        >>> dt.leave()
    """
    if isinstance(axis, UnevenAxis):
        axis.broadcast(local_parameters(model), list(model.buffers()))
        resync_weights(model)
        return
    group = axis.get_group()
    source = dist.get_global_rank(group, 0)
    tensors: list[Tensor] = [*local_parameters(model).values(), *model.buffers()]
    for device in {tensor.device for tensor in tensors if tensor.device.type != "meta"}:
        require_device(group, device)
    for tensor in tensors:
        if local(tensor).numel():
            dist.broadcast(local(tensor), source, group=group)
    resync_weights(model)


def fingerprint(model: nn.Module, mesh: DeviceMesh) -> tuple[str, bool]:
    """Hashes the parameters of the first replica, and compares all replicas with it, bit for bit.
    Collective.

    The comparison includes persistent buffers, such as the running statistics of BatchNorm. These
    buffers are equal on all replicas after `synchronize()`, and differ once training continues.

    Args:
        mesh: the mesh ("replicate", "shard") over all ranks, as `init_mesh` makes it, or a mesh
            with more axes. Without an axis "replicate", replicas lie along the first axis.

    Returns:
        The sha256 in hex, which depends on the number of shards, and True if all replicas are
        equal.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, mesh = torch.nn.Linear(8, 8), dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> sha256, equal = dt.fingerprint(model, mesh)
        >>> len(sha256), equal
        (64, True)
        >>> dt.leave()
    """
    device = torch.device("cpu")  # compare on the CPU, because parameters may be offloaded to it
    if not carries(distributed_c10d._get_default_group(), device):
        device = torch.device(mesh.device_type)
    axis = None
    parts: Mapping[Any, Mapping[str, Tensor]] = {(): local_parameters(model)}
    if isinstance(mesh, UnevenMesh):
        axis = mesh["replicate"]
        parts = axis.cut(local_parameters(model))
    buffer = torch.cat([weights_digest(model, pieces) for pieces in parts.values()]).to(device)
    gathered = [torch.empty_like(buffer) for _ in range(mesh.size())]
    dist.all_gather(gathered, buffer)
    digests = [bytes(b.tolist()) for b in gathered]
    if axis is not None:
        owners = [*enumerate(parts)]
        of_pieces = [
            [digests[ranks[r]][64 * n : 64 * n + 64] for n, ranks in owners]
            for r in range(axis.size())
        ]
        return compared_digests(of_pieces)
    names = mesh.mesh_dim_names or ()
    dim = 0
    if "replicate" in names:
        dim = names.index("replicate")
    rows = mesh.mesh.movedim(dim, 0).flatten(1)
    replicas = [[digests[rank] for rank in row] for row in rows.tolist()]
    return compared_digests(replicas)


def weights_digest(model: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """Returns two sha256 hashes: of `parameters` (by default this rank's parameters), and of this
    rank's persistent buffers.

    Shapes: `[64]` uint8.
    """
    if parameters is None:
        parameters = local_parameters(model)
    of_parameters = digest(parameters.values())
    of_buffers = digest(persistent_buffers(model).values())
    both = bytes.fromhex(of_parameters + of_buffers)
    return torch.tensor(list(both), dtype=torch.uint8)


def compared_digests(replicas: Sequence[Sequence[bytes]]) -> tuple[str, bool]:
    """Compares the replicas, given the `weights_digest` of each shard. Returns the fingerprint of
    the first replica, and True if all replicas are equal.
    """
    of_parameters = b"".join(both[:32] for both in replicas[0])
    return hashlib.sha256(of_parameters).hexdigest(), all(
        replica == replicas[0] for replica in replicas
    )
