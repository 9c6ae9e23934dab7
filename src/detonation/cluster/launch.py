"""Runs a function on all ranks of a world. Either this module starts the ranks as processes of this
machine, or this process is one rank that torchrun or srun has started.
"""

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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from detonation.cluster.exits import RankExits, failure_file
from detonation.cluster.init import (
    LaunchPosition,
    gpus_for,
    init_rank,
    leave,
    own_heartbeat,
    report_end_to,
)
from detonation.cluster.processes.descriptors import allow_open_files
from detonation.cluster.processes.failure import (
    Failure,
    WorldError,
    failure_from_exception,
    write_result,
)
from detonation.cluster.processes.heartbeat import Heartbeat, Reason
from detonation.cluster.processes.refusal import refuse_world
from detonation.cluster.processes.rendezvous import use_interface
from detonation.cluster.processes.signals import (
    Stop,
    die_with_agent,
    die_with_parent,
    end_now,
    stoppable,
)
from detonation.cluster.survive.elastic_axis import MeetingPoint, Survival, join_replicas
from detonation.interrupts import REQUESTS, SIGNALS, raising
from detonation.whole_files import read_json

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Rank:
    """One rank of a world, and the function that it runs.

    folder: the directory for the result or the failure of the rank. parent: the id of the process
    that started the rank. where: the arguments of `join_replicas` if the run continues after lost
    replicas, else None.
    """

    rank: int
    world_size: int
    folder: Path
    function: Callable[..., Any]
    arguments: Sequence[Any]
    parent: int
    where: Sequence[Any] | None


def run_local(
    function: Callable[..., Any],
    world_size: int,
    arguments: Sequence[Any] = (),
    *,
    timeout_s: float | None = None,
    enter: Callable[[int], None] | None = None,
    survival: Survival | None = None,
) -> list[Any]:
    """Calls `function(*arguments)` in `world_size` processes of this machine, which form one
    process group.

    On a CPU the processes are forked, so `function` may be any callable. If each rank gets a GPU,
    the processes are spawned, so `function` must be importable and `arguments` plain values. No
    process remains after the call.

    Args:
        timeout_s: ends the world after this time; by default never.
        enter: called with the rank in each forked process, before the process has sockets and
            threads.
        survival: if given, the replicas share no process group, and the run survives the loss of a
            replica.

    Returns:
        The results (JSON values) of all ranks that were not lost, in rank order.

    Raises:
        WorldError: a rank failed, or `timeout_s` passed.
        SystemExit: a second request to stop came, or a request ended ranks that do not handle it.
            The first request is forwarded to all ranks.
    """
    # raise the limit of open files before the ranks start, because the ranks inherit this limit
    allow_open_files(world_size)
    folder = Path(tempfile.mkdtemp(prefix="detonation-"))
    pids: dict[int, int] = {}
    meeting = None
    try:
        where = None
        if survival is not None:
            meeting = MeetingPoint(survival, world_size // survival.shards)
            where = [meeting.host, meeting.port, survival.shards]
        with _signals_pass_on(pids) as stop:
            start = _starter(world_size, enter)
            for rank in range(world_size):
                mine = _Rank(rank, world_size, folder, function, arguments, os.getpid(), where)
                with _signals_held_back(stop, pids):
                    pids[rank] = start(mine)
            if meeting is not None:
                meeting.serve()
            deadline = float("inf")
            if timeout_s is not None:
                deadline = time.monotonic() + timeout_s
            failure = RankExits(pids, folder, deadline, meeting).wait()
            if failure is not None:
                _raise_failure(failure, stop, world_size)
            results = [folder / f"result-{rank}.json" for rank in range(world_size)]
            return [read_json(path) for path in results if meeting is None or path.exists()]
    finally:
        _kill(pids)
        if meeting is not None:
            meeting.close()
        shutil.rmtree(folder, ignore_errors=True)


def _starter(world_size: int, enter: Callable[[int], None] | None) -> Callable[[_Rank], int]:
    """Returns the function that starts the process of a rank: by fork, or as a new Python process
    if a fork is impossible.

    Raises `ValueError` if the ranks get GPUs and `enter` is given, because only forked ranks call
    it.
    """
    if hasattr(os, "fork") and not gpus_for(world_size):
        return partial(_fork, enter)
    if enter is not None:
        raise ValueError(
            "`enter` needs forked ranks, which cannot use GPUs: hide the GPUs with"
            ' CUDA_VISIBLE_DEVICES=""'
        )
    return _spawn


def _raise_failure(failure: Failure, stop: Stop, world_size: int) -> NoReturn:
    """Raises `SystemExit` if a rank was ended by a signal that this process forwarded. Otherwise
    raises `WorldError`.
    """
    if stop and failure.kind == signal.Signals(stop.number).name:
        raise SystemExit(128 + stop.number)
    raise WorldError(failure, world_size)


def _fork(enter: Callable[[int], None] | None, mine: _Rank) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # From Python 3.12 on, os.fork warns if the process has threads.
        # Forking is safe: the threads of torch are idle here, and the child starts its own threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        # without this call, a garbage collection in the child would copy all of the parent's memory
        gc.freeze()
        try:
            code = _child(mine, enter)
        finally:
            # end here: the child must not run the parent's finally clauses and atexit hooks
            os._exit(code)
    return pid


def _spawn(mine: _Rank) -> int:
    task = mine.folder / f"task-{mine.rank}.json"
    function = mine.function
    called = [function.__module__, function.__qualname__, list(mine.arguments)]
    write_result(task, [mine.rank, mine.world_size, *called, mine.parent, mine.where])
    # Ctrl-C is blocked in the new process, because only the parent handles Ctrl-C.
    # SIGTERM is not blocked, so that it ends a rank that still imports modules.
    masked = [signal.SIGINT]
    command = [sys.executable, "-m", __name__, str(task)]
    return os.posix_spawn(sys.executable, command, os.environ, setsigmask=masked)


def _child(mine: _Rank, enter: Callable[[int], None] | None = None) -> int:
    rank = mine.rank
    world_size = mine.world_size
    folder = mine.folder
    die_with_parent(mine.parent)
    # Ignore Ctrl-C, which the parent handles: otherwise each child would print a traceback, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in REQUESTS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a signal that nohup ignores stays ignored
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    heartbeat = None
    try:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
        )
        if enter is not None:
            enter(rank)
        position = LaunchPosition(rank, world_size, rank, world_size)
        report_end_to(lambda error: _tell(folder, failure_from_exception(rank, error)))
        if mine.where is None:
            heartbeat = init_rank(position, partial(_end_lost, rank, folder), folder)
        else:
            join_replicas(position, *mine.where)
        write_result(folder / f"result-{rank}.json", mine.function(*mine.arguments))
        leave()
    except BaseException as error:
        if heartbeat is not None:
            heartbeat.stop()
        _tell(folder, failure_from_exception(rank, error))
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end_lost(rank: int, folder: Path, reason: Reason) -> NoReturn:
    _tell(folder, Failure(rank, time.time(), "Lost", reason.text, complete=True))
    os._exit(1)


