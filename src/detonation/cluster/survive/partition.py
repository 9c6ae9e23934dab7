"""Detects network partitions in a thread that sends no requests to the store, so that it cannot
block in a request.

Each rank of a membership has a `PartitionWatch`, which watches three things that may stop
answering. Each of them has its own time limit:

1. *The store.* A request to the store may never return if packets are dropped. A rank ends if the
   store does not answer for as long as the other ranks wait for the heartbeats of this rank. So the
   rank ends at about the time when the other ranks continue without it.
2. *The network between two replicas* that both send heartbeats. A rank that makes no progress in an
   exchange tests the ports of the other ranks, on which their operating systems answer. This rank
   reports each rank whose port does not answer for `silence_s` as unreachable. All ranks apply one
   rule to the reports (`those_that_go_on`), which removes one replica of each pair without
   connection.
3. *A replica that sends heartbeats, but does not begin an exchange*. Such a replica counts as late
   after `patience_s`, and is removed.

The store keeps the first decision, so two groups of replicas never continue separately.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from detonation.cluster.processes.waiting import WAIT_LINE_S, Standing, standing_in_words
from detonation.cluster.survive.agreement import GONE, ReplicaLost, progress_of
from detonation.cluster.survive.port import knock
from detonation.core.runtime import PROGRESS

if TYPE_CHECKING:
    from detonation.cluster.survive.membership import Membership

LEAVE_S = 5.0
"""Seconds in which the main thread of a failed rank must raise its error; after this time another
thread ends the process.
"""
KNOCK_PATIENCE_S = 5.0
"""Seconds for which a rank waits for an answer on the port of another rank, also on a slow and busy
link.
"""
_TICK_S = 0.1
_AWAKE_S = 2.0
_log = logging.getLogger("detonation")


class PartitionWatch:
    """Watches, until `stop` is called, whether the store and the other replicas answer, and how
    long this rank waits in an exchange.
    """

    def __init__(self, membership: "Membership") -> None:
        self._membership = membership
        self._stopped = threading.Event()
        self._awake = self._since = self._noted = time.monotonic()
        self._waits: tuple[int, int] = (0, 0)
        self._due = WAIT_LINE_S
        self._reached: dict[int, float] = {}  # time of the last answer of each rank
        self._asking: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="partition", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the watch; waits at most 1 s for its thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    @property
    def judges(self) -> bool:
        """True while a replica has not answered for some seconds, and this rank does not know yet
        whether it can reach that replica. Until this is known, this rank must not write its report.
        """
        now = time.monotonic()
        if not self._waits[0] or now - self._since < WAIT_LINE_S:
            return False
        silences = self._silences(now).values()
        return any(KNOCK_PATIENCE_S + 1 < each < self._membership.silence_s for each in silences)

    def silent(self) -> list[int]:
        """Returns the replicas whose rank of the same shard has not answered for `silence_s`, while
        this rank waits in an exchange.
        """
        return self._replicas(self._silent_ranks(time.monotonic()))

    def ask_all(self) -> list[int]:
        """Tests whether the ranks that have this rank's shard in other replicas answer on their
        ports (see `Port`). All tests run at the same time. Skips ranks that have never answered.
        Returns the replicas whose rank does not answer now.
        """
        peers = [rank for rank in self._peers() if rank in self._reached]
        before = time.monotonic()
        threads = [
            threading.Thread(target=self._ask_patiently, args=(rank,), daemon=True)
            for rank in peers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._replicas(rank for rank in peers if self._reached[rank] < before)

    def _run(self) -> None:
        while not self._stopped.wait(_TICK_S):
            now = time.monotonic()
            # after a suspension of this process, the times without an answer begin anew
            if now - self._awake > _AWAKE_S:
                self._membership.answered = self._since = self._noted = now
            self._awake = now
            self._watch_store(now)
            self._watch_wait(now)
            self._watch_end(now)

    def _watch_store(self, now: float) -> None:
        membership = self._membership
        silent = now - membership.answered
        if membership.failure is None and silent > membership.limit_s():
            why = f"no answer for {silent:.1f} s"
            membership.fail(ReplicaLost(store_lost(membership.rank, why)))

    def _watch_end(self, now: float) -> None:
        """Ends the process if this rank has failed and its main thread has not raised the error
        within `LEAVE_S`.
        """
        membership = self._membership
        if membership.failure is None or membership.told:
            self._noted = now
        elif now - self._noted > LEAVE_S:
            self._stopped.set()
            self._end(membership.failure)

    def _end(self, failure: Exception) -> None:
        try:
            self._membership.end(failure)
        except Exception:  # the user's function `end` may raise any error
            _log.exception("the function end, called because of %r, raised an error", failure)

    def _watch_wait(self, now: float) -> None:
        membership = self._membership
        waits = (membership.waits_in, membership.epoch)
        if waits != self._waits or not membership.waits_in:
            self._waits = waits
            self._since = now
            self._due = WAIT_LINE_S
            self._ask(now, 2 * WAIT_LINE_S)
            return
        waited = now - self._since
        if waited >= self._due:
            self._due *= 2
            _log.warning("%s", self._line(waited))
        if waited >= WAIT_LINE_S:
            self._ask(now, 1.0)
            self._judge(now, waited)

    def _judge(self, now: float, waited: float) -> None:
        """Records which replicas are unreachable or late. The thread that sends heartbeats then
        makes all ranks agree on the members. If all ranks have begun the exchange and answer, but
        the exchange does not end, this rank fails.
        """
        membership = self._membership
        silent = self._silent_ranks(now)
        if silent and not membership.apart:
            names = ", ".join(f"rank {rank} at {membership.ports[rank]}" for rank in silent)
            seconds = f"{membership.silence_s:g} s"
            text = f"rank {membership.rank} has had no answer from {names} for {seconds}"
            _log.warning("%s: all replicas now agree which of them go on", text)
            membership.apart = self._replicas(silent)
        if waited < membership.patience_s or membership.apart or membership.late:
            return
        behind = self._behind()
        if behind:
            membership.late = self._replicas(behind)
            return
        end = (
            "although all ranks have come and answer: the network is too slow, or loses large"
            " packets"
        )
        membership.fail(ReplicaLost(f"{self._line(waited)}; this rank ends, {end}"))

    def _silent_ranks(self, now: float) -> list[int]:
        limit_s = self._membership.silence_s
        return [rank for rank, silence in self._silences(now).items() if silence >= limit_s]

    def _silences(self, now: float) -> dict[int, float]:
        """Returns for how many seconds each rank has not answered. Omits ranks that have never
        answered.

        The seconds count from the last answer of the other rank. But they count at the earliest
        from the time at which this rank has waited in its exchange for `WAIT_LINE_S` seconds.
        Before that time, the seconds may be negative.
        """
        asked = self._since + WAIT_LINE_S
        found = {}
        for rank in self._peers():
            if rank in self._reached:
                found[rank] = now - max(self._reached[rank], asked)
        return found

    def _ask(self, now: float, every_s: float) -> None:
        """Tests the port (see `Port`) of each rank that has not answered for `every_s` seconds.
        Each test has its own thread.
        """
        for rank in self._peers():
            name = self._membership.ports.get(rank, "")
            fresh = rank in self._reached and now - self._reached[rank] < every_s
            if not name or fresh or rank in self._asking:
                continue
            self._asking.add(rank)
            threading.Thread(target=self._ask_one, args=(rank,), daemon=True).start()

    def _ask_one(self, rank: int) -> None:
        try:
            if knock(self._membership.ports[rank], KNOCK_PATIENCE_S):
                self._reached[rank] = time.monotonic()
            else:
                # pause before the next test: a refused connection ends this test without delay
                self._stopped.wait(1.0)
        finally:
            self._asking.discard(rank)

    def _ask_patiently(self, rank: int) -> None:
        membership = self._membership
        deadline = time.monotonic() + KNOCK_PATIENCE_S
        while time.monotonic() < deadline and not self._stopped.is_set():
            # a host that refuses the connection is reachable, although its rank has ended
            if knock(membership.ports[rank], KNOCK_PATIENCE_S) or membership.has_ended(rank):
                self._reached[rank] = time.monotonic()
                return
            self._stopped.wait(0.2)

    def _peers(self) -> list[int]:
        """Returns the ranks of the other members that have the same shard as this rank, and so
        exchange with it.
        """
        membership = self._membership
        ranks = [
            member * membership.shards + membership.shard for member in list(membership.members)
        ]
        return [rank for rank in ranks if rank != membership.rank]

    def _replicas(self, ranks: Iterable[int]) -> list[int]:
        return sorted({rank // self._membership.shards for rank in ranks})

    def _behind(self) -> list[int]:
        progress = self._progress()
        mine = self._membership.waits_in
        return [rank for rank in self._peers() if rank in progress and progress[rank][0] < mine]

    def _progress(self) -> dict[int, tuple[int, Standing]]:
        """Returns two values for each rank: the number of the last exchange that the rank has
        started, and its progress in its training loop. Both are part of the rank's latest
        heartbeat.
        """
        membership = self._membership
        beats = {rank: membership.beat(rank) for rank in self._peers()}
        found = {rank: progress_of(beat) for rank, beat in beats.items() if beat != GONE}
        mine = membership.started, Standing(PROGRESS.steps, PROGRESS.where)
        return {membership.rank: mine, **found}

    def _line(self, seconds: float) -> str:
        membership = self._membership
        return who_waits_for_whom(membership.rank, membership.waits_in, self._progress(), seconds)


def store_lost(rank: int, why: str) -> str:
    """Returns the error message of `rank` after it has lost the store. why: the reason, as text."""
    remedy = "if all ranks have lost it, start the store and all replicas again, from a checkpoint"
    return f"rank {rank} has lost the store (ended or out of reach): {why}; {remedy}"


def who_waits_for_whom(
    rank: int, exchange: int, progress: Mapping[int, tuple[int, Standing]], seconds: float
) -> str:
    """Returns the line to log after `rank` has waited for `seconds` in exchange number `exchange`.

    progress: for each rank, the number of the last exchange that the rank has started, and the
    rank's progress in its training loop.

    >>> progress = {0: (40, Standing(21, "inside")), 1: (39, Standing(20)), 2: (40, Standing(21))}
    >>> who_waits_for_whom(0, 40, progress, 30)[:54]
    'rank 0 has waited for 30 s in step 21 for other ranks:'
    """
    mine = progress[rank][1]
    here = f"rank {rank} has waited for {seconds:.0f} s {mine.where_in_words} step {mine.steps}"
    behind = [
        standing_in_words(each, standing)
        for each, (started, standing) in progress.items()
        if started < exchange
    ]
    if behind:
        return f"{here} for other ranks: {', '.join(behind)}"
    return f"{here}, like all other ranks: the network between them is slow or cut off"
