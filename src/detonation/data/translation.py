"""Pairs of sentences as bytes, with the ids of ByT5 (Xue et al., 2022, arXiv 2105.13626): no tokenizer to fetch."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from detonation.data import hub
from detonation.data.base import Data
from detonation.data.download.sources import check_source, locate

PAD, END, OFFSET = 0, 1, 3
"""Byte b is id b + 3; 2 stands for what is unknown, which bytes never are."""
VOCAB = 384
"""ByT5's: the 259 ids above, and some to spare."""

Pair = tuple[bytes, bytes]


def translation(
    source: str = "bible-en-es",
    source_length: int = 128,
    target_length: int = 128,
    reverse: bool = False,
    split: str | None = None,
    column: str | None = None,
) -> Data:
    """Sentence pairs: `input_ids`, `attention_mask` int64 [B, source_length], `labels` int64 [B, target_length].

    Every tenth pair is held out. Pairs longer than the lengths are left out, not cut: half a sentence has no
    translation. Padding is id 0 in the input and -100 in the labels.

    Args:
        source: `bible-en-es` (English and Spanish verses), a `.tsv` file of two columns, or `hf:NAME[:CONFIG]`.
        source_length, target_length: ids of an example; one byte each, and one for the end.
        reverse: translate from the second column into the first.
        split, column: only with `hf:`; "train" and "translation" by default, a column of `{language: sentence}`.

    Raises `MissingData` for a source that was not fetched, `ValueError` when no pair is short enough.
    """
    name, pairs = _read(source, split, column)
    if reverse:
        pairs = [(target, given) for given, target in pairs]
    train, held_out = _hold_out(pairs)
    limits = (source_length, target_length)
    fitting = [[pair for pair in part if _fits(pair, limits)] for part in (train, held_out)]
    if not fitting[0] or not fitting[1]:
        raise ValueError(
            f"{source} has {len(train)} train and {len(held_out)} validation pairs, of which {len(fitting[0])} and "
            f"{len(fitting[1])} fit source_length {source_length} and target_length {target_length}: allow longer ones"
        )
    return Data(name, source, "translation", Pairs(fitting[0], limits), Pairs(fitting[1], limits), {"vocab": VOCAB})


@final
class Pairs:
    """Pairs as two rectangles of ids."""

    def __init__(self, pairs: Sequence[Pair], lengths: tuple[int, int]) -> None:
        self.source, self.target = (Sentences([pair[side] for pair in pairs], lengths[side]) for side in (0, 1))

    def __len__(self) -> int:
        return len(self.source.ends)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        ids, mask = self.source.ids(indices)
        labels, real = self.target.ids(indices)
        return {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "labels": labels.masked_fill(~real, -100),
        }


@final
class Sentences:
    """Sentences end to end in one tensor; a batch is gathered from it without a loop."""

    def __init__(self, sentences: Sequence[bytes], length: int) -> None:
        self.bytes = torch.frombuffer(bytearray(b"".join(sentences)), dtype=torch.uint8)
        self.ends = torch.tensor([len(sentence) for sentence in sentences]).cumsum(0)  # [pairs]
        self.sizes = torch.tensor([len(sentence) for sentence in sentences])
        self.columns = torch.arange(length)

    def ids(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Ids int64 and whether they are real, not padding; both [B, length]."""
        size = self.sizes[indices].unsqueeze(1)  # [B, 1]
        places = (self.ends[indices].unsqueeze(1) - size + self.columns).clamp(max=len(self.bytes) - 1)
        ids = self.bytes[places].long() + OFFSET
        ids = ids.masked_fill(self.columns == size, END).masked_fill(self.columns > size, PAD)
        return ids, self.columns <= size


def _fits(pair: Pair, limits: tuple[int, int]) -> bool:
    """Whether both sides, each with its end, fit."""
    return all(len(side) < limit for side, limit in zip(pair, limits, strict=True))


def _hold_out(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Train and held-out pairs; of what was said more than once, nothing is held out."""
    train = [pair for i, pair in enumerate(pairs) if i % 10 != 9]
    known = set(train)
    return train, [pair for pair in pairs[9::10] if pair not in known]


def _read(source: str, split: str | None, column: str | None) -> tuple[str, list[Pair]]:
    """Label and pairs of `source`, bytes."""
    if hub.is_hub(source):
        rows = hub.column(hub.rows(source, split or "train"), column, ["translation"])
        return hub.label(source), _encode(source, (list(row.values()) for row in rows))
    hub.refuse(source, split=split, column=column)
    if source == "bible-en-es":
        file, name = locate(source) / "pairs.tsv", source
    else:
        file = check_source(source, ["bible-en-es"])
        name = file.stem
    with file.open(encoding="utf-8") as lines:
        return name, _encode(source, (line.rstrip("\r\n").split("\t") for line in lines if line.strip()))


def _encode(source: str, rows: Iterable[Sequence[str]]) -> list[Pair]:
    pairs = []
    for number, row in enumerate(rows, start=1):
        if len(row) != 2:
            raise ValueError(f"{source}: pair {number} has {len(row)} columns, not 2")
        if row[0].strip() and row[1].strip():
            pairs.append((row[0].strip().encode(), row[1].strip().encode()))
    return pairs
