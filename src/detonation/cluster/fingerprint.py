"""A hash of the model's weights, and the comparison of all replicas with it."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from detonation.cluster.uneven import UnevenMesh
from detonation.core.agreement.buffers import persistent_buffers
from detonation.core.flat.tensors import digest
from detonation.core.link.communicator import carries
from detonation.core.optimizer.gathered import local_parameters


def fingerprint(model: nn.Module, mesh: DeviceMesh) -> tuple[str, bool]:
    """Hashes the parameters of the first replica and compares all replicas with it, bit for bit. Collective.

    The comparison includes the persistent buffers, such as the running statistics of BatchNorm: they are equal after
    `synchronize()`, and differ as soon as replicas have trained on.

    Args:
        mesh: the mesh ("replicate", "shard") over all ranks, as `init_mesh` makes it, or one with more axes. Without an
            axis "replicate" the first one joins the replicas.

    Returns:
        The sha256 in hex, which depends on the number of shards, and True where all replicas are equal.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, mesh = torch.nn.Linear(8, 8), dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> sha256, equal = dt.fingerprint(model, mesh)
        >>> len(sha256), equal
        (64, True)
        >>> dt.leave()
    """
    device = torch.device("cpu")  # wherever the parameters are, also offloaded ones
    if not carries(distributed_c10d._get_default_group(), device):
        device = torch.device(mesh.device_type)
    axis = mesh["replicate"] if isinstance(mesh, UnevenMesh) else None
    parts = axis.cut(local_parameters(model)) if axis is not None else {(): local_parameters(model)}
    buffer = torch.cat([weights_digest(model, pieces) for pieces in parts.values()]).to(device)
    gathered = [torch.empty_like(buffer) for _ in range(mesh.size())]
    dist.all_gather(gathered, buffer)
    digests = [bytes(b.tolist()) for b in gathered]
    if axis is not None:
        owners = [*enumerate(parts)]
        of_pieces = [[digests[ranks[r]][64 * n : 64 * n + 64] for n, ranks in owners] for r in range(axis.size())]
        return compared_digests(of_pieces)
    names = mesh.mesh_dim_names or ()
    rows = mesh.mesh.movedim(names.index("replicate") if "replicate" in names else 0, 0).flatten(1)
    replicas = [[digests[rank] for rank in row] for row in rows.tolist()]
    return compared_digests(replicas)


def weights_digest(model: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """The sha256 of a rank's parameters, or of those given, and that of its persistent buffers.

    Shapes: `[64]` uint8.
    """
    parameters = local_parameters(model) if parameters is None else parameters
    both = bytes.fromhex(digest(parameters.values()) + digest(persistent_buffers(model).values()))
    return torch.tensor(list(both), dtype=torch.uint8)


def compared_digests(replicas: Sequence[Sequence[bytes]]) -> tuple[str, bool]:
    """The fingerprint of the first replica, and whether all are equal, by the `weights_digest` of each shard."""
    of_parameters = b"".join(both[:32] for both in replicas[0])
    return hashlib.sha256(of_parameters).hexdigest(), all(replica == replicas[0] for replica in replicas)
