"""Sentence pairs as tokens, or as bytes with the ids of ByT5 (Xue et al., arXiv 2105.13626)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from detonation.data import readers
from detonation.data.dataset import Data
from detonation.data.packages import check_source, locate
from detonation.data.tokens import load_tokenizer, vocabulary

PAD = 0
END_OF_TEXT = 1
OFFSET = 3
"""The number of special ids, which is also the id of byte 0. Id 2 means an unknown token; bytes do
not need it.
"""
TRANSLATION_VOCAB = 384
"""Size of the vocabulary of ByT5: 259 ids are used, and 125 ids are spare."""
_NAMED = ["bible-en-es"]

SentencePair = tuple[bytes, bytes]
IdPair = tuple[Sequence[int], Sequence[int]]


def translation(
    source: str = "bible-en-es",
    source_length: int = 128,
    target_length: int = 128,
    tokenizer: str = "",
    split: str | None = None,
    column: str | None = None,
) -> Data:
    """Loads sentence pairs, and holds out every tenth pair for validation.

    Pairs that are too long are dropped instead of cut, because half a sentence has no translation.
    Padding is id 0 in the input and -100 in the labels.

    Args:
        source: `bible-en-es` (English and Spanish verses), a `.tsv` file of two columns, a `.jsonl`
            or `.parquet` file, a directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        source_length, target_length: Largest number of ids per example, including the id at the end
            of the sentence.
        tokenizer: A directory or an id of the hub; bytes by default.
        split: Only with `hf:` and `save_to_disk`; "train" by default.
        column: Column of the pairs, with values like `{language: sentence}`, for sources with rows;
            "translation" by default.

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
            f" target_length {target_length}: raise these lengths, or give more pairs"
        )
    vocab = TRANSLATION_VOCAB
    if tokenizer:
        vocab = vocabulary(tokenizer)
    return Data(name, source, "translation", parts[0], parts[1], {"vocab": vocab})


