"""Text in blocks of ids: bytes, for which any language or code needs no tokenizer, or tokens;
whole, or as a stream."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from detonation.choices import needs
from detonation.data import labels, readers
from detonation.data.dataset import Data
from detonation.data.packages import check_source, locate
from detonation.data.tokens import all_ids, document_encoder, vocabulary

PIECE = 8192
"""Ids per piece of the split.

Context that crosses a border of held-out and training text is negligible.
"""
HELD_OUT = 200
"""Documents that a stream holds out."""
TEXT_SAMPLE = Path(__file__).with_name("sotu_sample.txt")
_NAMED = ["sotu-sample", "sotu"]


def text(
    source: str = "sotu-sample",
    context: int = 128,
    tokenizer: str = "",
    streaming: bool = False,
    split: str | None = None,
    column: str | None = None,
    label: str | None = None,
) -> Data:
    """Loads text in blocks of `context` ids, and holds out 10 % of it for validation.

    With a `label` each text is an example of its own, and the model classifies it.

    Args:
        source: `sotu-sample` (shipped: 24 State of the Union speeches, 1 MB), `sotu` (all 233, 10.8
            MB), a file (`.txt`, `.md`, `.jsonl`, `.csv`, `.parquet`), a directory of such files, a
            directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        context: Ids per example, at least 2; the model predicts `context - 1` of them.
        tokenizer: A directory or an id of the hub; bytes by default.
        streaming: Read documents when they are needed instead of all at the start, each rank its
            own, in the order of the source; the first 200 are held out. For rows alone, and texts
            that fit into no memory.
        split: Only with `hf:` and `save_to_disk`; "train" by default.
        column: The column of the text, where a source has rows; "text" by default.
        label: The column of the labels. `sotu-speakers` has passages of `sotu` by president.

    Shapes: `input_ids` and `labels` `[B, context]` int64.

    Raises:
        MissingData: The source was not fetched.
        ValueError: The text is shorter than ten blocks, `context` is below 2, or the source cannot
            be read.
    """
    if context < 2:
        raise ValueError(
            f"context must be at least 2 ids, not {context}: one to read and one to predict"
        )
    if label is not None or source == labels.SPEAKERS:
        if streaming:
            raise ValueError(
                "data.streaming is true, must be false for texts with labels, which are read whole"
            )
        return labels.labelled(source, context, tokenizer, split, column, label)
    sizes = {"vocab": vocabulary(tokenizer)}
    if streaming:
        return Data(
            _label(source),
            source,
            "text",
            *_streamed(source, context, tokenizer, split, column),
            sizes,
        )
    ids, unit = all_ids(_read(source, split, column), tokenizer), "tokens" if tokenizer else "bytes"
    if len(ids) < (least := 10 * context):
        raise ValueError(
            f"{source} has {len(ids)} {unit}; context {context} needs at least {least}: take less"
        )
    train, held_out = hold_out(ids)
    if len(held_out) < context:
        raise ValueError(
            f"{source} has {len(held_out)} {unit} to hold out: a context of at most that, not"
            f" {context}"
        )
    return Data(
        _label(source),
        source,
        "text",
        TextBlocks(train, context),
        TextBlocks(held_out, context),
        sizes,
    )


@final
class TextBlocks:
    """Consecutive blocks of a text without overlap; an example is one block, as input and as
    labels."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.ids = text[: len(text) // context * context].view(-1, context)  # [blocks, context]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        ids = self.ids[indices].long()  # [B, context]
        return {"input_ids": ids, "labels": ids.clone()}


def hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ids into training and held-out ones: every tenth piece is held out, independent of the
    context.

    Shapes: `[ids]` -> `[train]` and `[held out]`.

    >>> train, held_out = hold_out(torch.arange(20, dtype=torch.uint8))
    >>> held_out
    tensor([18, 19], dtype=torch.uint8)
    """
    length = min(PIECE, max(1, len(text) // 10))
    end = len(text) // (10 * length) * 10 * length
    tens = text[:end].view(-1, 10, length)
    # The remainder is shorter than ten pieces and goes to training.
    return torch.cat([tens[:, :9].reshape(-1), text[end:]]), tens[:, 9].reshape(-1)


def _label(source: str) -> str:
    if readers.is_hub(source):
        return readers.label(source)
    return source if source in _NAMED else Path(source).stem


def _read(source: str, split: str | None, column: str | None) -> list[bytes]:
    if readers.is_hub(source):
        texts = readers.column_of(readers.hub_rows(source, split or "train"), column, ["text"])
        return [str(value).encode() for value in texts if value]
    readers.refuse(source, split=split)
    if source in _NAMED:
        readers.refuse(source, column=column)
        return [
            (TEXT_SAMPLE if source == "sotu-sample" else locate(source) / "text.txt").read_bytes()
        ]
    return readers.documents(check_source(source, [*_NAMED, labels.SPEAKERS]), column)


def _streamed(
    source: str, context: int, tokenizer: str, split: str | None, column: str | None
) -> tuple["TextStream", TextBlocks]:
    if source in _NAMED:
        raise ValueError(f"{source} is read as a whole: leave data.streaming out")
    if not readers.is_hub(source):
        readers.refuse(source, split=split)
        check_source(source, [*_NAMED, labels.SPEAKERS])
    found, encode, name = (
        readers.stream(source, split or "train"),
        document_encoder(tokenizer),
        column or "text",
    )
    with readers.one_line(source):
        first = list(islice(found, HELD_OUT))
    if not first:
        raise ValueError(f"{source} holds no rows")
    if name not in first[0]:
        raise ValueError(f"no column {name}; there are {', '.join(first[0])}")
    held_out = [str(row[name]).encode() for row in first if row[name]]
    ids = torch.tensor([token for document in held_out for token in encode(document)])
    if len(ids) < context:
        raise ValueError(
            f"the first {len(first)} rows of {source} have {len(ids)} ids: a context of at most"
            " that"
        )
    return TextStream(source, found, name, encode, context, held_out), TextBlocks(ids, context)


@final
class TextStream:
    """Blocks of ids of the documents in a `datasets.IterableDataset`.

    A part of the ranks reads files of its own where their number is a multiple of the parts.
    Otherwise it reads all files and takes every so many-th row. Documents follow one another
    without padding, and begin again after the last.

    Args:
        source: The name of the data, for errors.
        stream: Anything that iterates over rows, and that `split_dataset_by_node` can divide.
        column: The column of the text.
        held_out: Documents to leave out, wherever they occur.
    """

    def __init__(
        self,
        source: str,
        stream: Any,
        column: str,
        encode: Callable[[bytes], Sequence[int]],
        context: int,
        held_out: Collection[bytes],
    ) -> None:
        self._source, self._stream, self._column, self._encode, self._context = (
            source,
            stream,
            column,
            encode,
            context,
        )
        self._held_out = frozenset(map(_digest, held_out))
        self._cursors: dict[tuple[int, int], list[_Cursor]] = {}

    def draw(self, step: int, part: int, parts: int, size: int) -> dict[str, Tensor]:
        """The batch of one part of a step: block `step * size` of the part and those behind it.

        Shapes: `input_ids` and `labels` `[size, context]` int64.
        """
        cursors, start = self._of(part, parts), step * size
        # Two are kept, the last used one at the end: a look at the first step does not lose the
        # place of the training.
        behind = [cursor for cursor in cursors if cursor.at <= start]
        cursor = max(behind, key=lambda cursor: cursor.at) if behind else self._fresh(part, parts)
        cursors[:] = [*(c for c in cursors if c is not cursor), cursor][-2:]
        with readers.one_line(self._source):
            while cursor.at < start:
                cursor.block()
            ids = torch.tensor([cursor.block() for _ in range(size)])
        return {"input_ids": ids, "labels": ids.clone()}

    def position(self, part: int, parts: int) -> dict[str, Any]:
        """The position of a part behind its last batch, in JSON values."""
        return self._of(part, parts)[-1].position()

    def go_to(self, part: int, parts: int, position: dict[str, Any]) -> None:
        """Continues a part at a position of its own.

        Raises `ValueError` where it is none of this source.
        """
        cursor = self._fresh(part, parts)
        try:
            cursor.go_to(position)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{str(position)[:60]} is no position in these data: {error!r}"
            ) from error
        self._cursors[part, parts] = [cursor]

    def _of(self, part: int, parts: int) -> "list[_Cursor]":
        return self._cursors.get((part, parts)) or self._cursors.setdefault(
            (part, parts), [self._fresh(part, parts)]
        )

    def _fresh(self, part: int, parts: int) -> "_Cursor":
        divide = needs("datasets.distributed", "hub").split_dataset_by_node
        return _Cursor(lambda: divide(self._stream, part, parts), self._ids, self._context)

    def _ids(self, row: Any) -> Sequence[int]:
        document = str(row[self._column] or "").encode()
        return [] if not document or _digest(document) in self._held_out else self._encode(document)


class _Cursor:
    """A reader of one part: `at` counts the blocks that it has given.

    Its place is the state of the rows before the document that it reads, and how many of its ids it
    has given.
    """

    def __init__(
        self, rows: Callable[[], Any], ids: Callable[[Any], Sequence[int]], context: int
    ) -> None:
        self._make, self._ids, self._context = rows, ids, context
        self.at = self._epoch = 0
        self._open(None)

    def block(self) -> list[int]:
        block: list[int] = []
        while len(block) < self._context:
            if self._given == len(self._document):
                self._read()
            more = self._document[self._given : self._given + self._context - len(block)]
            self._given += len(more)
            block += more
        self.at += 1
        return block

    def position(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self._epoch, "before": self._before, "given": self._given}

    def go_to(self, position: dict[str, Any]) -> None:
        self.at, self._epoch, given, before = (
            position[key] for key in ("at", "epoch", "given", "before")
        )
        whole = all(type(number) is int and number >= 0 for number in (self.at, self._epoch, given))
        if not whole or not isinstance(before, dict | None):
            raise TypeError("it is of other values")
        self._open(before)
        while given and not self._document:
            self._read()
        if given > len(self._document):
            raise IndexError("it lies behind its document")
        self._given = given

    def _open(self, before: Any) -> None:
        """Opens the rows at a state of theirs; None is their beginning."""
        self._rows, self._before, self._after = self._make(), before, before
        if before is not None:
            self._rows.load_state_dict(before)
        self._next: Iterator[Any] = iter(self._rows)
        self._fruitful = before is not None  # this epoch has had documents
        self._document: Sequence[int] = []
        self._given = 0

    def _read(self) -> None:
        """Reads on to the next document; behind the last one the next epoch begins."""
        before, row = self._after, next(self._next, None)
        if row is None:
            if not self._fruitful:
                raise ValueError(
                    "the stream has no documents besides those held out: leave data.streaming out"
                )
            self._epoch += 1
            self._open(None)
            return
        self._after = self._rows.state_dict()
        if ids := self._ids(row):
            self._fruitful, self._before, self._document, self._given = True, before, ids, 0


def _digest(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=8).digest()
