"""Decides which replicas remain members of the run. Ranks send heartbeats to a store. In this store
they also agree on the members, and on the collectives that each rank has finished.

The store is the arbiter: of several proposals for an epoch it keeps the first (`compare_set`). So a
rank that cannot reach the store is excluded, and two partitions of a network never continue
separately.
"""

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from detonation.cluster.processes.refusal import Preparation
from detonation.cluster.processes.waiting import WAIT_LINE_S, Awaited, Standing
from detonation.cluster.survive.agreement import (
    EPOCH,
    GONE,
    SIZE,
    Agreement,
    RankReport,
    ReplicaLost,
    agreement_record,
    axis_key,
    beat_of,
    expected_by_all,
    has_giver,
    in_words,
    is_postponed,
    pace_of,
    parse_agreement,
    ranks_of_replicas,
)
from detonation.cluster.survive.partition import PartitionWatch, store_lost
from detonation.cluster.survive.port import Port, Ways, refuses
from detonation.core.runtime import PROGRESS

TICK_S = 0.05
CONFIRM_S = 3.0
"""Once a first loss is noticed, other ranks count as lost after this many seconds without a
heartbeat. A shorter limit would be wrong: a busy machine, or a long call under the interpreter's
lock, delays heartbeats by a second or two.
"""
STARTUP_S = 120.0
"""Until its first steps are over, a rank counts as lost only after at least this many seconds
without a heartbeat. In these steps kernels are compiled and libraries loaded, which delays
heartbeats.
"""
ARRIVE_S = 10.0
"""Seconds for which all ranks wait for a joining replica, after they have reached the step before
which it joins.
"""
REPORT_S = 60.0
"""Seconds for which all ranks wait for the report of a rank that still sends heartbeats."""
_POLL_S = 0.005
_log = logging.getLogger("detonation")


