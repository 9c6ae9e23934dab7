"""Finds out for which ranks other ranks wait. If a rank makes no progress in a step, it logs the
ranks that have not begun this step.

A collective cannot distinguish a slow network from a rank that never calls the collective. So each
rank publishes its progress in the store of its process group. Publishing costs a few bytes per
change of progress, and no work in a step. If a rank waits for ranks that have left the run, the
waiting rank ends its own process, because network libraries cannot stop waiting.
"""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from detonation.choices import first_names
from detonation.cluster.processes.descriptors import GlooPorts
from detonation.cluster.processes.failure import is_network_error
from detonation.cluster.processes.signals import end_if_asked
from detonation.core.runtime import PROGRESS

MEET_LINE_S = 5.0
"""Seconds of waiting at the start of a run before a rank logs which ranks are missing. The time is
doubled after each log line.
"""
WAIT_LINE_S = 30.0
"""Seconds without progress before a rank logs that it waits. The time is doubled after each log
line. A rank ends after 60 s, twice this time, if the ranks that it waits for have left the run.
"""
_INSIDE = "inside"
_OUTSIDE = "outside"
_LEFT = "left"
_SAID = {
    _INSIDE: "is still in step {0}",
    _OUTSIDE: "is between steps {0} and {1}",
    "saving": "is in save_checkpoint after step {0}, which all ranks must call",
    _LEFT: "has left after step {0}",
}
_MOST_NAMED = 8
_POLL_S = 0.02
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Standing:
    """Progress of a rank. steps: number of steps that the rank has begun. where: "inside" or
    "outside" of the last step, "saving", or "left".
    """

    steps: int
    where: str = _OUTSIDE

    @classmethod
    def parse(cls, text: str) -> "Standing":
        """Parses the text that `str` makes of a `Standing`. Raises `ValueError` for any other
        text.
        """
        steps, where = text.split(" ")
        if where not in _SAID:
            raise ValueError(f"{where!r} must be inside, outside, saving or left")
        return cls(int(steps), where)

    def __str__(self) -> str:
        return f"{self.steps} {self.where}"

    @property
    def where_in_words(self) -> str:
        """Returns the preposition before the number of the step in a log line: "in" or "after"."""
        if self.where == _INSIDE:
            return "in"
        return "after"


def who_waits(rank: int, standings: Sequence[Standing], seconds: float) -> str:
    """Returns the line to log if `rank` has made no progress for `seconds`. Returns "" if `rank`
    waits for no rank, or if a lower rank logs the line.

    >>> who_waits(0, [Standing(21, "inside"), Standing(20)], 30).partition(": ")[2]
    'rank 1 is between steps 20 and 21'
    """
    if standings.index(standings[rank]) < rank:
        return ""
    return _waiting(rank, standings, seconds)


def waits_in_vain(rank: int, standings: Sequence[Standing], partners: Collection[int]) -> bool:
    """True if `rank` waits in vain: it is inside a step, and all `partners` that have not begun
    that step have left the run.

    >>> waits_in_vain(0, [Standing(21, "inside"), Standing(20, "left"), Standing(20)], {1})
    True
    """
    mine = standings[rank]
    behind = [standings[partner] for partner in partners if standings[partner].steps < mine.steps]
    return mine.where == _INSIDE and bool(behind) and all(other.where == _LEFT for other in behind)


def partners_of(rank: int) -> set[int]:
    """Returns all ranks that share a process group with `rank`. The default group, which has all
    ranks, counts only if `rank` is in no other group.
    """
    world = distributed_c10d._world
    mine = [
        (group, {*ranks} - {rank})
        for group, ranks in [*world.pg_group_ranks.items()]
        if rank in ranks
    ]
    parts = [ranks for group, ranks in mine if group is not world.default_pg and ranks]
    return set().union(*(parts or [ranks for _, ranks in mine]))


def _waiting(rank: int, standings: Sequence[Standing], seconds: float) -> str:
    """Returns the line that `who_waits` would log, even if a lower rank logs this line."""
    mine = standings[rank]
    if not mine.steps or mine.where == _LEFT:
        return ""
    behind = [
        r for r, other in enumerate(standings) if other.steps < mine.steps or other.where == _LEFT
    ]
    here = f"rank {rank} has waited for {seconds:.0f} s {mine.where_in_words} step {mine.steps}"
    if behind:
        others = first_names((standing_in_words(r, standings[r]) for r in behind), _MOST_NAMED)
        return f"{here} for other ranks: {others}"
    if mine.where == _INSIDE and all(other == mine for other in standings):
        return (
            f"{here}, like all other ranks: the network between them is slow or cut off, or one"
            " rank is busy in a hook"
        )
    if mine.where == _INSIDE:
        ended = (f"rank {r}" for r, other in enumerate(standings) if other.where != _INSIDE)
        return f"{here}, which others have ended, perhaps by an error: {first_names(ended)}"
    return ""


def standing_in_words(rank: int, standing: Standing) -> str:
    """Describes the progress of `rank` in words."""
    said = _SAID[standing.where]
    if standing == Standing(0):
        said = "has not begun its first step"
    return f"rank {rank} {said.format(standing.steps, standing.steps + 1)}"


