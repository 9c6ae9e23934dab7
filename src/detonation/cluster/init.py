"""The position that a launcher gave this process, and the process group that it joins there."""

import gc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from detonation.cluster.processes.heartbeat import EndProcess, Heartbeat, silence_limit_s
from detonation.cluster.processes.heartbeat_board import FileBoard, StoreBoard
from detonation.cluster.processes.rendezvous import describe_store_host, keep_to_one_interface, rendezvous_store

COLLECTIVE_TIMEOUT_S = 300.0
"""How long a rank waits for a rank that is alive: to compile, to load, to save. The transfer time comes on top."""

_heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class LaunchPosition:
    """Rank `rank` of `world_size`; on its own machine it is rank `local_rank` of `local_world_size`.

    address, port: where the ranks meet, for a launcher that does not set MASTER_ADDR and MASTER_PORT.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str = ""
    port: int = 0


def launch_position(env: Mapping[str, str]) -> LaunchPosition | None:
    """Reads the position that torchrun, a Kubernetes job or srun gave this process; `None` without a launcher.

    Raises:
        ValueError: a variable of the launcher is not a whole number.

    >>> launch_position({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}).local_world_size
    4
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_world = _number(env, "LOCAL_WORLD_SIZE", world)
        return LaunchPosition(rank, world, _number(env, "LOCAL_RANK", rank % local_world), local_world)
    # A batch script that did not call srun has a job but no step, and stands alone.
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "SLURM_STEP_ID" in env:
        return _slurm(env)
    return None


def init_rank(position: LaunchPosition, end: EndProcess, folder: Path | None = None) -> Heartbeat | None:
    """Joins the default process group (NCCL with a GPU for each local rank, else gloo) and starts the heartbeat.

    Args:
        end: ends this process when another rank is lost; see `Heartbeat`.
        folder: a directory of this machine where the ranks meet; without it they meet at MASTER_ADDR:MASTER_PORT.

    Returns:
        This rank's heartbeat; `None` in a world of one rank.
    """
    on_gpu = gpus_for(position.local_world_size)
    if on_gpu:
        torch.cuda.set_device(position.local_rank)
    else:
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    if position.address:
        os.environ.setdefault("MASTER_ADDR", position.address)
        os.environ.setdefault("MASTER_PORT", str(position.port))
    os.environ["LOCAL_RANK"] = str(position.local_rank)
    keep_to_one_interface(os.environ, position.world_size == position.local_world_size)
    store = rendezvous_store(position.rank, position.world_size, folder)
    if folder is not None:
        board: FileBoard | StoreBoard = FileBoard(folder)
    else:
        host = describe_store_host(os.environ)
        board = StoreBoard(store, position.rank, host, hosted_here=position.rank == 0 and host.startswith("rank 0"))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=position.rank,
        world_size=position.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=torch.device("cuda", position.local_rank) if on_gpu else None,
    )
    global _heartbeat
    _heartbeat = Heartbeat(board, position.rank, position.world_size, end) if position.world_size > 1 else None
    return _heartbeat


def set_timeouts(message_bytes: float, shards: int, silence_s: float, rate_bits_per_s: float) -> None:
    """Sets how long this rank waits for others. Called once the size of the largest message between nodes is known.

    A rank counts as lost after `silence_limit_s(silence_s, ...)`. Collectives wait longer, because a rank that is alive
    may be late.

    Args:
        message_bytes: the largest message between nodes.
        shards: shards of a replica, to name a lost rank by its coordinates.
        silence_s: seconds without a heartbeat, beside the transfer time.
        rate_bits_per_s: the lowest rate to expect of a link.
    """
    if _heartbeat is not None:
        _heartbeat.set_limit(silence_limit_s(silence_s, message_bytes, rate_bits_per_s), shards)
    timeout = timedelta(seconds=silence_limit_s(COLLECTIVE_TIMEOUT_S, message_bytes, rate_bits_per_s))
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def local_device() -> torch.device:
    """The device of this rank in the default process group."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def leave() -> None:
    """Waits for all ranks, then destroys the process group and ends its threads. Collective.

    Call it after the function that trained has returned. The threads end with the last reference to the group, and an
    interpreter that shuts down around them may abort ("terminate called without an active exception"). torch itself
    keeps some references longer: in functions of torch.distributed.nn that are imported later, and in caches of sharded
    tensors.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> dt.leave()
        >>> dist.is_initialized()
        False
    """
    if _heartbeat is not None:
        _heartbeat.leave(dist.barrier)
    else:
        dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # meshes, models and optimizers refer to each other in circles


def gpus_for(local_world_size: int) -> bool:
    """True where this machine has a GPU for each of its `local_world_size` ranks."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size


def _slurm(env: Mapping[str, str]) -> LaunchPosition:
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
    per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "")))
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    return LaunchPosition(
        rank,
        world,
        _number(env, "SLURM_LOCALID", 0),
        int(per_node[0]) if per_node else world,
        address=first_host(hosts) or env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        port=20_000 + _number(env, "SLURM_JOB_ID", 0) % 20_000,
    )


def first_host(hosts: str) -> str:
    """The first name in SLURM's compressed list of hosts.

    >>> first_host("gpu[007-009,012],login1"), first_host("a,b"), first_host("rack2-[3,5]-ib")
    ('gpu007', 'a', 'rack2-3-ib')
    """
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else ""


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ValueError(f"the launcher's environment has {name}={text!r}, but it must be a whole number")
    return int(text)