class Membership:
    """One rank's view of which replicas remain in the run. Collective: all ranks construct it
    together.

    members: the remaining replicas, by their numbers at the start of the run. called: True if this
    rank knows of a loss or another event, so that it must call `agree`. under_way: True if the
    first steps are over: a rank without heartbeats is then lost sooner. guest: the next replica
    that may join. guest_asks: True if that replica has asked to join. guest_comes: True if all
    ranks have agreed on the turn before which `guest` joins. leaves: True if this replica was asked
    to leave, and not all other ranks know this yet. waits_in: the number of the exchange for which
    the main thread waits; 0 for none. started: the last exchange that this rank has started. apart,
    late: replicas that this rank will report as unreachable or late; see `PartitionWatch`. failure:
    the error because of which this rank cannot continue. told: True if the main thread has raised
    its error: nobody ends the process then. start: the set-up of this rank.

    Args:
        store: The store that all ranks reach. It must outlive each rank.
        silence_s: A rank counts as lost after this many seconds without a heartbeat. All ranks end
            if fewer than `min_replicas` replicas remain.
        end: Called once, in another thread, with the error, if this replica cannot continue and its
            main thread did not raise the error within `LEAVE_S`.
        is_guest: This replica is no member yet: it only sends heartbeats, until `join`.
        confirm_s: After a loss, a rank that sends neither a report nor a heartbeat for this many
            seconds counts as lost, too. None means `CONFIRM_S`, or `silence_s` if that is less.
        look: Called while this rank waits for other ranks. `look` raises if waiting is useless.
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
        end: Callable[[Exception], object],
        confirm_s: float | None = None,
        is_guest: bool = False,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        if is_guest:
            self.members = [replica]
        else:
            self.members = list(range(replicas))
        self.epoch = 0
        self.is_guest = is_guest
        self.guest = replicas
        self.replica = replica
        self.shard = shard
        self.shards = shards
        self.rank = replica * shards + shard
        self.changed = threading.Condition()
        self.noticed_at = 0.0
        self.called = self.guest_asks = self.under_way = self.leaves = self.told = False
        self.guest_comes = False
        self.waits_in = self.started = 0
        self.apart: list[int] = []
        self.late: list[int] = []
        self.patience_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self.failure: Exception | None = None
        self.silence_s = silence_s
        self.least = min_replicas
        self.end = end
        if confirm_s is None:
            confirm_s = min(CONFIRM_S, silence_s)
        self._confirm_s = confirm_s
        # each thread needs its own connection to the store
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        self._beats: Store = store.clone()  # type: ignore[attr-defined]
        self.start = Preparation(self.store, replica, self.rank)
        self._stopped = threading.Event()
        self._awake = time.monotonic()
        self._seen = dict.fromkeys(self._ranks(), (b"", self._awake))
        self._port = Port(store)
        # ports of other ranks, by rank; "" for a rank whose host refused the first connection
        self.ports: dict[int, str] = {}
        self._beats.set(axis_key("port", self.rank), self._port.name)
        self.ways = Ways(self.store, self.rank)
        # seconds between two heartbeats of this rank; 1 is a guess until they are measured
        self._pace = 1.0
        self._beats.set(axis_key("beat", self.rank), beat_of(0, self._pace))
        if not is_guest:
            self.store.set(SIZE, f"{replicas} {shards}")
            self.store.set(EPOCH, "0")
        awaited = Awaited(f"rank {self.rank}", self.patience_s, look=look)
        while away := [r for r in self._seen if not self._beats.check([axis_key("beat", r)])]:
            awaited.wait(partial(list, away))
        self.answered = time.monotonic()  # time of the store's last answer
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()
        self._watch = PartitionWatch(self)
        # stop all threads before the interpreter ends: none may be in a call of the store then
        atexit.register(self.stop)

    def first_text(self, name: str, text: str) -> str:
        """Returns the same text on all ranks: the `text` of the first rank that calls the method
        with this `name`.
        """
        return str(self.store.compare_set(f"text/{name}", "", text).decode())

    def call(self) -> None:
        """Makes all remaining ranks call `agree`, because this rank has noticed a loss or another
        event.
        """
        if not self.called:
            self.store.set(self._key("call"), "1")
            self._notice()

    def call_if_left(self) -> None:
        """Makes all remaining ranks call `agree` if a rank has ended. Use this method while no
        collective is running; a running collective would fail, and so show the loss.

        Raises the error of this rank if this rank cannot continue.
        """
        self.require_store()
        if self.some_left():
            self.call()

    def some_left(self) -> bool:
        """True if a rank of a member has certainly ended."""
        return any(self._seen[rank][0] == GONE or self._has_left(rank) for rank in self._ranks())

    def agree(self, report: RankReport) -> Agreement:
        """Writes the `report` of this rank, and waits until all remaining ranks have reported.
        Returns the same agreement on all ranks. Collective.

        Raises `ReplicaLost` if this replica is no longer a member, or if too few replicas are left.
        """
        self._require()
        self.call()
        while self._watch.judges:
            time.sleep(_POLL_S)
        # more replicas may be unreachable now than when this rank called all ranks to agree
        apart = sorted({*self.apart, *self._watch.silent()})
        report = replace(report, apart=apart, late=self.late)
        self.store.set(self._key(f"report/{self.rank}"), json.dumps(asdict(report)))
        wanted = self._ranks(report.guest)
        began = time.monotonic()
        while not self.store.check([self._key("record")]):
            self._require()
            if not self._propose_if_all_came(wanted, report.guest, began):
                time.sleep(_POLL_S)
        agreement = parse_agreement(self.epoch + 1, self.store.get(self._key("record")))
        if self.replica not in agreement.members:
            raise ReplicaLost(agreement.leaves_out(self.replica))
        for pair in agreement.apart:
            _log.warning("replicas %d and %d cannot reach each other", *pair)
        self._adopt(agreement)
        return agreement

    def _propose_if_all_came(self, wanted: Sequence[int], guest: int, began: float) -> bool:
        """Proposes a record of the agreement if each rank in `wanted` has reported or is lost.
        Returns True if it has proposed a record.
        """
        away = [rank for rank in wanted if not self.store.check([self._key(f"report/{rank}")])]
        lost = self._lost_replicas(away, guest, began)
        if any(rank // self.shards not in lost for rank in away):
            return False
        members = [member for member in self.members if member not in lost]
        self._propose(members, {guest} - lost)
        return True

    def _lost_replicas(self, away: Sequence[int], guest: int, began: float) -> set[int]:
        """Returns the replicas that are lost or too late, among the replicas of the ranks `away`,
        which have not reported.
        """
        gone = [rank for rank in away if self._is_silent(rank) or self._has_left(rank)]
        lost = {rank // self.shards for rank in gone}
        missing = {rank // self.shards for rank in away}
        waited_s = time.monotonic() - began
        if waited_s > ARRIVE_S:
            lost |= missing & {guest}
        if waited_s > REPORT_S:
            lost |= missing
        return lost

    def _adopt(self, agreement: Agreement) -> None:
        """Uses the members of `agreement` from now on, and starts its epoch. Raises `ReplicaLost`
        if too few replicas remain.
        """
        missing = [member for member in self.members if member not in agreement.members]
        with self.changed:
            self.members = agreement.members
            self.epoch = agreement.epoch
            self.called = False
            self.apart = []
            self.late = []
            for rank in self._ranks(agreement.guest):
                self._seen.setdefault(rank, (b"", time.monotonic()))
            self.guest_comes |= agreement.guest >= 0
            if agreement.awaited >= 0:
                self.guest_comes = False
                if not agreement.postponed:
                    self.guest = agreement.awaited + 1
                    self.guest_asks = False
        self.store.set(EPOCH, str(self.epoch))
        if len(self.members) < self.least:
            lost = f"lost {in_words(missing)} after step {agreement.next_step}"
            left = f"{len(self.members)} replicas are left, but min_replicas is {self.least}"
            raise ReplicaLost(f"{lost}: {left}")

    def breaks_up(self) -> bool:
        """True if a member is lost, so that all ranks must agree on the members again."""
        return any(self._is_silent(rank) for rank in self._ranks())

    def await_end(self, deadline: float, is_over: Callable[[], bool]) -> None:
        """Waits until all ranks of the members have taken their last step. Stops waiting at
        `deadline` (of the monotonic clock), or when `is_over` returns True.
        """
        with suppress(DistNetworkError):  # the process that hosts the store may have ended
            self.store.set(axis_key("end", self.rank), "1")
            while time.monotonic() < deadline and not is_over():
                if self.store.check([axis_key("end", rank) for rank in self._ranks()]):
                    return
                time.sleep(_POLL_S)

    def leave(self, limit_s: float) -> None:
        """Announces that this rank has left, and stops its heartbeats after all members have left
        or are lost. Waits at most `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        if self.failure is not None:  # the other ranks do not wait for a failed rank
            self.stop()
            return
        try:
            # ignore a lost store: the process that hosts it may end once all ranks have left
            with suppress(DistNetworkError):
                self.store.set(axis_key("left", self.rank), "1")
                for rank in self._ranks():
                    while not (self._has_left(rank) or self._is_silent(rank)):
                        if time.monotonic() >= deadline:
                            break
                        time.sleep(_POLL_S)
        finally:
            self.stop()

    def await_shards(self, limit_s: float) -> None:
        """Waits, at most `limit_s` seconds, until all ranks of this replica are about to leave.
        Each rank hands over its unsent state separately, so some ranks are ready later.
        """
        deadline = time.monotonic() + limit_s
        ranks = ranks_of_replicas([self.replica], self.shards)
        while not self.store.check([axis_key("asked", rank) for rank in ranks]):
            self.require_store()
            if any(self._is_silent(rank) for rank in ranks) or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stops the heartbeats of this rank. All other ranks then count this rank as lost."""
        self._stopped.set()
        self._thread.join(timeout=1.0)
        self._watch.stop()
        self._port.close()
        atexit.unregister(self.stop)

    def join(self, agreement: Agreement) -> None:
        """Makes this joining replica (guest) a member, because `agreement` names it as a member."""
        with self.changed:
            self.members = agreement.members
            self.epoch = agreement.epoch
            self.guest = self.replica + 1
            self._seen = dict.fromkeys(self._ranks(), (b"", time.monotonic()))
            self.is_guest = False

    def _ranks(self, guest: int = -1) -> list[int]:
        """Returns the ranks of the members, and the ranks of the replica `guest` if it is not a
        member yet; -1 means no guest.
        """
        if guest < 0 or guest in self.members:
            return ranks_of_replicas(self.members, self.shards)
        return ranks_of_replicas([*self.members, guest], self.shards)

    def _lost(self, rank: int, limit_s: float) -> bool:
        beat, since = self._seen[rank]
        now = time.monotonic()
        # a process that was suspended knows only old heartbeats, so it judges no other rank
        judges = now - self._awake < max(self._confirm_s / 2, 2 * self._pace)
        limit_s = max(limit_s, 4 * self._pace, 4 * pace_of(beat))
        return rank != self.rank and (beat == GONE or (judges and now - since > limit_s))

    def _is_silent(self, rank: int) -> bool:
        """True if `rank` is lost: it has ended, or has sent no heartbeat for longer than a limit.
        The limit is `confirm_s` seconds if more than `confirm_s` seconds have passed since this
        rank noticed a loss, else `silence_s` seconds.
        """
        had_time = time.monotonic() - self.noticed_at > self._confirm_s
        if had_time:
            limit_s = self._confirm_s
        else:
            limit_s = self.silence_s
        return self._lost(rank, limit_s) or self.has_ended(rank)

    def has_ended(self, rank: int) -> bool:
        """True if `rank` missed a heartbeat, and its host refuses connections to its port, although
        the host accepted a connection before.
        """
        return self._is_late(rank) and refuses(self.ports.get(rank, ""))

    def _is_late(self, rank: int) -> bool:
        beat, since = self._seen[rank]
        return rank != self.rank and time.monotonic() - since > 2 * max(self._pace, pace_of(beat))

    def _has_left(self, rank: int) -> bool:
        return bool(self.store.check([axis_key("left", rank)]))

    def _propose(self, members: Sequence[int], awaited: Collection[int]) -> None:
        """Proposes a record of an agreement with the `members`. Each joining replica in `awaited`
        becomes a member, too, if all members wait for this replica and the replica has the training
        state.
        """
        reports = self._reports(members)
        guests = expected_by_all(awaited, reports)
        next_guest = -1
        if not guests and self.guest_asks and self._is_ready(self.store, members):
            next_guest = self.guest
        told = self._reports(guests)
        postponed = is_postponed(told)
        entrants = [*members]
        if not postponed:
            entrants += guests
            reports |= told
        record = agreement_record(entrants, self.shards, reports, next_guest, postponed)
        self.store.compare_set(self._key("record"), "", json.dumps(record))

    def _reports(self, members: Sequence[int]) -> dict[int, dict[str, Any]]:
        return {
            rank: json.loads(self.store.get(self._key(f"report/{rank}")))
            for rank in ranks_of_replicas(members, self.shards)
        }

    def _is_ready(self, store: Store, members: Collection[int]) -> bool:
        keys = [axis_key("ready", self.guest, shard) for shard in range(self.shards)]
        return store.check(keys) and has_giver([store.get(key).decode() for key in keys], members)

    def _look_for_guest(self) -> None:
        """Checks whether a replica asks to join. Once that replica has the training state, makes
        all ranks agree on the step before which that replica joins.
        """
        guest = self.guest
        ranks = ranks_of_replicas([guest], self.shards)
        if not self.guest_asks and self._beats.check([axis_key("ask", guest)]):
            with self.changed:
                self._seen |= {rank: (b"", time.monotonic()) for rank in ranks}
                # another thread may have set `self.guest` to the next replica since `check`
                self.guest_asks = guest == self.guest
        if not self.guest_asks or self.guest_comes:
            return
        if any(self._lost(rank, self.silence_s) for rank in ranks):
            with self.changed:
                if guest == self.guest:
                    self.guest = guest + 1
                    self.guest_asks = False
            return
        is_first = self.rank == self.members[0] * self.shards
        if is_first and not self.called and self._is_ready(self._beats, self.members):
            self._beats.set(self._key("call"), "1")

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(TICK_S):
            count += 1
            # after any error other ranks remove this rank, so its main thread must get the error
            try:
                self._beat(count)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.fail(ReplicaLost(store_lost(self.rank, why)))
                return

    def _beat(self, count: int) -> None:
        """Sends a heartbeat, reads the heartbeats of all ranks, and looks for lost ranks.

        Meanwhile `agree` and `join` may change the members in another thread.
        """
        with self.changed:
            epoch = self.epoch
            members = self._ranks()
            watched = self._ranks(self.guest if self.guest_asks else -1)
        call = f"{epoch + 1}/call"
        mine = axis_key("beat", self.rank)
        standing = Standing(PROGRESS.steps, PROGRESS.where)
        self._beats.set(mine, beat_of(count, self._pace, self.started, standing))
        self._port.answer()
        if self.is_guest:
            self._beats.check([mine])
            self.answered = time.monotonic()
            return
        self._knock(rank for rank in watched if rank not in self.ports)
        self._look_for_guest()
        found = self._beats.multi_get([axis_key("beat", rank) for rank in watched])
        self.answered = time.monotonic()
        called = self._beats.check([call])
        if (self.leaves or self.apart or self.late) and not called:
            self._beats.set(call, "1")
        self._watch_record()
        if refused := self.start.refused(self._beats, self._ranks(), self.under_way):
            self.fail(refused)
        self._hear(dict(zip(watched, found, strict=True)), count)
        lost = self._finds_loss(members, count)
        if lost:
            # harmless if all ranks have agreed meanwhile: no rank reads keys of an old epoch
            self._beats.set(call, "1")
        with self.changed:
            if (called or lost) and not self.called and epoch == self.epoch:
                self._notice()

    def _hear(self, beats: Mapping[int, bytes], count: int) -> None:
        """Records the heartbeats `beats` of the other ranks, and the seconds between two heartbeats
        of this rank.

        count: the number of the last heartbeat that this rank has sent.
        """
        now = time.monotonic()
        took = now - self._awake
        pace = self._pace
        if count == 1:
            self._pace = took
        else:
            self._pace = min(took, 1.2 * pace)
        with self.changed:
            # this process was suspended, so old heartbeats say nothing about the other ranks
            if took > max(self._confirm_s / 2, 3 * pace):
                self._seen = {rank: (seen, now) for rank, (seen, _) in self._seen.items()}
            self._seen |= {
                rank: (beat, now) for rank, beat in beats.items() if beat != self._seen[rank][0]
            }
            self._awake = now

    def _finds_loss(self, members: Sequence[int], count: int) -> bool:
        """True if a rank in `members` is lost, and this rank has not noticed a loss before."""
        limit_s = self.limit_s()
        with self.changed:
            if self.called:
                return False
            if any(self._lost(rank, limit_s) for rank in members):
                return True
            late = [rank for rank in members if self._is_late(rank)]
        # test one late rank per heartbeat: on a slow network each test takes long
        return bool(late) and self.has_ended(late[count % len(late)])

    def _knock(self, ranks: Iterable[int]) -> None:
        """Records the port of each of the `ranks`, if its host does not refuse a connection now. If
        the host refuses a connection later, the process of the rank has ended.
        """
        for rank in ranks:
            key = axis_key("port", rank)
            if self._beats.check([key]):
                name = self._beats.get(key).decode()
                if refuses(name):
                    name = ""
                self.ports[rank] = name

    def _watch_record(self) -> None:
        """Makes this rank fail if its replica is not a member any more."""
        # read `self.epoch` only once, because another thread may change it between two uses
        epoch = self.epoch + 1
        key = f"{epoch}/record"
        if self.failure is not None or not self.called or not self._beats.check([key]):
            return
        agreement = parse_agreement(epoch, self._beats.get(key))
        if self.replica not in agreement.members:
            self.fail(ReplicaLost(agreement.leaves_out(self.replica)))

    def _notice(self) -> None:
        with self.changed:
            self.called = True
            self.noticed_at = time.monotonic()
            self.changed.notify_all()

    def fail(self, failure: Exception) -> None:
        """Records the error because of which this rank cannot continue, and wakes its main thread.
        This method works without the store.
        """
        if self.failure is None:
            self.failure = failure
        # do not wait for ever: another thread may hold the lock while it waits for the store
        if self.changed.acquire(timeout=1.0):
            try:
                self._notice()
            finally:
                self.changed.release()

    def limit_s(self) -> float:
        """Returns a time limit in seconds. A rank counts as lost after this time without a
        heartbeat, and the store counts as lost after this time without an answer.
        """
        least = self.silence_s
        if not self.under_way:
            least = max(least, STARTUP_S)
        return max(least, 4 * self._pace)

    def beat(self, rank: int) -> bytes:
        """Returns the latest heartbeat of `rank`; empty before its first heartbeat."""
        return self._seen.get(rank, (b"", 0.0))[0]

    def awaited(self) -> Awaited:
        """Returns an `Awaited`. With it this rank waits during training for ranks that are alive,
        at most `patience_s` seconds, and logs for which ranks it waits.
        """
        return Awaited(f"rank {self.rank}", self.patience_s, WAIT_LINE_S, ends=False)

    def doubt(self) -> None:
        """Records for the next report which replicas this rank cannot reach now. Call this method
        after a process group could not be formed.
        """
        self.apart = self._watch.ask_all()

    def require_store(self) -> None:
        """Raises an error if this rank cannot continue, for example because it has lost the store.
        The main thread calls this method.
        """
        if self.failure is not None:
            self.told = True
        self._require()

    def _require(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _key(self, name: str) -> str:
        return f"{self.epoch + 1}/{name}"
