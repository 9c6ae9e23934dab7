"""The heartbeat board: a few bytes that all ranks of a world can write and read, apart from its process groups."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch.distributed.distributed_c10d import Store

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

    Args:
        host: the process that hosts the store, in words.
        hosted_here: this process hosts it.
    """

    def __init__(self, store: Store, rank: int, host: str, hosted_here: bool) -> None:
        self._hosted_here = hosted_here
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self.where = f"the store, which {host} keeps"
        self._store.compare_set(_key("notice"), "", _NOTHING)
        self.write_count(rank, 1)

    def write_count(self, rank: int, count: int) -> None:
        self._store.set(_key(rank), str(count))

    def read_counts(self, ranks: Sequence[int]) -> list[int]:
        return [int(value) for value in self._store.multi_get([_key(rank) for rank in ranks])]

    def post_notice(self, notice: str) -> str:
        self._store.compare_set(_key("notice"), _NOTHING, notice)
        return self.read_notice()

    def read_notice(self) -> str:
        notice: str = self._store.multi_get([_key("notice")])[0].decode()
        return "" if notice == _NOTHING else notice

    def close(self, others: int) -> None:
        deadline = time.monotonic() + _READING_S
        closed = self._store.add(_key("closed"), 0 if self._hosted_here else 1)
        while self._hosted_here and closed < others and time.monotonic() < deadline:
            time.sleep(_READING_S / 100)
            closed = self._store.add(_key("closed"), 0)


def _key(name: object) -> str:
    return f"detonation/{name}"
