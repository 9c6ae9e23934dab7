"""Membership: which replicas are left. Ranks beat in a store, and agree in it on a list of members and where they
stand.

The store is the arbiter: of several proposals for an epoch it keeps the first (`compare_set`). So a rank that cannot
reach the store takes no part, and two halves of a network never go on apart.
"""

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.core.errors import DetonationError

TICK_S = 0.05
CONFIRM_S = 0.6
"""A recovery takes about this long: shorter, and a busy machine may lose replicas that are alive."""
STARTUP_S = 120.0
"""The least limit of silence until a rank has taken its first steps: kernels are built and libraries are loaded."""
LEAVE_S = 5.0
"""A rank that was left out has this long to end by itself."""
_POLL_S = 0.005
_log = logging.getLogger("detonation")


class ReplicaLost(DetonationError, RuntimeError):
    """The others go on without this replica, or too few are left to go on."""


@dataclass(frozen=True)
class RankReport:
    """How far a rank has come.

    floor: it finished all collectives up to this number. beyond: those that it finished besides. absent: of finished
    collectives that it still holds, the numbers of the replicas without a part in them. begun: the steps that it began.
    """

    floor: int
    beyond: list[int]
    absent: dict[str, list[int]]
    begun: int

    def has(self, number: int) -> bool:
        """True if the rank finished the collective `number`."""
        return number <= self.floor or number in self.beyond


@dataclass(frozen=True)
class Agreement:
    """The members of an epoch, and how far each of their ranks had come.

    Args:
        members: Replicas, by the numbers with which they began.
        reports: By rank.
    """

    epoch: int
    members: list[int]
    reports: dict[int, RankReport] = field(default_factory=dict)

    @property
    def next_step(self) -> int:
        """The first step that no rank has begun."""
        return max((report.begun for report in self.reports.values()), default=0)


