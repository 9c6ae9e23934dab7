"""Sentence pairs as bytes, with the ids of ByT5 (Xue et al., 2022, arXiv 2105.13626), without a tokenizer."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from detonation.data.dataset import Data
from detonation.data.download import hub
from detonation.data.download.sources import check_source, locate

PAD, END, OFFSET = 0, 1, 3
"""Special ids, and the id of byte 0; id 2 means unknown and does not occur in bytes."""
TRANSLATION_VOCAB = 384
"""As ByT5: 259 ids in use and 125 spare."""

SentencePair = tuple[bytes, bytes]


def translation(
    source: str = "bible-en-es",
    source_length: int = 128,
    target_length: int = 128,
    reverse: bool = False,
    split: str | None = None,
    column: str | None = None,
) -> Data:
    """Loads sentence pairs and holds out every tenth for validation.

    Pairs longer than the lengths are left out, not cut, because half a sentence has no translation. Padding is id 0 in
    the input and -100 in the labels.

    Args:
        source: `bible-en-es` (English and Spanish verses), a `.tsv` file of two columns, or `hf:NAME[:CONFIG]`.
        source_length, target_length: Ids per example, one per byte and one for the end.
        reverse: Translate from the second column into the first.
        split, column: Only with `hf:`; "train" and "translation" by default, a column of `{language: sentence}`.

    Shapes: `input_ids` and `attention_mask` `[B, source_length]`, `labels` `[B, target_length]`; all int64.

    Raises:
        MissingData: The source was not fetched.
        ValueError: No pair is short enough.
    """
    name, pairs = _read(source, split, column)
    if reverse:
        pairs = [(second, first) for first, second in pairs]
    train, held_out = _hold_out(pairs)
    limits = (source_length, target_length)
    fitting = [[pair for pair in part if _fits(pair, limits)] for part in (train, held_out)]
    if not fitting[0] or not fitting[1]:
        raise ValueError(
            f"{source} has {len(train)} train and {len(held_out)} validation pairs, of which {len(fitting[0])} and "
            f"{len(fitting[1])} fit source_length {source_length} and target_length {target_length}: allow longer ones"
        )
    return Data(
        name,
        source,
        "translation",
        TranslationPairs(fitting[0], limits),
        TranslationPairs(fitting[1], limits),
        {"vocab": TRANSLATION_VOCAB},
    )


@final
class TranslationPairs:
    """Sentence pairs; a batch is two rectangles of ids."""

    def __init__(self, pairs: Sequence[SentencePair], lengths: tuple[int, int]) -> None:
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
    """Sentences concatenated in one tensor, from which a batch is gathered without a loop."""

    def __init__(self, sentences: Sequence[bytes], length: int) -> None:
        self.bytes = torch.frombuffer(bytearray(b"".join(sentences)), dtype=torch.uint8)
        self.ends = torch.tensor([len(sentence) for sentence in sentences]).cumsum(0)  # [pairs]
        self.sizes = torch.tensor([len(sentence) for sentence in sentences])
        self.positions = torch.arange(length)

    def ids(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers padded ids and a mask that is False for padding.

        Shapes: `[B]` int64 -> `[B, length]` int64 and bool.
        """
        size = self.sizes[indices].unsqueeze(1)  # [B, 1]
        places = (self.ends[indices].unsqueeze(1) - size + self.positions).clamp(max=len(self.bytes) - 1)
        ids = self.bytes[places].long() + OFFSET
        ids = ids.masked_fill(self.positions == size, END).masked_fill(self.positions > size, PAD)
        return ids, self.positions <= size


def _fits(pair: SentencePair, limits: tuple[int, int]) -> bool:
    """True where both sides fit, each with its end id."""
    return all(len(side) < limit for side, limit in zip(pair, limits, strict=True))


def _hold_out(pairs: Sequence[SentencePair]) -> tuple[list[SentencePair], list[SentencePair]]:
    """Splits pairs into training and held-out ones; pairs that also occur in training are not held out."""
    train = [pair for i, pair in enumerate(pairs) if i % 10 != 9]
    known = set(train)
    return train, [pair for pair in pairs[9::10] if pair not in known]


def _read(source: str, split: str | None, column: str | None) -> tuple[str, list[SentencePair]]:
    """Reads a source: its label and its pairs."""
    if hub.is_hub(source):
        rows = hub.column(hub.hub_rows(source, split or "train"), column, ["translation"])
        return hub.label(source), _encode(source, (list(row.values()) for row in rows))
    hub.refuse(source, split=split, column=column)
    if source == "bible-en-es":
        file, name = locate(source) / "pairs.tsv", source
    else:
        file = check_source(source, ["bible-en-es"])
        name = file.stem
    with file.open(encoding="utf-8") as lines:
        return name, _encode(source, (line.rstrip("\r\n").split("\t") for line in lines if line.strip()))


def _encode(source: str, rows: Iterable[Sequence[str]]) -> list[SentencePair]:
    pairs = []
    for number, row in enumerate(rows, start=1):
        if len(row) != 2:
            raise ValueError(f"{source}: pair {number} has {len(row)} columns, not 2")
        if row[0].strip() and row[1].strip():
            pairs.append((row[0].strip().encode(), row[1].strip().encode()))
    return pairs
