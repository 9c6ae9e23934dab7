"""Starts a local world of processes, waits for it, and ends all of it when one of them fails."""

import ctypes
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from detonation.cluster import parcel
from detonation.cluster.failure import ECHO_S, Failure, WorldError, by_exception, by_exit, first_cause
from detonation.cluster.join import Place, gpus_for, join, leave

_POLL_S = 0.02
_GRACE_S = 2.0
"""How long processes may take to end on SIGTERM."""

_PR_SET_PDEATHSIG = 1


def run_local(
    function: Callable[..., Any], world_size: int, arguments: Sequence[Any] = (), *, timeout_s: float | None = None
) -> list[Any]:
    """Calls `function(*arguments)` on `world_size` processes of this machine that share a process group.

    Returns each rank's result (JSON values and tensors), by rank. On CPU the processes are forked, so `function` may be
    anything; where each gets a GPU they start afresh, so `function` must be importable and `arguments` plain values.
    Raises `WorldError` when a rank fails or `timeout_s` passes; no process outlives the call.
    """
    folder = Path(tempfile.mkdtemp(prefix="detonation-"))
    pids: dict[int, int] = {}
    try:
        with _terminable():
            fork = hasattr(os, "fork") and not gpus_for(world_size)
            start = _fork if fork else _spawn
            for rank in range(world_size):
                pids[rank] = start(rank, world_size, folder, function, arguments)
            failure = _wait(pids, folder, None if timeout_s is None else time.monotonic() + timeout_s)
            if failure is not None:
                raise WorldError(failure, world_size)
            return [parcel.read(folder / f"result-{rank}.json") for rank in range(world_size)]
    finally:
        _end(pids)
        shutil.rmtree(folder, ignore_errors=True)


def _fork(rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        # From Python 3.12 on, fork warns when there are threads; torch's are idle here, and the child starts its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _child(rank, world_size, folder, function, arguments, parent)
        finally:
            # Never back into the parent's stack: its finally clauses and atexit hooks are not the child's.
            os._exit(code)
    return pid


def _spawn(rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    task = folder / f"task-{rank}.json"
    parcel.write(task, [rank, world_size, function.__module__, function.__qualname__, list(arguments), os.getpid()])
    return os.posix_spawn(sys.executable, [sys.executable, "-m", __name__, str(task)], os.environ)


def _child(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any], parent: int
) -> int:
    _die_with(parent)
    # The parent decides what Ctrl-C does; a second traceback from each child would help nobody.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        join(Place(rank, world_size, rank, world_size), f"file://{folder / 'rendezvous'}")
        parcel.write(folder / f"result-{rank}.json", function(*arguments))
        leave()
    except BaseException as error:
        parcel.write(folder / f"failure-{rank}.json", asdict(by_exception(rank, error)))
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _wait(pids: dict[int, int], folder: Path, deadline: float | None) -> Failure | None:
    """Waits for all; `None` when all succeeded, else the cause. Takes the ranks that ended out of `pids`."""
    failures: list[Failure] = []
    patience = float("inf")
    while pids:
        for rank, pid in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[rank]
                failures += _why(rank, os.waitstatus_to_exitcode(status), folder)
        if any(not failure.network for failure in failures):
            break
        if failures:
            patience = min(patience, time.monotonic() + ECHO_S)
        if time.monotonic() > patience:
            break
        if deadline is not None and time.monotonic() > deadline:
            late = f"ranks {sorted(pids)} did not finish in time and were ended"
            return Failure(min(pids), time.time(), "TimeoutError", late, complete=True)
        time.sleep(_POLL_S)
    return first_cause(failures)


def _why(rank: int, code: int, folder: Path) -> list[Failure]:
    path = folder / f"failure-{rank}.json"
    if code == 0:
        return []
    return [Failure(**parcel.read(path))] if path.exists() else [by_exit(rank, code)]


def _end(pids: dict[int, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    limit = time.monotonic() + _GRACE_S
    while pids:
        for rank, pid in list(pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[rank]
            elif time.monotonic() > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del pids[rank]
        time.sleep(_POLL_S if pids else 0)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def _terminable() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that the children are ended and the folder removed."""

    def leave_orderly(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, leave_orderly)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    rank_, world_, module, name, given, parent_ = parcel.read(Path(sys.argv[1]))
    called = getattr(importlib.import_module(module), name)
    sys.exit(_child(rank_, world_, Path(sys.argv[1]).parent, called, given, parent_))
