"""Starts a local world of processes, waits for it, and ends all of it when one of them fails."""

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from detonation.cluster.init import Place, gpus_for, join, leave
from detonation.cluster.processes import ipc
from detonation.cluster.processes.exit import die_with
from detonation.cluster.processes.failure import ECHO_S, Failure, WorldError, by_exception, by_exit, first_cause
from detonation.cluster.processes.signals import STOPPING, Stop

_POLL_S = 0.02


def run_local(
    function: Callable[..., Any],
    world_size: int,
    arguments: Sequence[Any] = (),
    *,
    timeout_s: float | None = None,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """Calls `function(*arguments)` on `world_size` processes of this machine that share a process group.

    Returns each rank's result (JSON values and tensors), by rank. On CPU the processes are forked, so `function` may be
    anything; where each gets a GPU they start afresh, so `function` must be importable and `arguments` plain values.
    enter: called with its rank in each process before it has sockets and threads; for processes that are forked.
    Raises `WorldError` when a rank fails or `timeout_s` passes; no process outlives the call. SIGTERM and SIGUSR1 are
    passed on to all ranks; a second one, or ranks that do not know what to do with the first, end it as `SystemExit`.
    """
    folder = Path(tempfile.mkdtemp(prefix="detonation-"))
    pids: dict[int, int] = {}
    try:
        with _passed_on(pids) as stop:
            fork = hasattr(os, "fork") and not gpus_for(world_size)
            if enter is not None and not fork:
                raise ValueError("ranks with a GPU each start afresh and enter nothing: hide the GPUs")
            start = partial(_fork, enter) if fork else _spawn
            for rank in range(world_size):
                with _held_back(stop, pids):
                    pids[rank] = start(rank, world_size, folder, function, arguments)
            failure = _wait(pids, folder, None if timeout_s is None else time.monotonic() + timeout_s)
            if failure is not None and stop and failure.kind == signal.Signals(stop.number).name:
                raise SystemExit(128 + stop.number)
            if failure is not None:
                raise WorldError(failure, world_size)
            return [ipc.read(folder / f"result-{rank}.json") for rank in range(world_size)]
    finally:
        _end(pids)
        shutil.rmtree(folder, ignore_errors=True)


def _fork(
    enter: Callable[[int], None] | None,
    rank: int,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        # From Python 3.12 on, fork warns when there are threads; torch's are idle here, and the child starts its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        gc.freeze()  # what the parent holds is never garbage here: to look through it would copy all of its memory
        try:
            code = _child(rank, world_size, folder, function, arguments, parent, enter)
        finally:
            # Never back into the parent's stack: its finally clauses and atexit hooks are not the child's.
            os._exit(code)
    return pid


def _spawn(rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    task = folder / f"task-{rank}.json"
    ipc.write(task, [rank, world_size, function.__module__, function.__qualname__, list(arguments), os.getpid()])
    return os.posix_spawn(sys.executable, [sys.executable, "-m", __name__, str(task)], os.environ)


def _child(
    rank: int,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    parent: int,
    enter: Callable[[int], None] | None = None,
) -> int:
    die_with(parent)
    # The parent decides what Ctrl-C does; a second traceback from each child would help nobody.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    pulse = None
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        if enter is not None:
            enter(rank)
        pulse = join(Place(rank, world_size, rank, world_size), partial(_lost, rank, folder), folder)
        ipc.write(folder / f"result-{rank}.json", function(*arguments))
        leave()
    except BaseException as error:
        if pulse is not None:
            pulse.stop()
        _write_failure(folder, by_exception(rank, error))
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _lost(rank: int, folder: Path, text: str, told: bool) -> NoReturn:
    """Ends this rank because another one is lost."""
    _write_failure(folder, Failure(rank, time.time(), "Lost", text, complete=True))
    os._exit(1)


def _write_failure(folder: Path, failure: Failure) -> None:
    ipc.write(folder / f"failure-{failure.rank}.json", asdict(failure))


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
    return [Failure(**ipc.read(path))] if path.exists() else [by_exit(rank, code)]


def _end(pids: dict[int, int]) -> None:
    """Ends the ranks that are left. At once: what they write is whole or absent at any time."""
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for rank, pid in list(pids.items()):
        os.waitpid(pid, 0)
        del pids[rank]


@contextmanager
def _passed_on(pids: Mapping[int, int]) -> Iterator[Stop]:
    """Passes SIGTERM and SIGUSR1 on to the ranks once; the second time it is `SystemExit`, which ends them."""
    stop = Stop()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if stop:
            raise SystemExit(128 + number)
        stop.take(number)
        for pid in list(pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    try:
        before = {number: signal.signal(number, pass_on) for number in STOPPING}
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _held_back(stop: Stop, pids: Mapping[int, int]) -> Iterator[None]:
    """Within it a rank is started: the signals that arrive meanwhile find it among `pids`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    asked = bool(stop)
    try:
        yield
        if asked:
            os.kill(list(pids.values())[-1], stop.number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    rank_, world_, module, name, given, parent_ = ipc.read(Path(sys.argv[1]))
    called = getattr(importlib.import_module(module), name)
    sys.exit(_child(rank_, world_, Path(sys.argv[1]).parent, called, given, parent_))
