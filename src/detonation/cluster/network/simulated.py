"""Virtual replicas: many in one process, each the code of a real one, joined by wires that nothing travels over.

Each replica is a thread, because that code waits in the middle of what it does; but only one runs at a time, until it
waits for a message that is not there yet, and the next is always the next in replica order. So a run is deterministic.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Abandoned(RuntimeError):
    """Another replica failed, so this one cannot go on."""


def play(act: Callable[["VirtualWire"], T], replicas: int) -> list[T]:
    """What `act` returns for each of `replicas` virtual replicas, given its wire. Raises what the first to fail raised.

    `act` must start the same collectives in the same order on each. Random generators of the process are shared: seed
    them before drawing.
    """
    stage = _Stage(replicas)
    results: dict[int, T] = {}
    gone, news = [False] * replicas, SimpleQueue[None]()

    def live(replica: int) -> None:
        try:
            stage.enter(replica)
            results[replica] = act(VirtualWire(replica, stage))
        except BaseException as error:
            stage.fail(error)
        finally:
            stage.leave(replica)
            gone[replica] = True
            news.put(None)

    def all_gone() -> None:  # Thread.join takes a thread for ended when Ctrl-C comes while it waits for it
        while not all(gone):
            news.get()

    for replica in range(replicas):
        threading.Thread(target=live, args=(replica,), name=f"replica {replica}", daemon=True).start()
    try:
        stage.begin()  # here, where Ctrl-C finds all of them
        all_gone()
    except BaseException as error:  # Ctrl-C: each ends at its next wait
        stage.fail(error)
        all_gone()
    if stage.failure is not None:
        raise stage.failure
    return [results[replica] for replica in range(replicas)]


class VirtualWire:
    """One virtual replica's end of the axis that joins all. What it returns is shared between them."""

    def __init__(self, replica: int, stage: "_Stage") -> None:
        self.replica, self._stage = replica, stage
        self._started = 0

    def size(self) -> int:
        return self._stage.replicas

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return self._collective(values, _sum)

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._collective(mine, torch.stack)

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        everyones = self._collective(mine.view(self.size(), -1), torch.stack)
        return lambda: everyones()[:, self.replica]

    def _collective(self, given: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Callable[[], Tensor]:
        meeting = self._stage.meeting(self._started, combine)
        self._started += 1
        meeting.given[self.replica] = given
        return lambda: self._stage.wait(self.replica, meeting)


class _Meeting:
    """One collective: what each has given, and what comes of it, computed once for all."""

    def __init__(self, replicas: int, combine: Callable[[list[Tensor]], Tensor]) -> None:
        self.given: dict[int, Tensor] = {}
        self._replicas, self._combine = replicas, combine
        self._result: Tensor | None = None

    @property
    def complete(self) -> bool:
        return self._result is not None or len(self.given) == self._replicas

    def result(self) -> Tensor:
        if self._result is None:
            self._result = self._combine([self.given[replica] for replica in range(self._replicas)])
            self.given.clear()
        return self._result


class _Stage:
    """Whose turn it is, and the collectives that not all have started yet."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.failure: BaseException | None = None
        self._turns = [threading.Semaphore(0) for _ in range(replicas)]
        self._here = [True] * replicas
        self._open: dict[int, _Meeting] = {}
        self._idle = 0  # turns in a row in which nobody got what it waited for

    def begin(self) -> None:
        """Gives the first replica its turn."""
        self._turns[0].release()

    def enter(self, replica: int) -> None:
        """Waits for the first turn of `replica`."""
        self._turns[replica].acquire()
        self._idle = 0
        self._check()

    def leave(self, replica: int) -> None:
        """Ends the last turn of `replica`."""
        self._here[replica] = False
        self._next(replica)

    def fail(self, error: BaseException) -> None:
        """Ends all: each raises `Abandoned` when it would wait, or when its turn comes."""
        if self.failure is None:
            self.failure = error

    def meeting(self, number: int, combine: Callable[[list[Tensor]], Tensor]) -> _Meeting:
        """The collective that each replica starts as its `number`-th."""
        if number not in self._open:
            self._open[number] = _Meeting(self.replicas, combine)
        meeting = self._open[number]
        if len(meeting.given) == self.replicas - 1:  # all are here now: those who wait for it hold it themselves
            del self._open[number]
        return meeting

    def wait(self, replica: int, meeting: _Meeting) -> Tensor:
        """What comes of `meeting`; lets the others run until all have come."""
        while not meeting.complete:
            self._idle += 1
            if self._idle > self.replicas:
                raise RuntimeError(f"virtual replica {replica} waits for what the others do not send")
            self._next(replica)
            self._turns[replica].acquire()
            self._check()
        self._idle = 0
        return meeting.result()

    def _next(self, replica: int) -> None:
        for ahead in range(1, self.replicas + 1):
            other = (replica + ahead) % self.replicas
            if self._here[other]:
                self._turns[other].release()
                return

    def _check(self) -> None:
        if self.failure is not None:
            raise Abandoned("another replica failed")


def _sum(everyones: list[Tensor]) -> Tensor:
    """The sum in replica order; a real network may add in another one, which is equal but for rounding."""
    total = everyones[0] + everyones[1] if len(everyones) > 1 else everyones[0].clone()
    for one in everyones[2:]:
        total += one
    return total
