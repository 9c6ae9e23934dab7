"""Heartbeat: each rank shows that it is alive and watches the next rank, so that no rank waits long
for a lost rank.

A process group cannot distinguish a slow peer from a dead peer, and gloo cannot be interrupted. A
rank may wait for the whole timeout of a collective if its peer is stopped or cut off, or if a rank
that is not its neighbour dies. So a thread of each rank increments a counter on a heartbeat board,
a file or store that all ranks share. A rank counts as lost if its counter does not change for
longer than a limit. The rank that notices the loss posts a notice on the board, and all ranks end.
"""

import contextlib
import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from detonation.whole_files import opened, read_text, replaced

_log = logging.getLogger(__name__)
_BYTES = 8
_NOTHING = "-"
_READING_S = 2.0
"""Seconds in which other ranks can still read the last notice; lost ranks never read it."""


class FileBoard:
    """A heartbeat board (the counters of all ranks, and a notice) in a folder, for ranks of one
    machine.

    Each rank writes its counter to the board. The first rank that knows why all ranks must end
    posts the reason there, as a notice. The methods raise `RuntimeError` or `OSError` if the board
    is lost.

    where: name of the file or store that must be reachable, for error messages.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._notice = folder / "notice"
        self._counts = opened(folder / "counts", os.O_RDWR | os.O_CREAT, permissions=0o600)

    def write_count(self, rank: int, count: int) -> None:
        """Sets the counter of `rank` to `count`, which is above 0."""
        os.pwrite(self._counts, count.to_bytes(_BYTES, "little"), rank * _BYTES)

    def read_counts(self, ranks: Sequence[int]) -> list[int]:
        return [
            int.from_bytes(os.pread(self._counts, _BYTES, rank * _BYTES), "little")
            for rank in ranks
        ]

    def post_notice(self, notice: str) -> str:
        """Posts `notice` on this heartbeat board, unless the board has a notice already. Returns
        the notice that the board then has.
        """
        draft = self._notice.with_name(f"notice-{os.getpid()}")
        with os.fdopen(replaced(draft), "wb") as file:
            file.write(notice.encode())
        with contextlib.suppress(FileExistsError):
            # creating a hard link is atomic: only the first notice is created, and it is complete
            self._notice.hardlink_to(draft)
        return self.read_notice()

    def read_notice(self) -> str:
        """Returns the posted notice, which says why all ranks must end; "" if there is none."""
        if self._notice.exists():
            return read_text(self._notice)
        return ""

    def close(self, others: int) -> None:
        """Does nothing: the files of the heartbeat board remain, for other ranks to read."""


class StoreBoard:
    """A heartbeat board (the counters of all ranks, and a notice) in the store of the rendezvous.
    The board has its own connection to the store.

    Any process that reaches the store can write to the board. With a `token` that only the ranks
    have, the board ignores notices of other processes. `host` describes the process that hosts the
    store.
    """

    def __init__(
        self, store: Store, rank: int, host: str, hosted_here: bool, token: str = ""
    ) -> None:
        self._hosted_here = hosted_here
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self.where = f"the store, which {host} keeps"
        self._store.compare_set(_key("notice"), "", _NOTHING)
        # each start draws a new value, so that signed notices of earlier starts are invalid
        drawn: bytes = self._store.compare_set(_key("board"), "", secrets.token_hex(8))
        self._secret = b""
        if token:
            self._secret = token.encode() + drawn
        self._ignored = False
        self.write_count(rank, 1)

    def require_same_token(self, rank: int, world_size: int) -> None:
        """Raises `ValueError` on all ranks if the ranks have different tokens, because a rank
        ignores notices that were signed with another token. Collective.
        """
        self._store.set(_key(f"token/{rank}"), self._signed("token"))
        found = self._store.multi_get([_key(f"token/{each}") for each in range(world_size)])
        for other, signed in enumerate(found):
            if signed != found[0]:
                raise ValueError(
                    f"rank {other} has another DETONATION_TOKEN than rank 0, or one of these"
                    " ranks has none: give all ranks the same token"
                )

    def write_count(self, rank: int, count: int) -> None:
        self._store.set(_key(rank), str(count))

    def read_counts(self, ranks: Sequence[int]) -> list[int]:
        values = self._store.multi_get([_key(rank) for rank in ranks])
        if not all(value.isdigit() for value in values):
            raise RuntimeError(
                f"a foreign process has written the heartbeats {values}: let only the ranks reach"
                " the store"
            )
        return [int(value) for value in values]

    def post_notice(self, notice: str) -> str:
        found: bytes = self._store.compare_set(_key("notice"), _NOTHING, self._signed(notice))
        # if a foreign process has written the notice in the store, overwrite it with `notice`
        if not self._authentic(found.decode(errors="replace")):
            self._store.set(_key("notice"), self._signed(notice))
        return self.read_notice()

    def read_notice(self) -> str:
        found: str = self._store.multi_get([_key("notice")])[0].decode(errors="replace")
        if found == _NOTHING:
            return ""
        if self._authentic(found):
            return found.partition(" ")[2]
        if not self._ignored:
            _log.warning(
                "this run ignores a notice in %s, because a foreign process has written it: %.200r",
                self.where,
                found,
            )
        self._ignored = True
        return ""

    def _signed(self, notice: str) -> str:
        signature = "unsigned"
        if self._secret:
            signature = hmac.new(self._secret, notice.encode(), "sha256").hexdigest()
        return f"{signature} {notice}"

    def _authentic(self, found: str) -> bool:
        _, _, notice = found.partition(" ")
        # a valid notice begins with the number of the rank that reports it
        if not notice.partition(" ")[0].isdigit():
            return False
        return hmac.compare_digest(found.encode(), self._signed(notice).encode())

    def close(self, others: int) -> None:
        """Records in the store that this rank will not use the heartbeat board any more. On the
        machine that hosts the store, waits until the `others` other ranks have recorded the same,
        but at most `_READING_S` seconds.
        """
        deadline = time.monotonic() + _READING_S
        closed = self._store.add(_key("closed"), 1)
        while self._hosted_here and closed <= others and time.monotonic() < deadline:
            time.sleep(_READING_S / 100)
            closed = self._store.add(_key("closed"), 0)


def _key(name: object) -> str:
    return f"detonation/{name}"


BEAT_S = 0.25
STARTUP_LIMIT_S = 120.0
"""Seconds without a heartbeat after which a rank counts as lost, until the run knows the size of
its messages. The limit is long, because processes start at different speeds.
"""
_MISSED = 6
"""Number of missing heartbeats after which a rank is suspected to be lost."""


@dataclass(frozen=True)
class Reason:
    """The reason why all ranks end, and the rank that reports this reason. bad_input: True if the
    user can fix the cause.
    """

    text: str
    rank: int
    bad_input: bool = False

    @classmethod
    def parse(cls, notice: str) -> "Reason":
        """Parses a notice that `str` made of a `Reason`; the notice begins with a number."""
        rank, bad_input, text = [*notice.split(" ", 2), "", ""][:3]
        return cls(text, int(rank), bad_input == "1")

    def __str__(self) -> str:
        return f"{self.rank} {int(self.bad_input)} {self.text}"


EndProcess = Callable[[Reason], NoReturn]
"""Ends this process for a reason that this rank or another rank reports."""


class Heartbeat:
    """The heartbeat of this rank, which runs from construction until `stop`.

    If a rank is lost, another thread calls `end`, because the main thread may wait inside the
    network library.
    """

    def __init__(
        self, board: FileBoard | StoreBoard, rank: int, world_size: int, end: EndProcess
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._end = end
        self._limit_s = STARTUP_LIMIT_S
        self._shards = 1
        self._notice = ""
        self._neighbour_count = 0
        self._answered = time.monotonic()
        self._stopped = threading.Event()
        self._leaving = self._cut_off = False
        # the thread that acquires this lock ends the process and never releases the lock
        self._reporting = threading.Lock()
        self._board.write_count(rank, 1)
        # A request to the store that holds the counters may never return after a network cut.
        # So one thread sends all requests to this store, and another thread detects lost ranks.
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self._watcher = threading.Thread(target=self._watch, name="heartbeat watch", daemon=True)
        self._watcher.start()

    def set_limit(self, limit_s: float, shards: int) -> None:
        """From now on, a rank counts as lost after `limit_s` seconds without a heartbeat."""
        self._limit_s = limit_s
        self._shards = shards

    def leave(self, barrier: Callable[[], object]) -> None:
        """Calls `barrier`, in which all ranks wait for each other, and stops the heartbeat."""
        # from now on a lost store is no error: the store may end with the first rank that leaves
        self._leaving = True
        barrier()
        self.stop()

    def stop(self) -> None:
        """Stops the heartbeat.

        Does not return if another thread has begun to end the process.
        """
        self._stopped.set()
        self._watcher.join()

    def explain(self, text: str) -> Reason:
        """Finds out why this rank lost a connection, and posts the reason on the heartbeat board.
        `text` is the error of the connection.

        Waits briefly for missing heartbeats. If some ranks send none meanwhile, the reason names
        these ranks. Returns the reason that the board then has.
        """
        self._reporting.acquire()
        return self._explained(text, _MISSED * BEAT_S)

    def report(self, text: str, bad_input: bool = False) -> Reason:
        """Posts on the heartbeat board why this rank ends, so that all ranks end.

        Returns the reason that the board has after that; another rank may have posted it earlier.
        """
        self._reporting.acquire()
        own = Reason(text, self._rank, bad_input)
        try:
            return self._post(own)
        except (RuntimeError, OSError):
            return own

    def close(self) -> None:
        """Ends this rank's use of the heartbeat board after a failure.

        When this method returns, the other ranks have read the reason or are lost.
        """
        if not self._cut_off:
            with contextlib.suppress(RuntimeError, OSError):
                self._board.close(self._world_size - 1)

    def _beat(self) -> None:
        """Repeatedly increments this rank's counter. Each time also reads the counter of the next
        rank, and the notice that says why all ranks must end.
        """
        count = 1
        neighbour = [(self._rank + 1) % self._world_size]
        while not self._stopped.wait(BEAT_S):
            count += 1
            try:
                self._board.write_count(self._rank, count)
                self._notice = self._board.read_notice()
                self._neighbour_count = self._board.read_counts(neighbour)[0]
            except (RuntimeError, OSError) as error:
                if (
                    not self._stopped.is_set()
                    and not self._leaving
                    and self._reporting.acquire(blocking=False)
                ):
                    self._end(self._board_lost(str(error).splitlines()[0]))
                return
            self._answered = time.monotonic()

    def _watch(self) -> None:
        """Ends the process in three cases. First, the next rank sends no heartbeat for too long.
        Second, the heartbeat board, which holds the counters of all ranks, does not answer for too
        long. Third, a rank has posted a notice that says why all ranks must end.
        """
        neighbour = (self._rank + 1) % self._world_size
        latest = 0
        last_beat = time.monotonic()
        awake = time.monotonic()
        while not self._stopped.wait(BEAT_S):
            now = time.monotonic()
            # after a suspension of this process, its time limits begin anew
            if now - awake > _MISSED * BEAT_S:
                last_beat = self._answered = now
            awake = now
            if self._neighbour_count != latest:
                latest = self._neighbour_count
                last_beat = now
            silence = now - last_beat
            unanswered = now - self._answered
            if unanswered > self._limit_s and not self._leaving:
                self._end(self._board_lost(f"no answer for {unanswered:.1f} s"))
            if self._notice and self._reporting.acquire(blocking=False):
                self._end(Reason.parse(self._notice))
            if (
                silence > self._limit_s
                and unanswered < _MISSED * BEAT_S
                and self._reporting.acquire(blocking=False)
            ):
                self._end(self._explained(self._lost_message([neighbour], silence), silence))

    def _explained(self, text: str, silence: float) -> Reason:
        """Finds out why this rank lost a connection, and posts the reason on the heartbeat board.
        Returns the reason that the board then has.

        The calling thread must hold the lock `_reporting`.
        """
        try:
            lost = self._silent_ranks()
            if lost:
                text = self._lost_message(lost, silence)
            return self._post(Reason(text, self._rank))
        except (RuntimeError, OSError) as error:
            return self._board_lost(str(error).splitlines()[0])

    def _silent_ranks(self) -> list[int]:
        """Returns the other ranks whose counters do not change during several beats."""
        ranks = range(self._world_size)
        before = self._board.read_counts(ranks)
        time.sleep(_MISSED * BEAT_S)
        after = self._board.read_counts(ranks)
        return [rank for rank in ranks if before[rank] == after[rank] and rank != self._rank]

    def _post(self, reason: Reason) -> Reason:
        """Posts `reason` on the heartbeat board, unless the board has a reason already. Returns the
        reason that the board then has.

        A process without the token of this run (see `StoreBoard`) may overwrite the posted reason
        immediately. The board then has no valid reason, and this method returns `reason`.
        """
        notice = self._board.post_notice(str(reason))
        if not notice:
            return reason
        return Reason.parse(notice)

    def _board_lost(self, why: str) -> Reason:
        self._cut_off = True
        return Reason(f"rank {self._rank} has lost {self._board.where}: {why}", self._rank)

    def _lost_message(self, ranks: Sequence[int], seconds: float) -> str:
        names = [
            f"{rank} (replica {rank // self._shards}, shard {rank % self._shards})"
            for rank in ranks
        ]
        if len(names) == 1:
            who = f"rank {names[0]} has"
        else:
            who = f"ranks {', '.join(names)} have"
        return (
            f"{who} not been heard of for {seconds:.1f} s: ended, stopped or cut off; go on with"
            " --resume, unless a launcher restarts the run"
        )


def silence_limit_s(silence_s: float, message_bytes: float, rate_bits_per_s: float) -> float:
    """Returns the seconds without a heartbeat after which a rank counts as lost. These are
    `silence_s` plus the transfer time of a message, because on a slow link heartbeats wait behind
    messages.

    >>> silence_limit_s(15, 1_000_000, 10e6)
    15.8
    """
    return silence_s + 8 * message_bytes / rate_bits_per_s
