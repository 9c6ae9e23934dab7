"""Simulates replicas: many replicas in one process run the code of real replicas, but their
communicators use no network.

Each replica is a thread, because its code waits inside a step. Only one thread runs at a time. When
the running thread waits for a message that no replica has sent yet, the thread of the next replica
runs. So a simulated run is deterministic.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from detonation.core.link import Communicator

_T = TypeVar("_T")


class Abandoned(RuntimeError):
    """Raised on a replica that cannot continue because another simulated replica failed."""


def simulate_replicas(act: Callable[["SimulatedCommunicator"], _T], replicas: int) -> list[_T]:
    """Calls `act` for each of `replicas` simulated replicas, with the communicator of the replica.
    Returns the results in the order of the replicas.

    `act` must start the same collectives in the same order on each replica. The replicas share the
    random generators of the process, so seed a generator before each use.

    Raises the exception of the first replica that failed.
    """
    scheduler = _Scheduler(replicas)
    results: dict[int, _T] = {}
    ended = [False] * replicas
    ends = SimpleQueue[None]()

    def run(replica: int) -> None:
        try:
            scheduler.enter(replica)
            results[replica] = act(SimulatedCommunicator(replica, scheduler))
        except BaseException as error:
            scheduler.fail(error)
        finally:
            scheduler.leave(replica)
            ended[replica] = True
            ends.put(None)

    def wait_for_all() -> None:
        # no Thread.join: after Ctrl-C in `join`, CPython regards a running thread as ended
        while not all(ended):
            ends.get()

    threads = [
        threading.Thread(target=run, args=(replica,), name=f"replica {replica}", daemon=True)
        for replica in range(replicas)
    ]
    for thread in threads:
        thread.start()
    try:
        scheduler.begin()  # inside `try`: Ctrl-C must end the threads that have started
        wait_for_all()
    except BaseException as error:  # after Ctrl-C each replica ends at its next wait
        scheduler.fail(error)
        wait_for_all()
    wait_until_gone(threads)
    if scheduler.failure is not None:
        raise scheduler.failure
    return [results[replica] for replica in range(replicas)]


def wait_until_gone(threads: list[threading.Thread]) -> None:
    """Waits, at most ten seconds, until the operating system has removed `threads`, which have
    ended or are about to end. Only Linux lists threads, so there is no wait on other systems.

    MKL holds a lock while a thread that multiplied matrices ends, even after `Thread.join`. A
    process forked at that moment inherits the lock, and its first matrix product never returns.
    """
    until = time.monotonic() + 10.0
    for thread in threads:
        while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < until:
            time.sleep(1e-4)


class SimulatedCommunicator(Communicator):
    """Communicator of one simulated replica.

    On a CPU, all replicas share the tensor that a collective returns.
    """

    def __init__(self, replica: int, scheduler: "_Scheduler") -> None:
        self.replica = replica
        self._scheduler = scheduler
        self._started = 0

    def size(self) -> int:
        return self._scheduler.replicas

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return self._collective(values, _sum)

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._collective(mine, torch.stack)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        gathered = self._collective(mine.view(self.size(), -1), torch.stack)
        return lambda: gathered()[:, self.replica]

    def together(self, mine: _T, act: Callable[[list[_T]], object]) -> None:
        """Calls `act` once with the list of the values `mine` of all replicas. This happens after
        all replicas have called `together`, and before any replica continues. `act` must not wait.
        """
        self._collective(mine, lambda values: torch.tensor(act(values) is None))()

    def _collective(
        self, mine: Any, combine: Callable[[list[Any]], Tensor]
    ) -> Callable[[], Tensor]:
        collective = self._scheduler.collective(self._started, combine)
        self._started += 1
        collective.inputs[self.replica] = mine

        def received() -> Tensor:
            found = self._scheduler.wait(self.replica, collective)
            if found.device.type == "cpu":
                return found
            return found.clone()  # each replica needs a copy: kernels write into received messages

        return received


class _Collective:
    """A collective: the input of each replica, and the result, which is computed once for all
    replicas.
    """

    def __init__(self, replicas: int, combine: Callable[[list[Any]], Tensor]) -> None:
        self.inputs: dict[int, Any] = {}
        self._replicas = replicas
        self._combine = combine
        self._result: Tensor | None = None

    @property
    def complete(self) -> bool:
        return self._result is not None or len(self.inputs) == self._replicas

    def result(self) -> Tensor:
        if self._result is None:
            self._result = self._combine(
                [self.inputs[replica] for replica in range(self._replicas)]
            )
            self.inputs.clear()
        return self._result


class _Scheduler:
    """Lets one simulated replica run at a time, and keeps each collective until all replicas have
    started it.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.failure: BaseException | None = None
        self._turns = [threading.Semaphore(0) for _ in range(replicas)]
        self._running = [True] * replicas
        self._open: dict[int, _Collective] = {}
        self._idle = 0  # number of waits since a replica last got the result of a collective

    def begin(self) -> None:
        """Lets the first replica run."""
        self._turns[0].release()

    def enter(self, replica: int) -> None:
        """Waits until `replica` may run for the first time."""
        self._turns[replica].acquire()
        self._idle = 0
        self._check()

    def leave(self, replica: int) -> None:
        """Records that `replica` has ended, and lets the next replica run."""
        self._running[replica] = False
        self._next(replica)

    def fail(self, error: BaseException) -> None:
        """Ends all replicas because of `error`. Each other replica raises `Abandoned` when it next
        waits for a collective. A replica that has not run yet raises `Abandoned` at its start.
        """
        if self.failure is None:
            self.failure = error

    def collective(self, number: int, combine: Callable[[list[Any]], Tensor]) -> _Collective:
        """Returns the collective with this `number`. Each replica numbers its collectives in the
        order in which it starts them.
        """
        if number not in self._open:
            self._open[number] = _Collective(self.replicas, combine)
        collective = self._open[number]
        if len(collective.inputs) == self.replicas - 1:
            # this is the last replica that asks for the collective, so remove it from `_open`
            del self._open[number]
        return collective

    def wait(self, replica: int, collective: _Collective) -> Tensor:
        """Lets other replicas run until all replicas have started `collective`; returns its
        result.
        """
        while not collective.complete:
            self._idle += 1
            if self._idle > self.replicas:
                raise RuntimeError(
                    f"simulated replica {replica} waits for a collective that other replicas do"
                    " not start: call the same collectives on all replicas"
                )
            self._next(replica)
            self._turns[replica].acquire()
            self._check()
        self._idle = 0
        return collective.result()

    def _next(self, replica: int) -> None:
        for ahead in range(1, self.replicas + 1):
            other = (replica + ahead) % self.replicas
            if self._running[other]:
                self._turns[other].release()
                return

    def _check(self) -> None:
        if self.failure is not None:
            raise Abandoned("another replica failed")


def _sum(tensors: list[Tensor]) -> Tensor:
    """Sums the tensors in the order of the replicas.

    A real network may add the tensors in another order, and therefore round differently.
    """
    if len(tensors) > 1:
        total = tensors[0] + tensors[1]
    else:
        total = tensors[0].clone()
    for tensor in tensors[2:]:
        total += tensor
    return total