def _tell(folder: Path, failure: Failure) -> None:
    """Writes the failure to `folder`, where the waiting parent process reads it. If writing fails,
    prints the failure.
    """
    try:
        write_result(failure_file(folder, failure.rank), asdict(failure))
    except OSError:
        print(f"rank {failure.rank}: {failure.trace or failure.text}", file=sys.stderr, flush=True)


def _kill(pids: dict[int, int]) -> None:
    """Kills the ranks that still run. No damaged file remains, because a rank makes a file appear
    only when the file is complete.
    """
    for pid in pids.values():
        # another thread may have collected the exit code of this process
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for rank, pid in list(pids.items()):
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        del pids[rank]


@contextmanager
def _signals_pass_on(pids: Mapping[int, int]) -> Iterator[Stop]:
    """Forwards the first request to stop (a signal) to the ranks. The second request raises
    `SystemExit`, which ends the ranks.
    """
    stop = Stop()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if stop.repeats(number):
            return
        if stop:
            raise SystemExit(128 + number)
        stop.receive(number)
        for pid in list(pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    handlers: dict[int, Any] = dict.fromkeys(REQUESTS, pass_on)
    # a process that ignores SIGCHLD cannot wait for its children, so set the default handler
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        handlers[signal.SIGCHLD] = signal.SIG_DFL
    with raising(handlers):
        yield stop


@contextmanager
def _signals_held_back(stop: Stop, pids: Mapping[int, int]) -> Iterator[None]:
    """Blocks signals while a rank starts, so that the handler of every signal finds the new rank in
    `pids`.

    The forked rank briefly runs in the parent's call stack, where a signal handler must not raise
    an exception.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    stop_requested = bool(stop)
    try:
        yield
        if stop_requested:
            os.kill(list(pids.values())[-1], stop.number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_under_launcher(
    position: LaunchPosition,
    function: Callable[[], _T],
    fail: Callable[[Exception], int],
    check: Callable[[], object],
    interface: str = "",
) -> _T:
    """Calls `function()` in the process group of a launcher's world and returns its result.

    Args:
        check: raises `ValueError` for errors that this rank finds alone. It is called before this
            rank waits for other ranks, which may never start.
        fail: shows an error and returns the exit code. It is called for an error of `check`, and if
            the main thread waits for a lost rank or cannot raise an error (see `end_for`).
        interface: the network interface of this rank's sockets.

    Raises:
        WorldError: `function` failed on some rank; raised on all ranks. On exactly one rank of each
            machine `reported` is False.
    """

    def end(reason: Reason) -> NoReturn:
        code = fail(_lost(position, reason))
        _close_board()
        end_now(code)

    die_with_agent(os.environ)
    # torchrun stops all ranks when one rank ends, so a signal may come while a failure is reported
    with stoppable() as stop:
        with stop.at_once():
            _require_start(position, fail, check, interface)
        report_end_to(partial(_report_end, position, fail))
        try:
            with stop.at_once():  # a signal ends the wait for ranks that may never connect
                init_rank(position, end)
            result = function()
            leave()
        except Exception as error:
            world_error = _posted(position, error)
            _close_board()
            raise world_error from error
    return result


def _report_end(
    position: LaunchPosition, fail: Callable[[Exception], int], error: Exception
) -> None:
    """Shows the `error` that ends this rank. The output is the same as for an error that the main
    thread raises.
    """
    fail(_posted(position, error))
    _close_board()


def _close_board() -> None:
    heartbeat = own_heartbeat()
    if heartbeat is not None:
        heartbeat.close()


def _posted(position: LaunchPosition, error: Exception) -> WorldError:
    """Tells the other ranks why this rank ends. Returns the error to raise; see `_reported`."""
    failure = failure_from_exception(position.rank, error)
    return _reported(own_heartbeat(), failure, position)


def _require_start(
    position: LaunchPosition,
    fail: Callable[[Exception], int],
    check: Callable[[], object],
    interface: str,
) -> None:
    """Makes the checks that this rank can make alone. If one fails, makes all ranks refuse the
    start, and raises `WorldError`.
    """
    try:
        allow_open_files(position.world_size)
        check()
        use_interface(os.environ, interface)
    except ValueError as error:
        failure = failure_from_exception(position.rank, error)
        if not position.local_rank:  # one rank of each machine prints the error
            # print now, because this rank next waits for ranks that may never start
            fail(WorldError(failure, position.world_size))
        failure = failure_from_exception(position.rank, refuse_world(position, error))
        raise WorldError(failure, position.world_size, reported=True) from error


def _reported(
    heartbeat: Heartbeat | None, failure: Failure, position: LaunchPosition
) -> WorldError:
    """Returns the error that this rank raises after `failure`. A rank that failed on its own posts
    its error for the other ranks (see `Heartbeat.report`). A rank that lost a connection finds out
    which rank is lost.
    """
    # before the first heartbeat all ranks of a machine raise the same error: the first prints it
    if heartbeat is None:
        told = failure.complete and bool(position.local_rank)
        return WorldError(failure, position.world_size, told)
    error = WorldError(failure, position.world_size)
    if failure.network and not failure.bad_input:  # a `RefusedStart` already names its cause
        return _lost(position, heartbeat.explain(str(error)))
    reason = heartbeat.report(str(error), failure.bad_input)
    return WorldError(failure, position.world_size, _is_told(position, reason.rank))


def _lost(position: LaunchPosition, reason: Reason) -> WorldError:
    """Returns the error of a rank that ends because another rank failed or is lost."""
    failure = Failure(
        position.rank,
        time.time(),
        "Lost",
        reason.text,
        bad_input=reason.bad_input,
        complete=True,
    )
    return WorldError(failure, position.world_size, _is_told(position, reason.rank))


def _is_told(position: LaunchPosition, by: int) -> bool:
    """True if another rank of this machine prints the report of rank `by`, so that this rank need
    not. If `by` is on this machine, `by` prints its report; otherwise the first rank of this
    machine does.
    """
    if by == position.rank:
        return False
    first = position.rank - (position.local_rank or 0)
    here = range(first, first + (position.local_world_size or position.world_size))
    return by in here or position.rank != first


if __name__ == "__main__":
    rank_, world_, module, name, given, parent_, where_ = read_json(Path(sys.argv[1]))
    called = getattr(importlib.import_module(module), name)
    sys.exit(_child(_Rank(rank_, world_, Path(sys.argv[1]).parent, called, given, parent_, where_)))
