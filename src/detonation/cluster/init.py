"""The process group that a rank joins at the position that its launcher gave it, and the device
that it takes."""

import gc
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.cluster.devices import choose_device, look_for_gpus, require_gpu_each
from detonation.cluster.position import LaunchPosition as LaunchPosition
from detonation.cluster.position import launch_position as launch_position
from detonation.cluster.processes.descriptors import allow_open_files
from detonation.cluster.processes.heartbeat import (
    EndProcess,
    FileBoard,
    Heartbeat,
    StoreBoard,
    silence_limit_s,
)
from detonation.cluster.processes.rendezvous import (
    compare_devices,
    describe_store_host,
    keep_to_loopback,
    keep_to_one_interface,
    rendezvous_store,
)
from detonation.cluster.processes.signals import end_now
from detonation.cluster.processes.waiting import WAIT_LINE_S, Watch

_log = logging.getLogger("detonation")
COLLECTIVE_TIMEOUT_S = 300.0
"""How long a rank waits for a rank that is alive: to compile, to load, to save.

The transfer time comes on top.
"""

GROUP_TIMEOUT_S = 1800.0
"""How long a collective waits in a group that `init_mesh` initialises: torch's own limit for gloo.
"""

_set_timeout = (
    getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
)  # public from torch 2.14 on
_heartbeat: Heartbeat | None = None
_lost = False
_watch: Watch | None = None
_interface = ""


def init_replica(position: LaunchPosition, store: Store, shards: int) -> None:
    """Joins a process group of this rank's replica alone (NCCL on GPUs, else gloo), which no other
    replica can harm.

    The `shards` ranks of a replica are neighbours; the ranks of all replicas meet in `store`.
    """
    device = take_device(position)
    keep_to_loopback(os.environ)  # its ranks are children of one launcher
    replica, shard = divmod(position.rank, shards)
    _init_group(PrefixStore(f"replica{replica}", store), shard, shards, device)


def init_rank(
    position: LaunchPosition, end: EndProcess, folder: Path | None = None
) -> Heartbeat | None:
    """Joins the default process group (NCCL on GPUs, else gloo) and starts the heartbeat, which a
    world of one has not.

    Args:
        end: ends this process when another rank is lost; see `Heartbeat`.
        folder: a directory of this machine where the ranks meet; without it they meet at
            MASTER_ADDR:MASTER_PORT.

    Raises `ValueError` as `meet`, and where ranks have different tokens.
    """
    global _heartbeat
    _heartbeat = None
    store, device = meet(position, folder)
    if folder is not None:
        board: FileBoard | StoreBoard = FileBoard(folder)
    else:
        host = describe_store_host(os.environ)
        hosted_here = position.rank == 0 and host.startswith("rank 0")
        board = StoreBoard(
            store, position.rank, host, hosted_here, os.environ.get("DETONATION_TOKEN", "")
        )
    _heartbeat = (
        Heartbeat(board, position.rank, position.world_size, end)
        if position.world_size > 1
        else None
    )
    if isinstance(board, StoreBoard):
        board.require_same_token(position.rank, position.world_size)
    # with the heartbeat: a rank that is done may fail, and say why, while another still connects
    _init_group(store, position.rank, position.world_size, device)
    if _heartbeat is not None:
        watching = _heartbeat
        watch_waiting(lambda text: end(watching.report(text)))
    return _heartbeat


def own_heartbeat() -> Heartbeat | None:
    """The heartbeat of the rank that `init_rank` made of this process."""
    return _heartbeat


def end_alone(reason: str) -> NoReturn:
    _log.error("%s", reason)
    end_now(1)


def _init_group(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    if device.type == "cpu":
        threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(
            int(threads.split(",")[0])
        )  # OpenMP takes one number for each level of nesting
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=None if device.type == "cpu" else device,
    )


def join_world(asked: str | None = None) -> torch.device:
    """Joins the default process group of a launcher's world unless there is one; returns this
    rank's device.

    Without a launcher the process is a world of one. The group carries tensors of the CPU and of
    the device, whose type is `asked`, or chosen. A GPU that the caller made current stays current.
    Raises `ValueError` as `meet`.
    """
    position = launch_position(os.environ)
    allow_open_files(position.world_size if position is not None else 1)
    if dist.is_initialized():
        in_group = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        position = position or launch_position({**os.environ, **in_group})
        if torch.cuda.is_initialized() and asked != "cpu":  # type: ignore[no-untyped-call]
            return torch.device("cuda", torch.cuda.current_device())
        return _chosen_device(position, asked)
    if position is None:
        _log.warning(
            "no launcher and no process group: this process is a world of one; torchrun starts more"
        )
        store: Store = HashStore()
        device, position = _chosen_device(None, asked), LaunchPosition(0, 1, 0, 1)
    else:
        store, device = meet(position, asked=asked)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=position.rank,
        world_size=position.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    return device


