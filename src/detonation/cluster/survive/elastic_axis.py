"""`elastic`: the axis between replicas, of which some may be lost while the others train on."""

import logging
from collections.abc import Callable

from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from detonation.cluster.init import GROUP_TIMEOUT_S
from detonation.cluster.processes.exit import end_now
from detonation.cluster.survive.agreement import next_axis_store
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator

_log = logging.getLogger("detonation")


def elastic(
    mesh: DeviceMesh | None = None,
    *,
    replica: int | None = None,
    replicas: int | None = None,
    store: Store | None = None,
    min_replicas: int = 1,
    silence_s: float = 15.0,
    timeout_s: float = GROUP_TIMEOUT_S,
    end: Callable[[str], object] | None = None,
) -> SurvivingCommunicator:
    """The axis between replicas for `replicate`: training goes on when some of them are lost. Collective.

    A replica is lost with any of its ranks: killed, stopped, or cut off from the store. The others notice, agree on who
    is left, complete the interrupted exchange among themselves and go on in the same process, bitwise equal. From the
    next step on, means, votes and owners are those of the replicas that are left. A replica that comes to life after it
    was left out raises `ReplicaLost`.

    Args:
        mesh: ("replicate", "shard"), as of `init_mesh`; or the mesh of this replica alone, with `replica` and
            `replicas`; None for a replica of one rank.
        replica: The number of this replica, from 0 to below `replicas`, where each replica is a world of its own.
        replicas: How many there are then.
        store: Where all ranks meet; by default the store of the default process group. Without it nobody can agree, so
            the process that keeps it must not be lost: under torchrun the agent of the first node, otherwise rank 0.
        min_replicas: From 1 to the number of replicas; with fewer left all raise `ReplicaLost`.
        silence_s: A rank that is silent for this long is lost, above 1. A killed rank's connections close at once.
        timeout_s: Seconds for which a collective waits for a rank that is alive.
        end: Called with the reason, in another thread, in a rank whose replica was left out and whose main thread waits
            for something else; by default it logs, and ends the process with code 1.

    Raises:
        ValueError: An argument is out of range, or there is neither a mesh nor a store.
        TimeoutError: Not all ranks came within the store's timeout.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
        >>> axis.size(), axis.losses
        (1, [])
        >>> axis.close()
    """
    shard, shards = (0, 1) if mesh is None else (mesh["shard"].get_local_rank(), mesh["shard"].size())
    if mesh is not None and replica is None and replicas is None:
        replica, replicas = mesh["replicate"].get_local_rank(), mesh["replicate"].size()
    if replica is None or replicas is None or not 0 <= replica < replicas:
        raise ValueError(f"replica is {replica} of {replicas}, must be from 0 to below replicas; or pass a whole mesh")
    if not 1 <= min_replicas <= replicas:
        raise ValueError(f"min_replicas is {min_replicas}, must be from 1 to the number of replicas, {replicas}")
    if not silence_s > 1:
        raise ValueError(f"silence_s is {silence_s}, must be above 1")
    if store is None and mesh is None:
        raise ValueError("replicas without a common process group need a store, such as torch.distributed.TCPStore")
    base = store or distributed_c10d._get_default_store()
    membership = Membership(
        next_axis_store(base, replica * shards + shard, replicas * shards),
        replica,
        replicas,
        shard,
        shards,
        silence_s,
        min_replicas,
        end or end_here,
    )
    return SurvivingCommunicator(membership, timeout_s)


def end_here(reason: str) -> None:
    """Logs the reason and ends this process."""
    _log.error("%s: this process ends", reason)
    end_now(1)
