"""Sets up the process group and the device of a rank, at the position that the launcher gives
it.
"""

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
from detonation.cluster.processes.descriptors import GlooPorts, allow_open_files
from detonation.cluster.processes.heartbeat import (
    EndProcess,
    FileBoard,
    Heartbeat,
    StoreBoard,
    silence_limit_s,
)
from detonation.cluster.processes.refusal import refuse_world, require_start
from detonation.cluster.processes.rendezvous import (
    describe_store_host,
    hosts_store,
    keep_to_loopback,
    keep_to_one_interface,
    rendezvous_store,
)
from detonation.cluster.processes.signals import end_now
from detonation.cluster.processes.waiting import WAIT_LINE_S, Watch, says_meanwhile

_log = logging.getLogger("detonation")
COLLECTIVE_TIMEOUT_S = 300.0
"""Seconds for which a collective waits for a rank that compiles, loads or saves. The transfer time
of the message is added to these seconds.
"""

GROUP_TIMEOUT_S = 1800.0
"""Timeout in seconds of a process group that `init_mesh` initialises: torch's default for gloo."""

# torch has a public set_timeout from version 2.14 on; earlier versions have a private one
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
_heartbeat: Heartbeat | None = None
_lost = False
_watch: Watch | None = None
_interface = ""
_report_end: Callable[[Exception], object] | None = None


def init_replica(position: LaunchPosition, store: Store, shards: int) -> None:
    """Creates a process group for the ranks of one replica alone (NCCL on GPUs, else gloo), so that
    other replicas cannot disturb it.

    A replica has `shards` ranks, with consecutive numbers. The ranks of all replicas meet in
    `store`.
    """
    device = take_device(position)
    keep_to_loopback(os.environ)  # loopback suffices: a replica is on one machine
    replica, shard = divmod(position.rank, shards)
    _init_group(PrefixStore(f"replica{replica}", store), shard, shards, device)


def init_rank(
    position: LaunchPosition, end: EndProcess, folder: Path | None = None
) -> Heartbeat | None:
    """Joins the default process group (NCCL on GPUs, else gloo), and starts the heartbeat if the
    world has several ranks.

    Args:
        end: ends this process when another rank is lost; see `Heartbeat`.
        folder: a directory of this machine in which the ranks meet. By default they meet at
            MASTER_ADDR:MASTER_PORT.

    Raises `ValueError` like `meet`, and if ranks have different tokens.
    """
    global _heartbeat
    _heartbeat = None
    store, device = meet(position, folder)
    if folder is not None:
        board: FileBoard | StoreBoard = FileBoard(folder)
    else:
        host = describe_store_host(os.environ)
        hosted_here = hosts_store(os.environ, position.rank)
        board = StoreBoard(
            store, position.rank, host, hosted_here, os.environ.get("DETONATION_TOKEN", "")
        )
    _heartbeat = None
    if position.world_size > 1:
        _heartbeat = Heartbeat(board, position.rank, position.world_size, end)
    if isinstance(board, StoreBoard):
        board.require_same_token(position.rank, position.world_size)
    # the heartbeat runs already, so a rank can report a failure while another rank still connects
    _init_group(store, position.rank, position.world_size, device)
    if _heartbeat is not None:
        watching = _heartbeat
        watch_waiting(lambda text: end(watching.report(text)))
    return _heartbeat


def own_heartbeat() -> Heartbeat | None:
    """Returns the heartbeat that `init_rank` started in this process, or None."""
    return _heartbeat


def report_end_to(report: Callable[[Exception], object]) -> None:
    """From now on, `end_for` reports errors of this process to `report` instead of the log."""
    global _report_end
    _report_end = report


def end_for(error: Exception) -> NoReturn:
    """Reports `error` and ends this process. Any thread may call this function, for example while
    the main thread is busy and cannot raise the error.

    The exit code is 2 if the error is bad input (a `ValueError`), otherwise 1.
    """
    code = 1
    if isinstance(error, ValueError):
        code = 2
    try:
        if _report_end is None:
            _log.error("%s", error)
        else:
            _report_end(error)
    finally:
        end_now(code)  # even if the report failed, because nobody reads the output any more


def _end_alone(reason: str) -> NoReturn:
    end_for(RuntimeError(reason))


def _init_group(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    backend = "nccl"
    bound: torch.device | None = device
    if device.type == "cpu":
        backend = "gloo"
        bound = None
        # OMP_NUM_THREADS may list one thread count per level of nested parallelism: use the first
        threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(int(threads.split(",")[0]))
    _connect(backend, store, rank, world_size, COLLECTIVE_TIMEOUT_S, bound)


def _connect(
    backend: str,
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    bound: torch.device | None = None,
) -> None:
    """Connects the ranks that have met in `store` as the default process group. Logs if connecting
    lasts long, for example behind a firewall.
    """
    others = "connections to the other ranks: open all ports between the machines"
    with says_meanwhile(f"rank {rank} of {world_size}", others):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=bound,
        )


