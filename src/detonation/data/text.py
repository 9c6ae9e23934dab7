"""Text in blocks of ids (bytes or tokens). The text is loaded at once, or read as a stream."""

import hashlib
import logging
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
"""Number of ids in each piece when text is split into training and held-out pieces."""
HELD_OUT = 200
"""Number of documents of a stream that are held out for validation."""
_LEAST_OF_PART = 10 * HELD_OUT
"""Smallest number of rows with which a part reads its own files. The first parts lack the held-out
rows, so these rows should be a small share of a part.
"""
TEXT_SAMPLE = Path(__file__).with_name("sotu_sample.txt")
_NAMED = ["sotu-sample", "sotu"]
_log = logging.getLogger("detonation")


def text(
    source: str = "sotu-sample",
    context: int = 128,
    tokenizer: str = "",
    streaming: bool = False,
    split: str | None = None,
    column: str | None = None,
    label: str | None = None,
) -> Data:
    """Loads text in blocks of `context` ids; 10 % of the text is held out for validation.

    If a `label` is given, each text is one example, and the model classifies the text.

    Args:
        source: `sotu-sample` (shipped: 24 State of the Union speeches, 1 MB), `sotu` (all 233, 10.8
            MB), a file (`.txt`, `.md`, `.jsonl`, `.csv`, `.parquet`), a directory of such files, a
            directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        context: Ids per example, at least 2; the model predicts `context - 1` of them.
        tokenizer: A directory or an id of the hub; bytes by default.
        streaming: Read documents when they are needed, in the order of the source; each rank reads
            different documents. The first 200 documents are held out. Use it for texts that do not
            fit in memory. The source must have rows; each line of a `.txt` file is a row.
        split: Only with `hf:` and `save_to_disk`; "train" by default.
        column: Column of the text, for sources with rows; "text" by default.
        label: Column of the labels. The source `sotu-speakers` has passages of `sotu`, whose labels
            are the presidents.

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
                "data.streaming is true, but texts with labels cannot be streamed: set it to false"
            )
        return labels.labelled(source, context, tokenizer, split, column, label)
    sizes = {"vocab": vocabulary(tokenizer)}
    if streaming:
        stream, first, files = _streamed(source, context, tokenizer, split, column)
        return Data(_label(source), source, "text", stream, first, sizes, files=files)
    ids = all_ids(_read(source, split, column), tokenizer)
    unit = "bytes"
    if tokenizer:
        unit = "tokens"
    least = 10 * context
    if len(ids) < least:
        raise ValueError(
            f"{source} has {len(ids)} {unit}; context {context} needs at least {least}: reduce the"
            " context"
        )
    train, held_out = hold_out(ids)
    if len(held_out) < context:
        raise ValueError(
            f"{source} has {len(held_out)} {unit} to hold out: context is {context}, must be at"
            f" most {len(held_out)}"
        )
    training = TextBlocks(train, context)
    validation = TextBlocks(held_out, context)
    return Data(_label(source), source, "text", training, validation, sizes)


@final
class TextBlocks:
    """Consecutive blocks of a text, which do not overlap. An example is one block, both as input
    and as labels.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.ids = text[: len(text) // context * context].view(-1, context)  # [blocks, context]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        ids = self.ids[indices].long()  # [B, context]
        return {"input_ids": ids, "labels": ids.clone()}


def hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ids into training ids and held-out ids. Cuts the ids into pieces of at most `PIECE`
    ids, and holds out every tenth piece. The pieces do not depend on the length of the context.

    Shapes: `[ids]` -> `[train]` and `[held out]`.

    >>> train, held_out = hold_out(torch.arange(20, dtype=torch.uint8))
    >>> held_out
    tensor([18, 19], dtype=torch.uint8)
    """
    length = min(PIECE, max(1, len(text) // 10))
    end = len(text) // (10 * length) * 10 * length
    tens = text[:end].view(-1, 10, length)
    # the ids after `end` are too few for ten more pieces, so all of them are used for training
    train = torch.cat([tens[:, :9].reshape(-1), text[end:]])
    return train, tens[:, 9].reshape(-1)


def _label(source: str) -> str:
    if readers.is_hub(source):
        return readers.label(source)
    if source in _NAMED:
        return source
    return Path(source).stem


def _read(source: str, split: str | None, column: str | None) -> list[bytes]:
    if readers.is_hub(source):
        rows = readers.hub_rows(source, split or "train")
        name = readers.column_name(rows, column, ["text"])
        texts = readers.texts_in(source, rows[name], name)
        return [text.encode() for text in texts if text]
    readers.refuse(source, split=split)
    if source in _NAMED:
        readers.refuse(source, column=column)
        if source == "sotu-sample":
            return [TEXT_SAMPLE.read_bytes()]
        return [(locate(source) / "text.txt").read_bytes()]
    return readers.documents(check_source(source, [*_NAMED, labels.SPEAKERS]), column)


def _streamed(
    source: str, context: int, tokenizer: str, split: str | None, column: str | None
) -> tuple["TextStream", TextBlocks, dict[str, int]]:
    if source in _NAMED:
        raise ValueError(f"{source} is read as a whole: leave data.streaming out")
    if not readers.is_hub(source):
        readers.refuse(source, split=split)
        check_source(source, [*_NAMED, labels.SPEAKERS])
    name = column or "text"
    found, files = readers.stream(source, split or "train", name)
    encode = document_encoder(tokenizer)
    with readers.one_line(source):
        first = list(islice(found, HELD_OUT))
        file = found.shard(found.num_shards, 0)
        rows = sum(1 for _ in islice(file, _LEAST_OF_PART))
    if not first:
        raise ValueError(f"{source} holds no rows: give another source")
    if name not in first[0]:
        raise ValueError(f"{source} has no column {name}: name one of {', '.join(first[0])}")
    texts = readers.texts_in(source, (row[name] for row in first), name)
    held_out = [text.encode() for text in texts if text]
    ids = torch.tensor([token for document in held_out for token in encode(document)])
    if len(ids) < context:
        raise ValueError(
            f"the first {len(first)} rows of {source} have {len(ids)} token ids: data.context must"
            f" be at most {len(ids)}"
        )
    stream = TextStream(source, found, rows, name, encode, context, held_out)
    return stream, TextBlocks(ids, context), files


@final
class TextStream:
    """Blocks of ids from the documents in a `datasets.IterableDataset`.

    Each part reads its own files if the number of files is a multiple of the number of parts, and
    the files are not small. A warning says when a part reads its files again. Otherwise each part
    reads all files and uses one of every `parts` rows.

    Documents follow each other without padding. After the last document, reading begins again with
    the first document.

    Args:
        source: Name of the data, for errors.
        stream: Iterable over rows that `split_dataset_by_node` can split.
        rows: Number of rows in the first file, up to `_LEAST_OF_PART`.
        column: Column of the text.
        held_out: Documents to leave out, wherever they occur.
    """

    def __init__(
        self,
        source: str,
        stream: Any,
        rows: int,
        column: str,
        encode: Callable[[bytes], Sequence[int]],
        context: int,
        held_out: Collection[bytes],
    ) -> None:
        self._source = source
        self._stream = stream
        self._rows = rows
        self._column = column
        self._encode = encode
        self._context = context
        self._held_out = frozenset(map(_digest, held_out))
        self._cursors: dict[tuple[int, int], list[_Cursor]] = {}

    def draw(self, step: int, part: int, parts: int, size: int) -> dict[str, Tensor]:
        """Returns the batch of one part of a step: `size` blocks, starting with the block `step *
        size` of this part.

        Shapes: `input_ids` and `labels` `[size, context]` int64.
        """
        cursors = self._of(part, parts)
        start = step * size
        # Keep two cursors, so that reading the first step again does not lose training's position.
        # The cursor that was used last is the last item of `cursors`.
        behind = [cursor for cursor in cursors if cursor.at <= start]
        if not behind:
            behind = [self._fresh(part, parts)]
        cursor = max(behind, key=lambda cursor: cursor.at)
        cursors[:] = [*(c for c in cursors if c is not cursor), cursor][-2:]
        epoch = cursor.epoch
        with readers.one_line(self._source):
            while cursor.at < start:
                cursor.block()
            ids = torch.tensor([cursor.block() for _ in range(size)])
        if parts > 1 and epoch == 0 < cursor.epoch and self._by_files(parts):
            _log.warning(
                "%s: part %d of %d reads its own files again after %d blocks: other parts may have"
                " more blocks, so divide the documents evenly among the files",
                self._source,
                part,
                parts,
                cursor.at,
            )
        return {"input_ids": ids, "labels": ids.clone()}

    def position(self, part: int, parts: int) -> dict[str, Any]:
        """Returns the position of a part after the batch that it drew last, as JSON values."""
        return self._of(part, parts)[-1].position()

    def go_to(self, part: int, parts: int, position: dict[str, Any]) -> None:
        """Continues the part with index `part`, of `parts` parts of the source, at a saved
        `position`. Raises `ValueError` if the source has no such position.
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
        if (part, parts) not in self._cursors:
            self._cursors[part, parts] = [self._fresh(part, parts)]
        return self._cursors[part, parts]

    def _fresh(self, part: int, parts: int) -> "_Cursor":
        divide = needs("datasets.distributed", "hub").split_dataset_by_node
        if self._by_files(parts) or self._stream.num_shards % parts:
            return _Cursor(lambda: divide(self._stream, part, parts), self._ids, self._context)
        # divide rows here, because `split_dataset_by_node` would give each part its own files
        rows = self._stream.filter(lambda _, row: row % parts == part, with_indices=True)
        return _Cursor(lambda: divide(rows, 0, 1), self._ids, self._context)

    def _by_files(self, parts: int) -> bool:
        """True if each part reads its own files."""
        files, rest = divmod(self._stream.num_shards, parts)
        return not rest and (parts == 1 or files * self._rows >= _LEAST_OF_PART)

    def _ids(self, row: Any) -> Sequence[int]:
        text = readers.text_in(row[self._column], f"{self._source}, a row", self._column)
        document = text.encode()
        if not document or _digest(document) in self._held_out:
            return []
        return self._encode(document)


class _Cursor:
    """Reads the blocks (`context` ids each) of one part of the source. `at` is the number of blocks
    that were read, and `epoch` the number of times that reading began again.

    A saved position has the state of the row iterator before the current document, and the number
    of ids that were already read from this document.
    """

    def __init__(
        self, rows: Callable[[], Any], ids: Callable[[Any], Sequence[int]], context: int
    ) -> None:
        self._make = rows
        self._ids = ids
        self._context = context
        self.at = self.epoch = 0
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
        return {"at": self.at, "epoch": self.epoch, "before": self._before, "given": self._given}

    def go_to(self, position: dict[str, Any]) -> None:
        self.at = position["at"]
        self.epoch = position["epoch"]
        given = position["given"]
        before = position["before"]
        whole = all(type(number) is int and number >= 0 for number in (self.at, self.epoch, given))
        if not whole or not isinstance(before, dict | None):
            raise TypeError("the saved position has an entry of the wrong type, or below 0")
        self._open(before)
        while given and not self._document:
            self._read()
        if given > len(self._document):
            raise IndexError("the position is after the end of the document")
        self._given = given

    def _open(self, before: Any) -> None:
        """Opens the rows at the saved state `before`. If `before` is None, opens them at the first
        row.
        """
        self._rows = self._make()
        self._before = before
        self._after = before
        if before is not None:
            self._rows.load_state_dict(before)
        self._next: Iterator[Any] = iter(self._rows)
        self._fruitful = before is not None  # True as soon as this epoch has yielded a document
        self._document: Sequence[int] = []
        self._given = 0

    def _read(self) -> None:
        """Reads the next row, which may contain a document. After the last row, starts the next
        epoch.
        """
        before = self._after
        row = next(self._next, None)
        if row is None:
            if not self._fruitful:
                raise ValueError("the stream has only held-out documents: leave data.streaming out")
            self.epoch += 1
            self._open(None)
            return
        self._after = self._rows.state_dict()
        if ids := self._ids(row):
            self._fruitful = True
            self._before = before
            self._document = ids
            self._given = 0


def _digest(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=8).digest()
