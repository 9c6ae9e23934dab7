"""Board: a few bytes that all ranks of a world can write and read, apart from its process groups."""

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
"""How long the others may take to read the last notice; those that are lost never do."""


class Board(Protocol):
    """Each rank counts on it, and the first that knows why the world must end puts up a notice."""

    where: str
    """What must be reachable for it to work, in words."""

    def count(self, rank: int, value: int) -> None:
        """Puts the count of `rank`, above 0."""
        ...

    def counts(self, ranks: Sequence[int]) -> list[int]:
        """The counts of `ranks`."""
        ...

    def post(self, notice: str) -> str:
        """Puts `notice` up unless another hangs there; returns the one that hangs there."""
        ...

    def posted(self) -> str:
        """The notice that hangs there; "" for none."""
        ...

    def close(self, others: int) -> None:
        """For the end of a rank that failed: where it keeps the board, it waits until `others` have closed it too."""
        ...


class FileBoard:
    """A board in a folder, for ranks of one machine."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._notice = folder / "notice"
        self._counts = os.open(folder / "counts", os.O_RDWR | os.O_CREAT, 0o600)

    def count(self, rank: int, value: int) -> None:
        os.pwrite(self._counts, value.to_bytes(_BYTES, "little"), rank * _BYTES)

    def counts(self, ranks: Sequence[int]) -> list[int]:
        return [int.from_bytes(os.pread(self._counts, _BYTES, rank * _BYTES), "little") for rank in ranks]

    def post(self, notice: str) -> str:
        mine = self._notice.with_name(f"notice-{os.getpid()}")
        mine.write_text(notice, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            self._notice.hardlink_to(mine)  # whole or not at all, and only one of them
        return self.posted()

    def posted(self) -> str:
        return self._notice.read_text(encoding="utf-8") if self._notice.exists() else ""

    def close(self, others: int) -> None:
        """A file stays."""


class StoreBoard:
    """A board in the store at which the ranks met, over a connection of its own.

    keeper: who keeps the store, in words; mine: is it this process? Raises `RuntimeError` where it is lost.
    """

    def __init__(self, store: Store, rank: int, keeper: str, mine: bool) -> None:
        self._mine = mine
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self.where = f"the store, which {keeper} keeps"
        self._store.compare_set(_key("notice"), "", _NOTHING)
        self.count(rank, 1)

    def count(self, rank: int, value: int) -> None:
        self._store.set(_key(rank), str(value))

    def counts(self, ranks: Sequence[int]) -> list[int]:
        return [int(value) for value in self._store.multi_get([_key(rank) for rank in ranks])]

    def post(self, notice: str) -> str:
        self._store.compare_set(_key("notice"), _NOTHING, notice)
        return self.posted()

    def posted(self) -> str:
        notice: str = self._store.multi_get([_key("notice")])[0].decode()
        return "" if notice == _NOTHING else notice

    def close(self, others: int) -> None:
        limit = time.monotonic() + _READING_S
        closed = self._store.add(_key("closed"), 0 if self._mine else 1)
        while self._mine and closed < others and time.monotonic() < limit:
            time.sleep(_READING_S / 100)
            closed = self._store.add(_key("closed"), 0)


def _key(name: object) -> str:
    return f"detonation/{name}"