def join_world(asked: str | None = None) -> torch.device:
    """Joins the default process group of a launcher's world, unless this process has a group
    already. Returns this rank's device.

    Without a launcher, this process is a world of one rank. The new group can send tensors on the
    CPU and on this rank's device. `asked` is the type of this device; if it is None, this function
    chooses the type. A process that already has a group and uses a GPU keeps this GPU, unless
    `asked` is "cpu". Raises `ValueError` like `meet`.
    """
    position = launch_position(os.environ)
    if dist.is_initialized():
        in_group = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        position = position or launch_position({**os.environ, **in_group})
        if torch.cuda.is_initialized() and asked != "cpu":  # type: ignore[no-untyped-call]
            return torch.device("cuda", torch.cuda.current_device())
        return _chosen_device(position, asked)
    if position is None:
        _log.warning(
            "no launcher and no process group were found, so this process trains alone, as a"
            " world of one rank: start several ranks with torchrun"
        )
        allow_open_files()
        store: Store = HashStore()
        device = _chosen_device(None, asked)
        position = LaunchPosition(0, 1, 0, 1)
    else:
        store, device = meet(position, asked=asked)
    backend = "cpu:gloo,cuda:nccl"
    if device.type == "cpu":
        backend = "gloo"
    _connect(backend, store, position.rank, position.world_size, GROUP_TIMEOUT_S)
    return device


def watch_waiting(end: Callable[[str], NoReturn] = _end_alone) -> None:
    """Starts a `waiting.Watch` of the default process group, unless this group is watched already.
    If this rank waits for ranks that have left the run, the watch calls `end` with the reason.

    The watch also makes the kernel drop connections of foreign programs to this rank's ports. In a
    world of one rank this function starts no watch, and only makes the kernel drop these
    connections.
    """
    global _watch
    store = distributed_c10d._get_default_store()
    # stop the `Watch` of an earlier default process group, which has been destroyed
    if _watch is not None and _watch.source is not store:
        _watch.stop()
        _watch = None
    if dist.get_world_size() == 1:
        GlooPorts(store).drop_strangers()
    elif _watch is None:
        _watch = Watch(store, dist.get_rank(), dist.get_world_size(), WAIT_LINE_S, end)


def meet(
    position: LaunchPosition, folder: Path | None = None, asked: str | None = None
) -> tuple[Store, torch.device]:
    """Chooses the device (see `take_device`) and the network interface of this rank, and opens the
    store in which the ranks meet.

    `folder` is the argument of `init_rank`. `asked` is the type of the device, or None if this
    function chooses the type. Raises `ValueError` if this rank cannot use a GPU that the machine
    shows, if two ranks share a GPU, or if MASTER_ADDR is missing.
    """
    try:
        allow_open_files(position.world_size)
        device = take_device(position, asked)
    except ValueError as error:
        if folder is None:
            raise refuse_world(position, error) from error
        raise
    store = rendezvous_store(position, folder)
    if folder is not None:  # the launcher has already compared the devices of its ranks
        keep_to_loopback(os.environ)
        return store, device
    require_start(store, position, device)
    # choose the interface now: a rank that has reached the store can resolve MASTER_ADDR
    _note_interface(keep_to_one_interface(os.environ, store, position.rank, position.world_size))
    return store, device


def _note_interface(line: str) -> None:
    global _interface
    _interface = line
    if line:
        _log.info("%s", line)


def interface_line() -> str:
    """Returns a log line that names the addresses on which the ranks of this world listen; "" if
    all ranks are on one machine.
    """
    return _interface


def take_device(position: LaunchPosition, asked: str | None = None) -> torch.device:
    """Chooses this rank's device; see `meet` for `asked` and `ValueError`.

    Also sets the environment variables RANK, WORLD_SIZE, LOCAL_RANK (the index of the device among
    the visible devices) and LOCAL_WORLD_SIZE, because some launchers do not set them.
    """
    device = _chosen_device(position, asked)
    os.environ |= {"RANK": str(position.rank), "WORLD_SIZE": str(position.world_size)}
    local_rank = device.index
    if local_rank is None:
        local_rank = position.local_rank or 0
    os.environ["LOCAL_RANK"] = str(local_rank)
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
    """Sets how long this rank waits for other ranks, given the size of the largest message between
    nodes.

    A rank counts as lost after `silence_limit_s(silence_s, ...)` seconds without a heartbeat.
    Collectives wait longer for a rank, because a rank that sends heartbeats may only be late. The
    error message about a lost rank names its replica, which is computed from `shards`.
    """
    if _heartbeat is not None:
        _heartbeat.set_limit(silence_limit_s(silence_s, message_bytes, rate_bits_per_s), shards)
    set_group_timeouts(silence_limit_s(COLLECTIVE_TIMEOUT_S, message_bytes, rate_bits_per_s))


def set_group_timeouts(timeout_s: float) -> None:
    for group in list(distributed_c10d._world.pg_map):
        _set_timeout(timedelta(seconds=timeout_s), group)


def local_device() -> torch.device:
    """Returns the device of this rank in the default process group."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def note_loss() -> None:
    """Records that a rank of the default process group is lost, so that `leave` does not wait for
    that rank.
    """
    global _lost
    _lost = True


def leave() -> None:
    """Waits for all ranks, unless a rank is lost. Then destroys the process group and ends the
    threads of the group. Collective.

    Call this function after the training function has returned, when none of its variables refers
    to the group: the threads end only when the last reference to the group is dropped. If the
    interpreter shuts down before the threads have ended, the process may abort ("terminate called
    without an active exception"). torch itself keeps references to the group in functions of
    torch.distributed.nn that are imported later, and in caches of sharded tensors.

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
    # delete meshes, models and optimizers in reference cycles: they hold references to the group
    gc.collect()


def gpus_for(ranks: int) -> bool:
    """True if each of `ranks` processes of this machine gets a GPU; False if all of them use the
    CPU.

    Raises `ValueError` if the machine shows GPUs, but fewer than `ranks`; see
    `devices.choose_device`.
    """
    gpus = look_for_gpus()
    if choose_device(os.environ, gpus).type == "cpu":
        return False
    require_gpu_each(gpus, ranks)
    return True
