"""Sentence pairs as bytes, with the ids of ByT5 (Xue et al., 2022, arXiv 2105.13626), or as tokens."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from detonation.data import readers
from detonation.data.dataset import Data
from detonation.data.packages import check_source, locate
from detonation.data.tokens import load_tokenizer, vocabulary

PAD, END, OFFSET = 0, 1, 3
"""Special ids, and the id of byte 0; id 2 means unknown and does not occur in bytes."""
TRANSLATION_VOCAB = 384
"""As ByT5: 259 ids in use and 125 spare."""
_NAMED = ["bible-en-es"]

SentencePair = tuple[bytes, bytes]


def translation(
    source: str = "bible-en-es",
    source_length: int = 128,
    target_length: int = 128,
    tokenizer: str = "",
    split: str | None = None,
    column: str | None = None,
) -> Data:
    """Loads sentence pairs and holds out every tenth for validation.

    Pairs longer than the lengths are left out, not cut, because half a sentence has no translation.
    Padding is id 0 in the input and -100 in the labels.

    Args:
        source: `bible-en-es` (English and Spanish verses), a `.tsv` file of two columns, a `.jsonl`
            or `.parquet` file, a directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        source_length, target_length: Ids per example, the one for the end among them.
        tokenizer: A directory or an id of the hub; bytes by default.
        split: Only with `hf:` and `save_to_disk`; "train" by default.
        column: Of a source of rows; "translation" by default, with values like `{language:
            sentence}`.

    Shapes: `input_ids` and `attention_mask` `[B, source_length]`, `labels` `[B, target_length]`;
    all int64.

    Raises:
        MissingData: The source was not fetched.
        ValueError: No pair is short enough.
    """
    name, pairs = _read(source, split, column)
    train, held_out = _hold_out(pairs)
    limits = (source_length, target_length)
    parts = [TranslationPairs(part, limits, tokenizer) for part in (train, held_out)]
    if not all(map(len, parts)):
        raise ValueError(
            f"{source} has {len(train)} train and {len(held_out)} validation pairs, of which"
            f" {len(parts[0])} and {len(parts[1])} fit source_length {source_length} and"
            f" target_length {target_length}: allow longer ones"
        )
    vocab = vocabulary(tokenizer) if tokenizer else TRANSLATION_VOCAB
    return Data(name, source, "translation", parts[0], parts[1], {"vocab": vocab})


@final
class TranslationPairs:
    """Sentence pairs that fit; a batch is two rectangles of ids."""

    def __init__(
        self, pairs: Sequence[SentencePair], lengths: tuple[int, int], tokenizer: str = ""
    ) -> None:
        self._made, self._lengths = load_tokenizer(tokenizer) if tokenizer else None, lengths
        octets = ([[*(byte + OFFSET for byte in side), END] for side in pair] for pair in pairs)
        ids = _tokens(pairs, self._made) if pairs and tokenizer else octets
        fit = [
            both
            for both in ids
            if all(len(side) <= most for side, most in zip(both, lengths, strict=True))
        ]
        self._sides = [
            [torch.tensor(both[side], dtype=torch.int32) for both in fit] for side in (0, 1)
        ]

    def __len__(self) -> int:
        return len(self._sides[0])

    def text(self, ids: Sequence[int]) -> str:
        """The sentence of target `ids`, up to the id for its end; ids without a text are left out."""
        last = END if self._made is None else self._made.eos_token_id
        ids = ids[: ids.index(last)] if last in ids else ids
        if self._made is not None:
            return str(self._made.decode(ids, skip_special_tokens=True))
        return bytes(i - OFFSET for i in ids if OFFSET <= i < OFFSET + 256).decode(errors="replace")

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        pad = (self._made.pad_token_id or 0) if self._made is not None else PAD
        ids, real = self._rectangle(0, indices, pad)
        labels, _ = self._rectangle(1, indices, -100)
        return {"input_ids": ids, "attention_mask": real, "labels": labels}

    def _rectangle(self, side: int, indices: Tensor, pad: int) -> tuple[Tensor, Tensor]:
        """The sentences at `indices` of one side, filled up with `pad`, and 1 where there are ids."""
        ids = torch.full((len(indices), self._lengths[side]), pad)  # [B, length] int64
        real = torch.zeros_like(ids)
        for row, index in enumerate(indices.tolist()):
            sentence = self._sides[side][index]
            ids[row, : len(sentence)], real[row, : len(sentence)] = sentence, 1
        return ids, real


def _tokens(pairs: Sequence[SentencePair], made: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each pair, with all that the tokenizer adds to an input and to a target."""
    inputs, targets = (
        [sentence.decode() for sentence in side] for side in zip(*pairs, strict=True)
    )
    return zip(made(inputs)["input_ids"], made(text_target=targets)["input_ids"], strict=True)


def _hold_out(pairs: Sequence[SentencePair]) -> tuple[list[SentencePair], list[SentencePair]]:
    """Splits pairs into training and held-out ones; pairs that also occur in training are not held
    out."""
    train = [pair for i, pair in enumerate(pairs) if i % 10 != 9]
    known = set(train)
    return train, [pair for pair in pairs[9::10] if pair not in known]


def _read(source: str, split: str | None, column: str | None) -> tuple[str, list[SentencePair]]:
    if readers.is_hub(source):
        found = readers.column_of(
            readers.hub_rows(source, split or "train"), column, ["translation"]
        )
        return readers.label(source), _stripped(source, _in_order(source, found))
    readers.refuse(source, split=split)
    file = locate(source) / "pairs.tsv" if source in _NAMED else check_source(source, _NAMED)
    name, suffix = source if source in _NAMED else file.stem, file.suffix.lower()
    readable = f".tsv, {', '.join(sorted(readers.ROWS))}"
    if file.is_dir():
        raise ValueError(f"{source} is a directory: pairs are in one file, {readable}")
    with readers.in_file(file):
        if suffix in readers.ROWS:
            return name, _stripped(
                source, _in_order(source, readers.values_of(file, column or "translation"))
            )
        readers.refuse(source, column=column)
        if suffix not in (".tsv", ""):
            raise ValueError(f"{source} cannot be read as pairs: a source is {readable}")
        with file.open(encoding="utf-8-sig") as lines:
            return name, _stripped(
                source, (line.rstrip("\r\n").split("\t") for line in lines if line.strip())
            )


def _in_order(source: str, found: Iterable[Any]) -> Iterator[Sequence[str]]:
    """The texts of each row in the order of the first row's languages: the keys of an object in
    JSON have none."""
    first: list[str] = []
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            yield [row]
            continue
        first = first or list(row)
        if set(row) != set(first):
            raise ValueError(
                f"{source}: pair {number} is in {', '.join(row)}, the first in {', '.join(first)}"
            )
        yield [row[name] for name in first]


def _stripped(source: str, found: Iterable[Sequence[str]]) -> list[SentencePair]:
    pairs = []
    for number, row in enumerate(found, start=1):
        if len(row) != 2:
            raise ValueError(f"{source}: pair {number} has {len(row)} columns, not 2")
        if row[0].strip() and row[1].strip():
            pairs.append((row[0].strip().encode(), row[1].strip().encode()))
    return pairs