class Membership:
    """One rank's view of the replicas that are left. Collective: all ranks construct it together.

    members: replicas, by the numbers with which they began. called: a loss was noticed, so that `agree` is due.
    under_way: the first steps are over, and silence counts.

    Args:
        store: Reached by all ranks; it must outlive each of them.
        silence_s: A rank that does not beat for this long is lost.
        min_replicas: With fewer left all end.
        end: Called in another thread where this replica was left out and its main thread did not end.
        confirm_s: Once a loss was noticed, a rank that neither reports nor beats for this long is lost.
    """

    def __init__(
        self,
        store: Store,
        replica: int,
        replicas: int,
        shard: int,
        shards: int,
        silence_s: float,
        min_replicas: int,
        end: Callable[[str], object],
        confirm_s: float = CONFIRM_S,
    ) -> None:
        self.members, self.epoch, self.called = list(range(replicas)), 0, False
        self.replica, self.shard, self.shards = replica, shard, shards
        self.rank = replica * shards + shard
        self.changed = threading.Condition()
        self.noticed_at, self.under_way = 0.0, False
        self._silence_s, self._confirm_s, self._min, self._end = silence_s, confirm_s, min_replicas, end
        self.store: Store = store.clone()  # type: ignore[attr-defined]  # one connection for each thread
        self._beats: Store = store.clone()  # type: ignore[attr-defined]
        self._stopped = threading.Event()
        self._error = ""
        self._left_out_at = 0.0
        now = time.monotonic()
        self._seen = dict.fromkeys(range(replicas * shards), (b"", now))
        self._beats.set(_beat(self.rank), "0")
        self._beats.wait([_beat(rank) for rank in self._seen])
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside the store must not meet the end of the interpreter

    def call(self) -> None:
        """Notices a loss: all ranks that are left come to `agree`."""
        if not self.called:
            self.store.set(self._key("call"), "1")
            self._notice()

    def agree(self, report: RankReport) -> Agreement:
        """Waits until all ranks that are left have reported, and returns what all of them get. Collective.

        Raises `ReplicaLost` where this replica is not a member any more, or too few are.
        """
        self._require_store()
        self.call()
        self.store.set(self._key(f"report/{self.rank}"), json.dumps(asdict(report)))
        while not self.store.check([self._key("record")]):
            self._require_store()
            reported = {rank for rank in self._ranks() if self.store.check([self._key(f"report/{rank}")])}
            away = [rank for rank in self._ranks() if rank not in reported]
            lost = {rank // self.shards for rank in away if self._lost(rank, self._confirm_s) or self._has_left(rank)}
            if all(rank in reported or rank // self.shards in lost for rank in self._ranks()):
                self._propose([member for member in self.members if member not in lost])
            else:
                time.sleep(_POLL_S)
        agreement = _parse(self.epoch + 1, self.store.get(self._key("record")))
        lost_here = [member for member in self.members if member not in agreement.members]
        if self.replica not in agreement.members:
            raise ReplicaLost(self._left_out(agreement))
        with self.changed:
            self.members, self.epoch, self.called = agreement.members, agreement.epoch, False
        if len(self.members) < self._min:
            left = f"{len(self.members)} of the replicas are left, min_replicas is {self._min}"
            raise ReplicaLost(
                f"lost replica {', '.join(map(str, lost_here))} before step {agreement.next_step}: {left}"
            )
        return agreement

    def group_store(self) -> Store:
        """A store for the process group of this epoch and shard."""
        return PrefixStore(f"{self.epoch}/shard{self.shard}", self.store)

    def leave(self, limit_s: float) -> None:
        """Waits until all members leave or are lost, at most `limit_s`, and stops: the others do not wait for it."""
        deadline = time.monotonic() + limit_s
        try:
            self.store.set(_left(self.rank), "1")
            for rank in self._ranks():
                while not (self._has_left(rank) or self._lost(rank, self._confirm_s)):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_POLL_S)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stops beating; the others count this rank as lost."""
        self._stopped.set()
        self._thread.join(timeout=1.0)
        atexit.unregister(self.stop)

    def _ranks(self) -> list[int]:
        return [member * self.shards + shard for member in self.members for shard in range(self.shards)]

    def _lost(self, rank: int, limit_s: float) -> bool:
        return rank != self.rank and time.monotonic() - self._seen[rank][1] > limit_s

    def _has_left(self, rank: int) -> bool:
        return bool(self.store.check([_left(rank)]))

    def _propose(self, members: Sequence[int]) -> None:
        ranks = [member * self.shards + shard for member in members for shard in range(self.shards)]
        reports = {rank: json.loads(self.store.get(self._key(f"report/{rank}"))) for rank in ranks}
        record = json.dumps({"members": list(members), "reports": reports})
        self.store.compare_set(self._key("record"), "", record)

    def _run(self) -> None:
        count, awake = 0, time.monotonic()
        while not self._stopped.wait(TICK_S):
            count, epoch = count + 1, self.epoch
            others = [rank for rank in self._ranks() if rank != self.rank]
            try:
                self._beats.set(_beat(self.rank), str(count))
                beats = self._beats.multi_get([_beat(rank) for rank in others]) if others else []
                called = self._beats.check([self._key("call")])
                self._watch_record()
            except (RuntimeError, OSError) as error:
                self._error = f"rank {self.rank} has lost the store of the replicas: {str(error).splitlines()[0]}"
                self._notice()
                return
            now = time.monotonic()
            if now - awake > self._confirm_s / 2:  # this process itself stood still: it cannot tell who else did
                self._seen = {rank: (seen, now) for rank, (seen, _) in self._seen.items()}
            awake = now
            for rank, beat in zip(others, beats, strict=True):
                if beat != self._seen[rank][0]:
                    self._seen[rank] = (beat, now)
            limit_s = self._silence_s if self.under_way else max(self._silence_s, STARTUP_S)
            if not self.called and any(self._lost(rank, limit_s) for rank in others):
                self._beats.set(self._key("call"), "1")
                called = True
            with self.changed:
                if called and not self.called and epoch == self.epoch:
                    self._notice()

    def _watch_record(self) -> None:
        """Ends this process where it was left out and its main thread waits for something else."""
        if not self.called or not self._beats.check([self._key("record")]):
            return
        agreement = _parse(self.epoch + 1, self._beats.get(self._key("record")))
        if self.replica not in agreement.members:
            self._left_out_at = self._left_out_at or time.monotonic()
            if time.monotonic() - self._left_out_at > LEAVE_S:
                self._end(self._left_out(agreement))

    def _notice(self) -> None:
        with self.changed:
            self.called, self.noticed_at = True, time.monotonic()
            self.changed.notify_all()

    def _require_store(self) -> None:
        if self._error:
            raise ReplicaLost(self._error)

    def _left_out(self, agreement: Agreement) -> str:
        others = ", ".join(map(str, agreement.members))
        return (
            f"replica {self.replica} was not heard of, or lost a shard, and replicas {others} go on without it from "
            f"step {agreement.next_step}"
        )

    def _key(self, name: str) -> str:
        return f"{self.epoch + 1}/{name}"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _parse(epoch: int, text: bytes) -> Agreement:
    record: dict[str, Any] = json.loads(text)
    reports = {int(rank): RankReport(**report) for rank, report in record["reports"].items()}
    return Agreement(epoch, record["members"], reports)
