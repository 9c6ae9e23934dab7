"""Worlds of real gloo ranks for tests: torch is imported once, here, and every rank is a fork of this process."""

import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # imported before the fork, not once in every rank
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt

TIMEOUT_S = 240


def run(function: Callable[..., Any], replicas: int, shards: int, *arguments: Any) -> list[Any]:
    """What `function(mesh, *arguments)` returns on each rank of a world of replicas x shards."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(replicas * shards)]
        ranks = [
            fork.Process(target=_rank, args=(rank, folder, pipe, replicas, shards, function, arguments))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        try:
            outcomes = [_receive(receiver) for receiver, _ in pipes]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if errors:
        raise AssertionError("\n".join(errors))
    return [result for _, result in outcomes]


def caught(function: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    """The class and the text of what `function(*arguments)` raises."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _receive(receiver: Connection) -> tuple[bool, Any]:
    if not receiver.poll(TIMEOUT_S):
        return False, f"no answer within {TIMEOUT_S} s"
    return receiver.recv()


def _rank(
    rank: int, folder: str, pipe: Connection, replicas: int, shards: int, function: Callable[..., Any], arguments: Any
) -> None:
    world = replicas * shards
    gc.freeze()  # to look for garbage in what the parent holds would copy all of its memory
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder, "store")), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        mesh: DeviceMesh = dt.init_mesh(replicas, shards, "cpu")
        pipe.send((True, function(mesh, *arguments)))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