def watch_waiting(end: Callable[[str], NoReturn] = end_alone) -> None:
    """Starts the watch of the default process group, unless there is one; `end` as in
    `waiting.Watch`."""
    global _watch
    store = distributed_c10d._get_default_store()
    if _watch is not None and _watch.source is not store:  # of a group that was destroyed
        _watch.stop()
        _watch = None
    if _watch is None and dist.get_world_size() > 1:
        _watch = Watch(store, dist.get_rank(), dist.get_world_size(), WAIT_LINE_S, end)


def meet(
    position: LaunchPosition, folder: Path | None = None, asked: str | None = None
) -> tuple[Store, torch.device]:
    """Takes this rank's device (see `take_device`), keeps to one interface, and opens the store
    where ranks meet.

    `folder` is as in `init_rank`, `asked` the device's type, or None to choose. Raises `ValueError`
    where a GPU is in sight that this rank cannot take, where two ranks share one, and where
    MASTER_ADDR is missing.
    """
    device = take_device(position, asked)
    if position.address:
        os.environ.setdefault("MASTER_ADDR", position.address)
        os.environ.setdefault("MASTER_PORT", str(position.port))
    store = rendezvous_store(position, folder)
    if folder is not None:  # of the launcher of this machine, which has checked its own ranks
        keep_to_loopback(os.environ)
        return store, device
    compare_devices(store, position, device)
    # once the store is open: by then the name of rank 0's host is known everywhere
    _note_interface(keep_to_one_interface(os.environ, store, position.rank, position.world_size))
    return store, device


def _note_interface(line: str) -> None:
    global _interface
    _interface = line
    if line:
        _log.info("%s", line)


def interface_line() -> str:
    """Where the ranks of this world listen, in one line; "" where all share a machine."""
    return _interface


def take_device(position: LaunchPosition, asked: str | None = None) -> torch.device:
    """Takes this rank's device; `asked`, and `ValueError`, as in `meet`.

    Sets RANK, WORLD_SIZE, LOCAL_RANK (of the device, among those that this process sees) and
    LOCAL_WORLD_SIZE, for launchers that leave them out.
    """
    device = _chosen_device(position, asked)
    os.environ |= {"RANK": str(position.rank), "WORLD_SIZE": str(position.world_size)}
    os.environ["LOCAL_RANK"] = str(
        (position.local_rank or 0) if device.index is None else device.index
    )
    if position.local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(position.local_world_size)
    return device


def _chosen_device(position: LaunchPosition | None, asked: str | None) -> torch.device:
    device = choose_device(os.environ, look_for_gpus(), position, asked)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def set_timeouts(
    message_bytes: float, shards: int, silence_s: float, rate_bits_per_s: float
) -> None:
    """Sets how long this rank waits for others. Called once the size of the largest message between
    nodes is known.

    A rank counts as lost after `silence_limit_s(silence_s, ...)`, and has coordinates by its
    `shards`. Collectives wait longer: a live rank may be late.
    """
    if _heartbeat is not None:
        _heartbeat.set_limit(silence_limit_s(silence_s, message_bytes, rate_bits_per_s), shards)
    set_group_timeouts(silence_limit_s(COLLECTIVE_TIMEOUT_S, message_bytes, rate_bits_per_s))


def set_group_timeouts(timeout_s: float) -> None:
    for group in list(distributed_c10d._world.pg_map):
        _set_timeout(timedelta(seconds=timeout_s), group)


def local_device() -> torch.device:
    """The device of this rank in the default process group."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def note_loss() -> None:
    """Notes that a rank of the default process group is lost: `leave` waits for nobody then."""
    global _lost
    _lost = True


def leave() -> None:
    """Waits for all ranks, unless one is lost, then destroys the process group and ends its
    threads. Collective.

    Call it after the function that trained has returned. The threads end with the last reference to
    the group, and an interpreter that shuts down around them may abort ("terminate called without
    an active exception"). torch itself keeps some references longer: in functions of
    torch.distributed.nn imported later, and in caches of sharded tensors.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> dt.leave()
        >>> dist.is_initialized()
        False
    """
    global _watch
    if _watch is not None:
        _watch.leave()
    if _heartbeat is not None:
        _heartbeat.leave(dist.barrier)
    elif not _lost:
        dist.barrier()
    if _watch is not None:
        _watch.stop()
        _watch = None
    dist.destroy_process_group()
    gc.collect()  # meshes, models and optimizers refer to each other in circles


def gpus_for(ranks: int) -> bool:
    """True where each of `ranks` processes of this machine gets a GPU; False where all belong on
    the CPU.

    Raises `ValueError` where a GPU is in sight, but not one for each; see `devices.choose_device`.
    """
    gpus = look_for_gpus()
    if choose_device(os.environ, gpus).type == "cpu":
        return False
    require_gpu_each(gpus, ranks)
    return True