@contextlib.contextmanager
def says_meanwhile(who: str, whom: str) -> Iterator[None]:
    """Context manager: while its block runs, another thread logs after 5, 10, 20 ... s that `who`
    waits for `whom`.

    Use this function around calls of libraries that wait without logging.
    """
    over = threading.Event()

    def say() -> None:
        seconds = MEET_LINE_S
        pause = seconds
        while not over.wait(pause):
            _log.warning("%s has waited for %.0f s for %s", who, seconds, whom)
            pause = seconds
            seconds *= 2

    thread = threading.Thread(target=say, name="meeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_thread(call: Callable[[], _T], name: str, daemon: bool = True) -> Future[_T]:
    """Calls `call` in another thread. The returned future gets the result or the exception."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


class Awaited:
    """Waits for ranks or other processes, logs which are missing, and raises `TimeoutError` after
    `limit_s` seconds.

    who: name of the waiting rank. line_s: seconds until the first log line. look: function that is
    called at each poll; it raises an error if waiting is useless. ends: True if a request to stop
    ends the process while it waits; False in training, where the state is saved first.
    """

    def __init__(
        self,
        who: str,
        limit_s: float,
        line_s: float | None = None,
        look: Callable[[], object] = lambda: None,
        ends: bool = True,
    ) -> None:
        self._who = who
        self._ends = ends
        self._limit_s = limit_s
        self._look = look
        self._began = time.monotonic()
        self._due = MEET_LINE_S
        if line_s is not None:
            self._due = line_s

    def wait(self, away: Callable[[], Collection[int] | str], poll_s: float = _POLL_S) -> None:
        """Waits `poll_s` seconds, until the next poll. Raises `TimeoutError` after the limit.
        `away` returns the missing ranks, or a text that says what is missing.
        """
        seconds = time.monotonic() - self._began
        self._look()
        if self._ends:
            end_if_asked()
        if seconds > self._limit_s:
            raise TimeoutError(
                f"{self._who} has not met {_named(away())} within {self._limit_s:g} s"
            )
        if seconds > self._due:
            self._due *= 2
            said = "%s has waited for %.0f s, at most %g, for %s"
            _log.warning(said, self._who, seconds, self._limit_s, _named(away()))
        time.sleep(poll_s)


def _named(ranks: Collection[int] | str) -> str:
    if isinstance(ranks, str):
        return ranks
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Watch:
    """Publishes this rank's progress in `store`, and logs if this rank waits, until `stop` is
    called. Meanwhile this object makes the kernel drop foreign connections to the gloo groups of
    this rank.

    The first line is logged after `line_s` seconds without progress. `end` ends this process for a
    given reason. Another thread calls `end`, because the main thread waits inside the network
    library.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        line_s: float,
        end: Callable[[str], NoReturn],
    ) -> None:
        self.source = store
        self._end = end
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # its own connection
        self._rank = rank
        self._line_s = line_s
        self._keys = [f"detonation/standing/{rank}" for rank in range(world_size)]
        self._published = Standing(-1)
        self._text = ""
        self._left = False
        self._ports = GlooPorts(self._store)
        self._stopped = threading.Event()
        self._publish(self._standing())
        PROGRESS.explain = self.explain
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
        self._thread.start()
        # stop the thread before the interpreter ends: no thread may call the store at that time
        atexit.register(self.stop)

    def leave(self) -> None:
        """Publishes that this rank will begin no more steps."""
        self._left = True
        with contextlib.suppress(RuntimeError, OSError):
            self._publish(self._standing())

    def stop(self) -> None:
        """Stops the watch; waits at most 1 s for its thread."""
        self._stopped.set()
        PROGRESS.explain = lambda error: None
        self._thread.join(timeout=1.0)
        atexit.unregister(self.stop)

    def explain(self, error: BaseException) -> None:
        """Adds to the start of a network error's text which ranks this rank waits for."""
        if self._text and is_network_error(error):
            error.args = (f"{self._text}: {error}",)

    def _run(self) -> None:
        seen = self._standing()
        since = time.monotonic()
        due = self._line_s
        self._ports.drop_strangers()
        while not self._stopped.wait(self._line_s / 4):
            self._ports.drop_strangers()  # training may have created further process groups
            now = time.monotonic()
            standing = self._standing()
            try:
                self._publish(standing)
                if standing != seen:
                    seen = standing
                    since = now
                    due = self._line_s
                    self._text = ""
                    continue
                # a rank has not published its progress yet, so there is nothing to compare
                if not self._store.check(self._keys):
                    continue
                standings = [
                    Standing.parse(text.decode()) for text in self._store.multi_get(self._keys)
                ]
                self._text = who_waits(self._rank, standings, now - since)
                in_vain = False
                if now - since >= 2 * self._line_s:
                    partners = partners_of(self._rank)
                    in_vain = waits_in_vain(self._rank, standings, partners)
            except (RuntimeError, OSError, ValueError):
                continue  # the heartbeat reports a lost or damaged store, so ignore the error here
            if in_vain:
                text = _waiting(self._rank, standings, now - since)
                self._end(
                    f"{text}: this rank ends, because no other rank will come; give all ranks"
                    " the same number of batches"
                )
            elif self._text and now - since >= due:
                due *= 2
                _log.warning("%s", self._text)

    def _standing(self) -> Standing:
        where: str = PROGRESS.where
        if self._left:
            where = _LEFT
        return Standing(PROGRESS.steps, where)

    def _publish(self, standing: Standing) -> None:
        if standing != self._published:
            self._store.set(self._keys[self._rank], str(standing))
            self._published = standing
