"""Who waits for whom: a line in the log where a rank stands still in a step to which others have
not come.

A collective cannot tell a slow network from a rank that never calls it. So every rank publishes in
the store of its process group how far it has come, a few bytes when that has changed; nothing is
added to a step. A rank that waits for ranks that have left ends: no network library can be told to
stop waiting.
"""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from detonation.cluster.processes.failure import is_network_error
from detonation.cluster.processes.signals import end_if_asked
from detonation.core.runtime import PROGRESS

MEET_LINE_S = 5.0
"""A rank that has met only some of the others for this long names those that have not come, as
`WAIT_LINE_S`."""
WAIT_LINE_S = 30.0
"""A rank that stands still for this long says so; again after twice the time, and so on. After
twice the time it ends, where those for whom it waits have left."""
_INSIDE, _OUTSIDE, _LEFT = "inside", "outside", "left"
_SAID = {
    _INSIDE: "is still in step {0}",
    _OUTSIDE: "is between steps {0} and {1}",
    "saving": "is in save_checkpoint after step {0}, which all ranks must call",
    _LEFT: "has left after step {0}",
}
_MOST_NAMED, _POLL_S = 8, 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """How far a rank has come. steps: that have begun. where: in or outside the last of them,
    saving, or left."""

    steps: int
    where: str = _OUTSIDE

    @classmethod
    def parse(cls, text: str) -> "Standing":
        """The inverse of `str`. Raises `ValueError` for any other text."""
        steps, where = text.split(" ")
        if where not in _SAID:
            raise ValueError(f"{where!r} is no place in a loop")
        return cls(int(steps), where)

    def __str__(self) -> str:
        return f"{self.steps} {self.where}"

    @property
    def where_in_words(self) -> str:
        """The preposition before the number of the step."""
        return "in" if self.where == _INSIDE else "after"


def who_waits(rank: int, standings: Sequence[Standing], seconds: float) -> str:
    """The line to log where `rank` has stood still for `seconds`; "" where it need not, or a lower
    rank says it.

    >>> who_waits(0, [Standing(21, "inside"), Standing(20)], 30).partition(": ")[2]
    'rank 1 is between steps 20 and 21'
    """
    return "" if standings.index(standings[rank]) < rank else _waiting(rank, standings, seconds)


def waits_in_vain(rank: int, standings: Sequence[Standing], partners: Collection[int]) -> bool:
    """True where `rank` is in a step to which none of its partners that have not come can come: all
    of them have left.

    >>> waits_in_vain(0, [Standing(21, "inside"), Standing(20, "left"), Standing(20)], {1})
    True
    """
    mine = standings[rank]
    behind = [standings[partner] for partner in partners if standings[partner].steps < mine.steps]
    return mine.where == _INSIDE and bool(behind) and all(other.where == _LEFT for other in behind)


def partners_of(rank: int) -> set[int]:
    """The ranks of all groups that `rank` is in, without the group of the whole world where there
    are others."""
    world = distributed_c10d._world
    mine = [
        (group, {*ranks} - {rank})
        for group, ranks in [*world.pg_group_ranks.items()]
        if rank in ranks
    ]
    parts = [ranks for group, ranks in mine if group is not world.default_pg and ranks]
    return set().union(*(parts or [ranks for _, ranks in mine]))


def _waiting(rank: int, standings: Sequence[Standing], seconds: float) -> str:
    """`who_waits`, also where a lower rank says it."""
    mine = standings[rank]
    if not mine.steps or mine.where == _LEFT:
        return ""
    behind = [
        r for r, other in enumerate(standings) if other.steps < mine.steps or other.where == _LEFT
    ]
    here = f"rank {rank} has waited for {seconds:.0f} s {mine.where_in_words} step {mine.steps}"
    if behind:
        more = f" and {len(behind) - _MOST_NAMED} more" if len(behind) > _MOST_NAMED else ""
        others = ", ".join(standing_in_words(r, standings[r]) for r in behind[:_MOST_NAMED])
        return f"{here}, to which others have not come: {others}{more}"
    if mine.where == _INSIDE and all(other == mine for other in standings):
        return (
            f"{here}, as all ranks have: the network between them is slow or cut off, or one is"
            " busy in a hook"
        )
    return ""


def standing_in_words(rank: int, standing: Standing) -> str:
    """Where `rank` is, in words."""
    said = "has not begun its first step" if standing == Standing(0) else _SAID[standing.where]
    return f"rank {rank} {said.format(standing.steps, standing.steps + 1)}"


