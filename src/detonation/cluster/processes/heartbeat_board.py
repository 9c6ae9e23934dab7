"""The heartbeat board: a few bytes that all ranks of a world can write and read, apart from its process groups."""

import contextlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)
_BYTES = 8
_NOTHING = "-"
_READING_S = 2.0
"""How long the others may take to read the last notice; lost ranks never do."""


class HeartbeatBoard(Protocol):
    """Each rank counts on it, and the first rank that knows why the world must end posts a notice.

    Methods raise `RuntimeError` or `OSError` where the board is lost.
    """

    where: str
    """The place that must be reachable for the board to work, in words."""

    def write_count(self, rank: int, count: int) -> None:
        """Sets the count of `rank`, above 0."""
        ...

    def read_counts(self, ranks: Sequence[int]) -> list[int]:
        """The counts of `ranks`."""
        ...

    def post_notice(self, notice: str) -> str:
        """Posts `notice` unless there is one already; returns the notice on the board."""
        ...

    def read_notice(self) -> str:
        """The notice on the board; "" for none."""
        ...

    def close(self, others: int) -> None:
        """Ends the use of the board after a failure; the host of the board waits until `others` have closed it too."""
        ...


class FileBoard:
    """A board in a folder, for ranks of one machine."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._notice = folder / "notice"
        self._counts = os.open(folder / "counts", os.O_RDWR | os.O_CREAT, 0o600)

    def write_count(self, rank: int, count: int) -> None:
        os.pwrite(self._counts, count.to_bytes(_BYTES, "little"), rank * _BYTES)

    def read_counts(self, ranks: Sequence[int]) -> list[int]:
        return [int.from_bytes(os.pread(self._counts, _BYTES, rank * _BYTES), "little") for rank in ranks]

    def post_notice(self, notice: str) -> str:
        draft = self._notice.with_name(f"notice-{os.getpid()}")
        draft.write_text(notice, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            self._notice.hardlink_to(draft)  # atomic: whole or absent, and only the first succeeds
        return self.read_notice()

    def read_notice(self) -> str:
        return self._notice.read_text(encoding="utf-8") if self._notice.exists() else ""

    def close(self, others: int) -> None:
        """Does nothing: the files stay for the others to read."""


class StoreBoard:
    """A board in the store of the rendezvous, over a connection of its own.

    Whoever reaches the store can write to it. With a token, which only the ranks know, a notice of somebody else is
    ignored, and does not end the run.

    Args:
        host: the process that hosts the store, in words.
        hosted_here: this process hosts it.
        token: signs notices; "" leaves them unsigned.
    """

    def __init__(self, store: Store, rank: int, host: str, hosted_here: bool, token: str = "") -> None:
        self._hosted_here = hosted_here
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self.where = f"the store, which {host} keeps"
        self._store.compare_set(_key("notice"), "", _NOTHING)
        # drawn anew in each attempt, so that a notice of an earlier one is not signed for this one
        drawn: bytes = self._store.compare_set(_key("board"), "", secrets.token_hex(8))
        self._secret = token.encode() + drawn if token else b""
        self._ignored = False
        self.write_count(rank, 1)

    def write_count(self, rank: int, count: int) -> None:
        self._store.set(_key(rank), str(count))

    def read_counts(self, ranks: Sequence[int]) -> list[int]:
        values = self._store.multi_get([_key(rank) for rank in ranks])
        if not all(value.isdigit() for value in values):
            raise RuntimeError(f"somebody else has written the heartbeats {values}")
        return [int(value) for value in values]

    def post_notice(self, notice: str) -> str:
        found: bytes = self._store.compare_set(_key("notice"), _NOTHING, self._signed(notice))
        if not self._authentic(found.decode(errors="replace")):  # in the place of one of somebody else
            self._store.set(_key("notice"), self._signed(notice))
        return self.read_notice()

    def read_notice(self) -> str:
        found: str = self._store.multi_get([_key("notice")])[0].decode(errors="replace")
        if found == _NOTHING:
            return ""
        if self._authentic(found):
            return found.partition(" ")[2]
        if not self._ignored:
            _log.warning("a notice in %s is not of this run and does not end it: %.200r", self.where, found)
        self._ignored = True
        return ""

    def _signed(self, notice: str) -> str:
        signature = hmac.new(self._secret, notice.encode(), "sha256").hexdigest() if self._secret else "unsigned"
        return f"{signature} {notice}"

    def _authentic(self, found: str) -> bool:
        _, _, notice = found.partition(" ")
        if not notice.partition(" ")[0].isdigit():  # the rank that posts it
            return False
        return hmac.compare_digest(found.encode(), self._signed(notice).encode())

    def close(self, others: int) -> None:
        deadline = time.monotonic() + _READING_S
        closed = self._store.add(_key("closed"), 0 if self._hosted_here else 1)
        while self._hosted_here and closed < others and time.monotonic() < deadline:
            time.sleep(_READING_S / 100)
            closed = self._store.add(_key("closed"), 0)


def _key(name: object) -> str:
    return f"detonation/{name}"