@final
class TranslationPairs:
    """Sentence pairs that fit the given lengths. A batch has two padded matrices of ids."""

    def __init__(
        self, pairs: Sequence[SentencePair], lengths: tuple[int, int], tokenizer: str = ""
    ) -> None:
        self._made: Any = None
        ids: Iterable[IdPair] = ((_ids(first), _ids(second)) for first, second in pairs)
        if tokenizer:
            self._made = load_tokenizer(tokenizer)
            if pairs:
                ids = _tokens(pairs, self._made)
        self._lengths = lengths
        self._sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for pair in ids:
            if len(pair[0]) <= lengths[0] and len(pair[1]) <= lengths[1]:
                for side, sentence in zip(self._sides, pair, strict=True):
                    side.append(torch.tensor(sentence, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self._sides[0])

    def text(self, ids: Sequence[int]) -> str:
        """Decodes the target `ids` to text, up to the end of the sentence. Ignores special ids,
        such as padding.
        """
        if self._made is not None:
            ids = _up_to(self._made.eos_token_id, ids)
            return str(self._made.decode(ids, skip_special_tokens=True))
        octets = [i - OFFSET for i in _up_to(END_OF_TEXT, ids) if OFFSET <= i < OFFSET + 256]
        return bytes(octets).decode(errors="replace")

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        pad = PAD
        if self._made is not None:
            pad = self._made.pad_token_id or 0
        ids, real = self._padded(0, indices, pad)
        labels, _ = self._padded(1, indices, -100)
        return {"input_ids": ids, "attention_mask": real, "labels": labels}

    def _padded(self, side: int, indices: Tensor, pad: int) -> tuple[Tensor, Tensor]:
        """Returns the sentences at `indices`, padded with `pad`, and a mask that is 0 at padding
        and 1 at all other ids. `side` is 0 for the input language, 1 for the target.
        """
        ids = torch.full((len(indices), self._lengths[side]), pad)  # [B, length] int64
        real = torch.zeros_like(ids)
        for row, index in enumerate(indices.tolist()):
            sentence = self._sides[side][index]
            ids[row, : len(sentence)] = sentence
            real[row, : len(sentence)] = 1
        return ids, real


def _ids(sentence: bytes) -> list[int]:
    return [*(byte + OFFSET for byte in sentence), END_OF_TEXT]


def _up_to(end: Any, ids: Sequence[int]) -> Sequence[int]:
    """Returns the `ids` before the first id that equals `end`."""
    if end in ids:
        return ids[: ids.index(end)]
    return ids


def _tokens(pairs: Sequence[SentencePair], made: Any) -> Iterable[IdPair]:
    """Yields the token ids of each pair, including the special tokens of input and target."""
    inputs = made([source.decode() for source, _ in pairs])
    targets = made(text_target=[target.decode() for _, target in pairs])
    return zip(inputs["input_ids"], targets["input_ids"], strict=True)


def _hold_out(pairs: Sequence[SentencePair]) -> tuple[list[SentencePair], list[SentencePair]]:
    """Splits pairs into training pairs and held-out pairs. Drops a held-out pair if it also occurs
    in the training pairs.
    """
    train = [pair for i, pair in enumerate(pairs) if i % 10 != 9]
    known = set(train)
    return train, [pair for pair in pairs[9::10] if pair not in known]


def _read(source: str, split: str | None, column: str | None) -> tuple[str, list[SentencePair]]:
    if readers.is_hub(source):
        rows = readers.hub_rows(source, split or "train")
        found = readers.column_of(rows, column, ["translation"])
        return readers.label(source), _stripped(source, _in_order(source, found))
    readers.refuse(source, split=split)
    if source in _NAMED:
        name = source
        file = locate(source) / "pairs.tsv"
    else:
        file = check_source(source, _NAMED)
        name = file.stem
    suffix = file.suffix.lower()
    readable = ", ".join((".tsv", *_WITH_PAIRS))
    if file.is_dir():
        raise ValueError(f"{source} is a directory: give one file of type {readable}")
    with readers.in_file(file):
        if suffix in _WITH_PAIRS:
            found = readers.values_of(file, column or "translation")
            return name, _stripped(source, _in_order(source, found))
        readers.refuse(source, column=column)
        if suffix not in (".tsv", ""):
            raise ValueError(f"{source} cannot be read as pairs: give a file of type {readable}")
        with file.open(encoding="utf-8-sig") as lines:
            cells = (line.rstrip("\r\n").split("\t") for line in lines if line.strip())
            return name, _stripped(source, cells)


_WITH_PAIRS = (".jsonl", ".parquet")
"""Suffixes of files with rows whose values can be `{language: sentence}`; a CSV has only texts."""


def _in_order(source: str, found: Iterable[Any]) -> Iterator[Sequence[str]]:
    """Yields the texts of each row in the order of languages in the first row, because keys of JSON
    objects have no fixed order.
    """
    first: list[str] = []
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{source}: pair {number} is {str(row)[:40]}, must be {{language: sentence}}; name"
                " another column, or correct the pair"
            )
        first = first or list(row)
        if set(row) != set(first):
            raise ValueError(
                f"{source}: pair {number} has the languages {', '.join(row)}, but the first pair"
                f" has {', '.join(first)}: give all pairs the same languages"
            )
        yield [readers.text_in(row[name], f"{source}: pair {number}", name) for name in first]


def _stripped(source: str, found: Iterable[Sequence[str]]) -> list[SentencePair]:
    pairs = []
    for number, row in enumerate(found, start=1):
        if len(row) != 2:
            raise ValueError(
                f"{source}: pair {number} has {len(row)} columns, not 2: give one text and its"
                " translation"
            )
        if row[0].strip() and row[1].strip():
            pairs.append((row[0].strip().encode(), row[1].strip().encode()))
    return pairs