@contextlib.contextmanager
def says_meanwhile(who: str, whom: str) -> Iterator[None]:
    """Inside the block another thread logs, after 5, 10, 20 ... s, that `who` waits for `whom`.

    The block waits in a library that says nothing.
    """
    over = threading.Event()

    def say() -> None:
        seconds = MEET_LINE_S
        while not over.wait(seconds if seconds == MEET_LINE_S else seconds / 2):
            _log.warning("%s has waited for %.0f s for %s", who, seconds, whom)
            seconds *= 2

    thread = threading.Thread(target=say, name="meeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Awaited:
    """Waits for ranks, or anybody else, that have not come to where `who` is: says who they are,
    and gives up after `limit_s`.

    line_s: Seconds until the first line. look: Called at each turn; it raises where there is no use
    in waiting.
    """

    def __init__(
        self,
        who: str,
        limit_s: float,
        line_s: float | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self._who, self._limit_s, self._look = who, limit_s, look
        self._began = time.monotonic()
        self._due = MEET_LINE_S if line_s is None else line_s

    def wait(self, away: Callable[[], Collection[int] | str], poll_s: float = _POLL_S) -> None:
        """Waits a moment longer; `away` finds the ranks that have not come, or says who has not, in
        words. `TimeoutError` after the limit."""
        seconds = time.monotonic() - self._began
        self._look()
        end_if_asked()
        if seconds > self._limit_s:
            text = f"{self._who} has not met {_named(away())} within {self._limit_s:g} s"
            raise TimeoutError(text)
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
    """Publishes this rank's standing in `store`, and logs where it waits, until `stop`. Collective
    in no way.

    The first line comes after `line_s` seconds of standing still. `end` ends this process with its
    reason, from another thread: the main thread waits inside the network library.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        line_s: float,
        end: Callable[[str], NoReturn],
    ) -> None:
        self.source, self._end = store, end
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a connection of its own
        self._rank, self._line_s = rank, line_s
        self._keys = [f"detonation/standing/{rank}" for rank in range(world_size)]
        self._published = Standing(-1)
        self._text, self._left = "", False
        self._stopped = threading.Event()
        self._publish(self._standing())
        PROGRESS.explain = self.explain
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
        self._thread.start()
        atexit.register(
            self.stop
        )  # a thread inside the store must not meet the end of the interpreter

    def leave(self) -> None:
        """Publishes that this rank takes no more steps."""
        self._left = True
        with contextlib.suppress(RuntimeError, OSError):
            self._publish(self._standing())

    def stop(self) -> None:
        """Ends the watch; waits a moment for its thread."""
        self._stopped.set()
        PROGRESS.explain = lambda error: None
        self._thread.join(timeout=1.0)
        atexit.unregister(self.stop)

    def explain(self, error: BaseException) -> None:
        """Puts the ranks that have not come before the text of an error that a wait for them may
        have caused."""
        if self._text and is_network_error(error):
            error.args = (f"{self._text}: {error}",)

    def _run(self) -> None:
        seen, since, due = self._standing(), time.monotonic(), self._line_s
        while not self._stopped.wait(self._line_s / 4):
            now, standing = time.monotonic(), self._standing()
            try:
                self._publish(standing)
                if standing != seen:
                    seen, since, due, self._text = standing, now, self._line_s, ""
                    continue
                if not self._store.check(self._keys):  # a rank has not published its standing yet
                    continue
                standings = [
                    Standing.parse(text.decode()) for text in self._store.multi_get(self._keys)
                ]
                self._text = who_waits(self._rank, standings, now - since)
                stands_still = now - since >= 2 * self._line_s
                in_vain = stands_still and waits_in_vain(
                    self._rank, standings, partners_of(self._rank)
                )
            except (
                RuntimeError,
                OSError,
                ValueError,
            ):  # the store is gone, or not in order: that is for others to say
                continue
            if in_vain:
                text = _waiting(self._rank, standings, now - since)
                self._end(
                    f"{text}: it ends, because nobody will come; give all ranks the same number of"
                    " batches"
                )
            elif self._text and now - since >= due:
                due *= 2
                _log.warning("%s", self._text)

    def _standing(self) -> Standing:
        return Standing(PROGRESS.steps, _LEFT if self._left else PROGRESS.where)

    def _publish(self, standing: Standing) -> None:
        if standing != self._published:
            self._store.set(self._keys[self._rank], str(standing))
            self._published = standing
