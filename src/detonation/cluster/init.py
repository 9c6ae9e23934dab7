"""A process's place in the world it was started in, and the process group that it joins there."""

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
from torch.distributed.distributed_c10d import Store

from detonation.cluster.processes.heartbeat import End, Pulse, limit
from detonation.cluster.processes.heartbeat_board import FileBoard, StoreBoard
from detonation.cluster.processes.rendezvous import keep_to_one_interface, meet, store_keeper

PATIENCE_S = 300.0
"""How long a rank waits for one that is alive: to compile, to load, to save; transfers come on top."""

_pulse: Pulse | None = None


@dataclass(frozen=True)
class Place:
    """Rank `rank` of `world_size`; on its own machine it is `local_rank` of `local_world_size`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str = ""
    port: int = 0


def launched(env: Mapping[str, str]) -> Place | None:
    """The place that torchrun, a Kubernetes job or srun put this process in; `None` when no launcher did.

    >>> launched({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}).local_world_size
    4
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_world = _number(env, "LOCAL_WORLD_SIZE", world)
        return Place(rank, world, _number(env, "LOCAL_RANK", rank % local_world), local_world)
    # A batch script that did not call srun has a job but no step, and stands alone.
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "SLURM_STEP_ID" in env:
        return _slurm(env)
    return None


def join(place: Place, end: End, folder: Path | None = None) -> Pulse | None:
    """Joins the default process group (NCCL with one GPU per local rank, else gloo); returns this rank's pulse.

    The processes meet in `folder`, or at MASTER_ADDR:MASTER_PORT of the environment. A world of one has no pulse.
    end: see `Pulse`.
    """
    on_gpu = gpus_for(place.local_world_size)
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    else:
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    if place.address:
        os.environ.setdefault("MASTER_ADDR", place.address)
        os.environ.setdefault("MASTER_PORT", str(place.port))
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    keep_to_one_interface(os.environ, place.world_size == place.local_world_size)
    store = meet(place.rank, place.world_size, folder)
    board = FileBoard(folder) if folder is not None else _board(store, place)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=PATIENCE_S),
        device_id=torch.device("cuda", place.local_rank) if on_gpu else None,
    )
    global _pulse
    _pulse = Pulse(board, place.rank, place.world_size, end) if place.world_size > 1 else None
    return _pulse


def _board(store: Store, place: Place) -> StoreBoard:
    keeper = store_keeper(os.environ)
    return StoreBoard(store, place.rank, keeper, mine=place.rank == 0 and keeper.startswith("rank 0"))


def expect(message_bytes: float, shards: int, silence_s: float, rate_bits_per_s: float) -> None:
    """Sets how long this rank waits for others, now that the size of the largest message between nodes is known.

    A rank counts as lost after `limit(silence_s, ...)`. One that is alive, but does not come, is waited for longer.
    """
    if _pulse is not None:
        _pulse.expect(limit(silence_s, message_bytes, rate_bits_per_s), shards)
    patience = timedelta(seconds=limit(PATIENCE_S, message_bytes, rate_bits_per_s))
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(patience, group)


def device_here() -> torch.device:
    """The device of this rank in the process group that it joined."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def leave() -> None:
    """Waits until every rank is here, then leaves the process group and ends its threads. Collective.

    The threads end with the last reference to the group. So call it when the function that trained has returned: an
    interpreter that is taken down around them may abort ("terminate called without an active exception"). torch keeps
    some longer: in functions of torch.distributed.nn that are imported later, and in caches of sharded tensors.
    """
    if _pulse is not None:
        _pulse.leave(dist.barrier)
    else:
        dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # meshes, models and optimizers refer to each other in circles


def gpus_for(local_world_size: int) -> bool:
    """Is there a GPU for each of that many processes on this machine?"""
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size


def _slurm(env: Mapping[str, str]) -> Place:
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
    per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "")))
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    return Place(
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
