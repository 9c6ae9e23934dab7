"""Pulse: each rank shows that it lives and watches the next one, so that nobody waits long for one that is gone.

A process group cannot tell a slow peer from a dead one, and gloo cannot be interrupted: a rank whose peer is stopped
or cut off, or which is not the neighbour of a dead one, waits for the whole timeout of the operation. So a thread
counts on a board beside it. Whose count stands still for longer than the limit is lost; who sees it says so, and all
ranks end.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from detonation.cluster.processes.heartbeat_board import Board

BEAT_S = 0.25
START_S = 120.0
"""The limit until the run knows the size of its messages: processes start at different speeds."""
_MISSED = 6
"""So many beats without a sign are suspicious."""


End = Callable[[str, bool], NoReturn]
"""Ends this process: takes why, and whether another rank tells it."""


class Pulse:
    """This rank's pulse, from construction until `stop`.

    end: called in another thread when a rank is lost; the main one may wait inside the network library.
    """

    def __init__(self, board: Board, rank: int, world_size: int, end: End) -> None:
        self._board, self._rank, self._world_size, self._end = board, rank, world_size, end
        self._limit_s, self._shards = START_S, 1
        self._notice, self._following = "", 0
        self._answered = time.monotonic()
        self._stopped = threading.Event()
        self._leaving = self._cut_off = False
        self._telling = threading.Lock()
        self._board.count(rank, 1)
        # A question to the board may never be answered once the network is cut, so another thread asks than judges.
        threading.Thread(target=self._ask, name="pulse", daemon=True).start()
        self._judge = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._judge.start()

    def expect(self, limit_s: float, shards: int) -> None:
        """From here on a rank is lost when it has not been heard of for `limit_s` seconds."""
        self._limit_s, self._shards = limit_s, shards

    def leave(self, meeting: Callable[[], object]) -> None:
        """Calls `meeting`, where all ranks wait for each other, and ends the pulse."""
        self._leaving = True  # who comes out of the meeting first may take the board along
        meeting()
        self.stop()

    def stop(self) -> None:
        """Ends the pulse; does not return where another thread has begun to end the process."""
        self._stopped.set()
        self._judge.join()

    def explain(self, text: str) -> tuple[str, bool]:
        """Why this rank lost a connection, which says `text`; and whether another rank tells it.

        Names the ranks that are not heard of any more, where there are some, for which it waits a moment.
        """
        self._telling.acquire()
        try:
            lost = self._silent()
            return self._post(self._named(lost, _MISSED * BEAT_S) if lost else text)
        except (RuntimeError, OSError) as error:
            return self._without_board(str(error).splitlines()[0]), False

    def tell(self, text: str) -> bool:
        """Tells all ranks why this one ends, so that they end too; does another one tell already?"""
        self._telling.acquire()
        try:
            return self._post(text)[1]
        except (RuntimeError, OSError):
            return False

    def close(self) -> None:
        """For the end of a rank that failed: the others have read why, or are lost, when it returns."""
        if not self._cut_off:
            with contextlib.suppress(RuntimeError, OSError):
                self._board.close(self._world_size - 1)

    def _ask(self) -> None:
        """Shows that this rank lives, and asks for what the others show."""
        count, following = 1, [(self._rank + 1) % self._world_size]
        while not self._stopped.wait(BEAT_S):
            count += 1
            try:
                self._board.count(self._rank, count)
                self._notice = self._board.posted()
                self._following = self._board.counts(following)[0]
            except (RuntimeError, OSError) as error:
                if not self._stopped.is_set() and not self._leaving and self._telling.acquire(blocking=False):
                    self._end(self._without_board(str(error).splitlines()[0]), False)
                return
            self._answered = time.monotonic()

    def _watch(self) -> None:
        """Ends the process when a rank, or the board, has not been heard of for too long."""
        following = (self._rank + 1) % self._world_size
        latest, heard, awake = 0, time.monotonic(), time.monotonic()
        while not self._stopped.wait(BEAT_S):
            now = time.monotonic()
            if now - awake > _MISSED * BEAT_S:  # it was this process that stood still
                heard = self._answered = now
            awake = now
            if self._following != latest:
                latest, heard = self._following, now
            silence, unanswered = now - heard, now - self._answered
            if unanswered > self._limit_s and not self._leaving:
                self._end(self._without_board(f"no answer for {unanswered:.1f} s"), False)
            if self._notice and self._telling.acquire(blocking=False):
                self._end(self._notice.partition(" ")[2], True)
            if silence > self._limit_s and unanswered < _MISSED * BEAT_S and self._telling.acquire(blocking=False):
                self._end(*self._post(self._named(self._silent() or [following], silence)))

    def _silent(self) -> list[int]:
        """The other ranks that are not heard of for a moment."""
        ranks = range(self._world_size)
        before = self._board.counts(ranks)
        time.sleep(_MISSED * BEAT_S)
        after = self._board.counts(ranks)
        return [rank for rank in ranks if before[rank] == after[rank] and rank != self._rank]

    def _post(self, text: str) -> tuple[str, bool]:
        """The text of the notice that hangs on the board now, and whether it is another rank's."""
        rank, _, first = self._board.post(f"{self._rank} {text}").partition(" ")
        return first, int(rank) != self._rank

    def _without_board(self, why: str) -> str:
        self._cut_off = True
        return f"rank {self._rank} has lost {self._board.where}: {why}"

    def _named(self, ranks: Sequence[int], seconds: float) -> str:
        places = [f"{rank} (replica {rank // self._shards}, shard {rank % self._shards})" for rank in ranks]
        who = f"rank {places[0]} has" if len(places) == 1 else f"ranks {', '.join(places)} have"
        return f"{who} not been heard of for {seconds:.1f} s: ended, stopped or cut off; go on with --resume"


def limit(silence_s: float, message_bytes: float, rate_bits_per_s: float) -> float:
    """Seconds until a rank counts as lost: `silence_s`, and what its largest message takes at the lowest rate.

    While a message fills a slow line, signs of life wait behind it.

    >>> limit(15, 1_000_000, 10e6)
    15.8
    """
    return silence_s + 8 * message_bytes / rate_bits_per_s
