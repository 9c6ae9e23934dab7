"""Sentence pairs as bytes, with the ids of ByT5 (Xue et al., 2022, arXiv 2105.13626), or as tokens."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from detonation.data.dataset import Data
from detonation.data.download.sources import check_source, locate
from detonation.data.formats import documents as own
from detonation.data.formats import hub
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
    reverse: bool = False,
    tokenizer: str = "",
    split: str | None = None,
    column: str | None = None,
) -> Data:
    """Loads sentence pairs and holds out every tenth for validation.

    Pairs longer than the lengths are left out, not cut, because half a sentence has no translation. Padding is id 0 in
    the input and -100 in the labels.

    Args:
        source: `bible-en-es` (English and Spanish verses), a `.tsv` file of two columns, a `.jsonl` or `.parquet` file,
            a directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        source_length, target_length: Ids per example, the one for the end among them.
        reverse: Translate from the second column into the first.
        tokenizer: A directory or an id of the hub; bytes by default.
        split: Only with `hf:` and `save_to_disk`; "train" by default.
        column: Of a source of rows; "translation" by default, with values like `{language: sentence}`.

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
    parts = [TranslationPairs(part, limits, tokenizer) for part in (train, held_out)]
    if not all(map(len, parts)):
        raise ValueError(
            f"{source} has {len(train)} train and {len(held_out)} validation pairs, of which {len(parts[0])} and "
            f"{len(parts[1])} fit source_length {source_length} and target_length {target_length}: allow longer ones"
        )
    vocab = vocabulary(tokenizer) if tokenizer else TRANSLATION_VOCAB
    return Data(name, source, "translation", parts[0], parts[1], {"vocab": vocab})


@final
class TranslationPairs:
    """Sentence pairs that fit; a batch is two rectangles of ids."""

    def __init__(self, pairs: Sequence[SentencePair], lengths: tuple[int, int], tokenizer: str = "") -> None:
        self.tokenizer = tokenizer
        columns = [[pair[side] for pair in pairs] for side in (0, 1)]
        sides = _tokens(columns, tokenizer) if tokenizer else [_byte_ids(column) for column in columns]
        fit = torch.tensor(
            [all(len(ids) <= n for ids, n in zip(both, lengths, strict=True)) for both in zip(*sides, strict=True)],
            dtype=torch.bool,
        )
        kept = fit.nonzero().flatten().tolist()
        pad = load_tokenizer(tokenizer).pad_token_id or 0 if tokenizer else PAD
        self.source, self.target = (
            Sentences([ids[i] for i in kept], length, pad) for ids, length in zip(sides, lengths, strict=True)
        )

    def __len__(self) -> int:
        return len(self.source.ends)

    def text(self, ids: Sequence[int]) -> str:
        """The sentence of target `ids`, up to the id for its end; ids without a text are left out."""
        if self.tokenizer:
            made = load_tokenizer(self.tokenizer)
            end = ids.index(made.eos_token_id) if made.eos_token_id in ids else len(ids)
            return str(made.decode(ids[:end], skip_special_tokens=True))
        end = ids.index(END) if END in ids else len(ids)
        return bytes(i - OFFSET for i in ids[:end] if OFFSET <= i < OFFSET + 256).decode(errors="replace")

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

    def __init__(self, sentences: Sequence[Tensor], length: int, pad: int) -> None:
        self.flat = torch.cat([torch.zeros(0, dtype=torch.int32), *sentences])
        self.sizes = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.int64)
        self.ends = self.sizes.cumsum(0)  # [pairs]
        self.positions, self.pad = torch.arange(length), pad

    def ids(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers padded ids and a mask that is False for padding.

        Shapes: `[B]` int64 -> `[B, length]` int64 and bool.
        """
        size = self.sizes[indices].unsqueeze(1)  # [B, 1]
        places = (self.ends[indices].unsqueeze(1) - size + self.positions).clamp(max=len(self.flat) - 1)
        real = self.positions < size
        return self.flat[places].long().masked_fill(~real, self.pad), real


def _byte_ids(sentences: Sequence[bytes]) -> list[Tensor]:
    """The ids of each sentence, one per byte and one for the end."""
    if not sentences:
        return []
    ends = torch.tensor([len(sentence) + 1 for sentence in sentences], dtype=torch.int64)
    ids = torch.frombuffer(bytearray(b"\0".join([*sentences, b""])), dtype=torch.uint8).int() + OFFSET
    ids[ends.cumsum(0) - 1] = END
    return list(ids.split(ends.tolist()))  # type: ignore[no-untyped-call]


def _tokens(columns: Sequence[Sequence[bytes]], tokenizer: str) -> list[list[Tensor]]:
    """The ids of each sentence, with all that the tokenizer adds to an input and to a target."""
    made, (inputs, targets) = load_tokenizer(tokenizer), ([text.decode() for text in side] for side in columns)
    rows = made(inputs)["input_ids"], made(text_target=targets)["input_ids"]
    return [[torch.tensor(row, dtype=torch.int32) for row in side] for side in rows]


def _hold_out(pairs: Sequence[SentencePair]) -> tuple[list[SentencePair], list[SentencePair]]:
    """Splits pairs into training and held-out ones; pairs that also occur in training are not held out."""
    train = [pair for i, pair in enumerate(pairs) if i % 10 != 9]
    known = set(train)
    return train, [pair for pair in pairs[9::10] if pair not in known]


def _read(source: str, split: str | None, column: str | None) -> tuple[str, list[SentencePair]]:
    """Reads a source: its label and its pairs."""
    if hub.is_hub(source):
        rows = hub.column(hub.hub_rows(source, split or "train"), column, ["translation"])
        return hub.label(source), _stripped(source, _in_order(source, rows))
    hub.refuse(source, split=split)
    file = locate(source) / "pairs.tsv" if source in _NAMED else check_source(source, _NAMED)
    name, suffix = source if source in _NAMED else file.stem, file.suffix.lower()
    readable = f".tsv, {', '.join(sorted(own.ROWS))}"
    if file.is_dir():
        raise ValueError(f"{source} is a directory: pairs are in one file, {readable}")
    if suffix in own.ROWS:
        with own.in_file(file):
            rows = own.values_of(file, own.ROWS[suffix](file), column or "translation")
            return name, _stripped(source, _in_order(source, rows))
    hub.refuse(source, column=column)
    if suffix not in (".tsv", ""):
        raise ValueError(f"{source} cannot be read as pairs: a source is {readable}")
    with own.in_file(file), file.open(encoding="utf-8") as lines:
        return name, _stripped(source, (line.rstrip("\r\n").split("\t") for line in lines if line.strip()))


def _in_order(source: str, rows: Iterable[Any]) -> Iterator[Sequence[str]]:
    """The texts of each row in the order of the first row's languages: the keys of an object in JSON have none."""
    first: list[str] = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            yield [row]
            continue
        first = first or list(row)
        if set(row) != set(first):
            raise ValueError(f"{source}: pair {number} is in {', '.join(row)}, the first in {', '.join(first)}")
        yield [row[name] for name in first]


def _stripped(source: str, rows: Iterable[Sequence[str]]) -> list[SentencePair]:
    pairs = []
    for number, row in enumerate(rows, start=1):
        if len(row) != 2:
            raise ValueError(f"{source}: pair {number} has {len(row)} columns, not 2")
        if row[0].strip() and row[1].strip():
            pairs.append((row[0].strip().encode(), row[1].strip().encode()))
    return pairs
