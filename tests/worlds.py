"""Worlds of real gloo ranks for tests: torch is imported once, here, and every rank is a fork of this process."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP2 imports it where it shards: half a second, here once and not in every rank
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
from detonation.cluster.processes.signals import die_with_parent
from detonation.cluster.survive.elastic_axis import MeetingPoint, Survival
from limits import LIMIT_S

for name in (
    *(
        "multiprocessing.popen_fork",
        "torch.profiler._cupti_monitor",
        "detonation.core.optimizer.replicated",
    ),
    *("detonation.cluster.mesh", "detonation.cluster.init", "detonation.cluster.network.throttled"),
    *(
        "detonation.cluster.processes.waiting",
        "detonation.core.optimizer.replicate",
        "detonation.wire.wire",
    ),
    *("detonation.engines.native_engine", "detonation.engines.triton"),
):
    with suppress(ImportError):  # not every torch has all of them
        importlib.import_module(name)  # before the fork, and not once in every rank

DEVICE = os.environ.get("TEST_DEVICE", "cpu")

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_lasting: dict[tuple[int, int], "World"] | None = None
"""The worlds of `lasting`, by their shape; None outside."""
_kept: dict[tuple[int, int], "World"] = {}
"""Those that stay after `lasting`."""


def run(function: Callable[..., Any], replicas: int, shards: int, *arguments: Any) -> list[Any]:
    """What `function(mesh, *arguments)` returns on each rank of a world of replicas x shards.

    An exception on any rank is an `AssertionError` with its trace. Where GPUs are too few the test is skipped.
    """
    if DEVICE == "cuda" and shards > torch.cuda.device_count():
        pytest.skip(f"{shards} shards need as many GPUs")
    if _lasting is None:
        return run_alone(function, replicas, shards, *arguments)
    shape = replicas, shards
    if shape not in _lasting:
        _lasting[shape] = World(*shape)
    try:
        outcomes = _lasting[shape].call(function, *arguments)
        _lasting[shape].rest()
        return outcomes
    except BaseException:
        _lasting.pop(shape).close()  # who knows what its ranks wait for
        raise


def forked(acts: Sequence[Callable[[int], object]], folder: Path) -> list[str]:
    """What each act has written, or the error with which it ended; each in a process of its own.

    An act takes the port of a store. The store answers once all are forked: its thread resolves the addresses of
    clients, and a fork meanwhile would inherit the resolver's lock, which nobody there releases.
    """
    point = MeetingPoint(Survival(1, 1), 0)
    children = []
    for number, act in enumerate(acts):
        if not (child := os.fork()):
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)
            gc.freeze()  # the groups of other tests have their threads in the parent alone, and would wait for them
            try:
                warnings.simplefilter("ignore")  # of the libraries about each other
                act(point.port)
                os._exit(0)
            except BaseException as error:
                (folder / f"{number}.end").write_text(repr(error))
                os._exit(1)
        children.append(child)
    point.serve()
    for child in children:
        os.waitpid(child, 0)
    point.close()
    return [(folder / f"{number}.end").read_text() for number in range(len(acts))]


def run_alone(
    function: Callable[..., Any], replicas: int, shards: int, *arguments: Any
) -> list[Any]:
    """The same in a world that nobody else uses: for a function that leaves something behind in its process."""
    with World(replicas, shards) as world:
        return world.call(function, *arguments)


@contextmanager
def lasting(keep: bool = False) -> Iterator[None]:
    """Within it each shape of world is started once, and its ranks run one function after another.

    Ranks are forked at the first call and do not see later patches; functions and arguments travel as pickles.
    keep: the worlds go on to the next that keep them, until `close`.
    """
    global _lasting
    _lasting = _kept if keep else {}
    try:
        yield
    finally:
        if not keep:
            close(_lasting)
        _lasting = None


def close(worlds: dict[tuple[int, int], "World"] = _kept) -> None:
    """Ends them all."""
    for shape in [*worlds]:
        worlds.pop(shape).close()


class World:
    """Ranks that are forked at the first call, and run what they are called with until `close`."""

    def __init__(self, replicas: int, shards: int) -> None:
        self._shape = replicas, shards
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank."""
        if self._ranks:
            for rank, pipe in zip(self._ranks, self._pipes, strict=True):
                os.kill(rank.pid, signal.SIGCONT)
                pipe.send((function, arguments))
        else:
            self._start((function, arguments))
        until = (
            time.monotonic() + LIMIT_S
        )  # for all of them: pytest's own timeout would tell nothing of the ranks
        outcomes = [self._receive(rank, until) for rank in range(len(self._ranks))]
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for _, result in outcomes]

    def rest(self) -> None:
        """Stops the ranks until the next call: each group of gloo has three threads that wake 100 times a second."""
        for rank in self._ranks:
            os.kill(rank.pid, signal.SIGSTOP)

    def close(self) -> None:
        """Ends the ranks, whatever they do."""
        for rank in self._ranks:
            rank.kill()
            rank.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _receive(self, rank: int, until: float) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, until - time.monotonic())):
            os.kill(self._ranks[rank].pid, signal.SIGUSR2)
            self._ranks[rank].join(1)  # it writes, and does not end
            return (
                False,
                f"no answer within {LIMIT_S} s\n{_stacks(self._folder.name, rank).read_text()}",
            )
        try:
            return pipe.recv()
        except EOFError:
            return False, "it ended without an answer"

    def _start(self, first: Call) -> None:
        fork = multiprocessing.get_context("fork")
        replicas, shards = self._shape
        for number in range(replicas * shards):
            ours, its = fork.Pipe()
            arguments = (number, self._folder.name, its, replicas, shards, os.getpid(), first)
            rank = fork.Process(target=_rank, args=arguments)
            rank.start()
            its.close()
            self._ranks.append(rank)
            self._pipes.append(ours)


def caught(function: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    """The class and the text of what `function(*arguments)` raises."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _stacks(folder: str, rank: int) -> Path:
    """Where a rank writes the stacks of its threads at SIGUSR2."""
    return Path(folder, f"stacks-{rank}")


def _rank(
    rank: int, folder: str, pipe: Connection, replicas: int, shards: int, parent: int, first: Call
) -> None:
    gc.freeze()  # to look for garbage in what the parent holds would copy all of its memory
    try:
        die_with_parent(parent)
        faulthandler.register(signal.SIGUSR2, _stacks(folder, rank).open("w"))
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder, "store")), replicas * shards)
        backend, slow = "gloo", None
        if DEVICE == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
            # NCCL takes no two ranks on one device: replicas that share one talk over gloo
            backend, slow = (
                "cpu:gloo,cuda:nccl",
                "gloo" if torch.cuda.device_count() < replicas * shards else None,
            )
        dist.init_process_group(backend, store=store, rank=rank, world_size=replicas * shards)
        mesh: DeviceMesh = dt.init_mesh(replicas, shards, DEVICE, slow_backend=slow)
        function, arguments = first
        while True:
            pipe.send((True, function(mesh, *arguments)))
            function, arguments = pipe.recv()  # it stays for its peers until it is killed
            # a group of gloo has three threads, which wake a hundred times a second as long as it lives; those of
            # meshes stay, because torch remembers meshes
            for group in [
                each for each in distributed_c10d._world.pg_map if "/detonation/" in each.group_name
            ]:
                dist.destroy_process_group(group)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
