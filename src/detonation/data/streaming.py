"""Text that is read while it trains, in the order of its source: a position is exact, and can be gone to again."""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from detonation.data.download.extras import needs
from detonation.data.formats.hub import one_line


@final
class TextStream:
    """Blocks of ids of the documents in a `datasets.IterableDataset`.

    A part of the ranks reads files of its own where their number is a multiple of the parts. Otherwise it reads all
    files and takes every so many-th row. Its documents follow one another without padding; behind the last one the
    first comes again.

    Args:
        source: The name of the data, for errors.
        rows: Anything that iterates over rows, and that `split_dataset_by_node` can divide.
        column: The column of the text.
        encode: Makes ids of a document.
        context: Ids per block.
        held_out: Documents to leave out, wherever they occur.
    """

    def __init__(
        self,
        source: str,
        rows: Any,
        column: str,
        encode: Callable[[bytes], Sequence[int]],
        context: int,
        held_out: Collection[bytes],
    ) -> None:
        self._source, self._rows, self._column, self._encode, self._context = source, rows, column, encode, context
        self._held_out = frozenset(map(_digest, held_out))
        self._cursors: dict[tuple[int, int], list[_Cursor]] = {}

    def draw(self, step: int, part: int, parts: int, size: int) -> dict[str, Tensor]:
        """The batch of one part of a step: block `step * size` of the part and those behind it.

        Shapes: `input_ids` and `labels` `[size, context]` int64.
        """
        cursors, start = self._of(part, parts), step * size
        # Two are kept, the last used one at the end: a look at the first step does not lose the place of the training.
        cursor = max((c for c in cursors if c.at <= start), key=lambda c: c.at, default=None) or self._fresh(
            part, parts
        )
        cursors[:] = [*(c for c in cursors if c is not cursor), cursor][-2:]
        with one_line(self._source):
            while cursor.at < start:
                cursor.block()
            ids = torch.tensor([cursor.block() for _ in range(size)])
        return {"input_ids": ids, "labels": ids.clone()}

    def position(self, part: int, parts: int) -> dict[str, Any]:
        """The position of a part behind its last batch, in JSON values."""
        return self._of(part, parts)[-1].position()

    def go_to(self, part: int, parts: int, position: dict[str, Any]) -> None:
        """Continues a part at a position of its own. Raises `ValueError` where it is none of this source."""
        cursor = self._fresh(part, parts)
        try:
            cursor.go_to(position)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{str(position)[:60]} is no position in these data: {error!r}") from error
        self._cursors[part, parts] = [cursor]

    def _of(self, part: int, parts: int) -> "list[_Cursor]":
        """The readers of a part, one at least."""
        if (part, parts) not in self._cursors:
            self._cursors[part, parts] = [self._fresh(part, parts)]
        return self._cursors[part, parts]

    def _fresh(self, part: int, parts: int) -> "_Cursor":
        divide = needs("datasets.distributed", "hub").split_dataset_by_node
        return _Cursor(lambda: divide(self._rows, part, parts), self._ids, self._context)

    def _ids(self, row: Any) -> Sequence[int]:
        document = str(row[self._column] or "").encode()
        return [] if not document or _digest(document) in self._held_out else self._encode(document)


class _Cursor:
    """A reader of one part: `at` counts the blocks that it has given."""

    def __init__(self, rows: Callable[[], Any], ids: Callable[[Any], Sequence[int]], context: int) -> None:
        self._make, self._ids, self._context = rows, ids, context
        self.at, self._epoch = 0, 0
        self._open(None)

    def block(self) -> list[int]:
        """The next `context` ids."""
        while len(self._ahead) - self._given < self._context:
            self._read()
        block = self._ahead[self._given : self._given + self._context]
        self.at += 1
        self._give(self._context)
        return block

    def position(self) -> dict[str, Any]:
        epoch, before, _ = self._begun[0] if self._begun else (self._epoch, self._before, 0)
        return {"at": self.at, "epoch": epoch, "before": before, "given": self._given}

    def go_to(self, position: dict[str, Any]) -> None:
        self.at, self._epoch, given, before = (position[key] for key in ("at", "epoch", "given", "before"))
        if not all(type(n) is int and n >= 0 for n in (self.at, self._epoch, given)) or not isinstance(
            before, dict | None
        ):
            raise TypeError("it is of other values")
        self._open(before)
        while given and not self._begun:
            self._read()
        if given and given >= self._begun[0][2]:
            raise IndexError("it lies behind its document")
        self._give(given)

    def _open(self, before: Any) -> None:
        """Opens the rows at a state of theirs; None is their beginning."""
        self._rows, self._before = self._make(), before
        if before is not None:
            self._rows.load_state_dict(before)
        self._next: Iterator[Any] = iter(self._rows)
        self._fruitful = before is not None  # this epoch has had documents
        # The ids that are not given yet, and those before them of the same document; for each of their documents the
        # epoch, the state of the rows before it, and its length.
        self._ahead, self._given = list[int](), 0
        self._begun: deque[tuple[int, Any, int]] = deque()

    def _give(self, count: int) -> None:
        self._given += count
        while self._begun and self._given >= self._begun[0][2]:
            _, _, length = self._begun.popleft()
            del self._ahead[:length]
            self._given -= length

    def _read(self) -> None:
        """Adds the ids of the next document; behind the last one the next epoch begins."""
        before, row = self._before, next(self._next, None)
        if row is not None:
            self._before = self._rows.state_dict()
            if ids := self._ids(row):
                self._fruitful = True
                self._begun.append((self._epoch, before, len(ids)))
                self._ahead += ids
            return
        if not self._fruitful:
            raise ValueError("the stream has no documents beside those that are held out: leave data.streaming out")
        ahead, given, begun = self._ahead, self._given, self._begun
        self._open(None)
        self._ahead, self._given, self._begun, self._epoch = ahead, given, begun, self._epoch + 1


def _digest(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=8).digest()
