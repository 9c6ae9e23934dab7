"""Texts with one label each, as tokens: the data of a text classifier."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from detonation.data import readers
from detonation.data.dataset import Data
from detonation.data.packages import check_source, locate
from detonation.data.tokens import load_tokenizer

SPEAKERS = "sotu-speakers"
LEAST_ADDRESSES, PASSAGE_WORDS = 6, 60
"""Of a speaker, and of a passage."""

LabelledText = tuple[str, str]


def labelled(
    source: str,
    context: int,
    tokenizer: str,
    split: str | None,
    column: str | None,
    label: str | None,
) -> Data:
    """The data of a text classifier; the arguments are those of `text.text`, which says what they
    mean.

    Labels are numbered in alphabetical order. Batches are as wide as their longest text. Of the
    speakers of `sotu` those with six addresses or more are taken, and every fifth of their
    addresses is held out whole.

    Shapes: `input_ids` and `attention_mask` `[B, up to context]` int64, `labels` `[B]` int64.
    """
    if not tokenizer:
        raise ValueError("data.tokenizer is '', must be that of the model for texts with labels")
    train, held_out = _read(source, split, column, label)
    names, known = sorted({name for _, name in train}), {text for text, _ in train}
    held_out = [(text, name) for text, name in held_out if name in names and text not in known]
    if len(names) < 2 or not held_out:
        raise ValueError(
            f"{source} has {len(train)} texts of {len(names)} labels: at least 10 of 2 are needed"
        )
    made, name = (
        load_tokenizer(tokenizer),
        readers.label(source) if readers.is_hub(source) else source,
    )
    first, second = (LabelledTexts(part, names, made, context) for part in (train, held_out))
    return Data(name, source, "labels", first, second, {"vocab": len(made), "classes": len(names)})


@final
class LabelledTexts:
    """Texts as ids, with the number of their label among `names`."""

    def __init__(
        self, pairs: Sequence[LabelledText], names: Sequence[str], tokenizer: Any, context: int
    ) -> None:
        self.names, self._pad = list(names), tokenizer.pad_token_id or 0
        made = (
            tokenizer([text for text, _ in pairs], truncation=True, max_length=context)
            if pairs
            else {}
        )
        self._ids = [torch.tensor(ids, dtype=torch.int32) for ids in made.get("input_ids", ())]
        number = {name: i for i, name in enumerate(names)}
        self._labels = torch.tensor([number[name] for _, name in pairs], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        texts = [self._ids[i] for i in indices.tolist()]
        ids = pad_sequence(texts, batch_first=True, padding_value=self._pad).long()
        real = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).long()
        return {"input_ids": ids, "attention_mask": real, "labels": self._labels[indices]}


def _read(
    source: str, split: str | None, column: str | None, label: str | None
) -> tuple[list[LabelledText], list[LabelledText]]:
    if source == SPEAKERS:
        readers.refuse(source, split=split, column=column, label=label)
        return _speakers(locate("sotu"))
    label = label or "label"
    if readers.is_hub(source):
        rows = readers.hub_rows(source, split or "train")
        texts, names = readers.column_of(rows, column, ["text"]), readers.column_of(rows, label, [])
    else:
        readers.refuse(source, split=split)
        path = check_source(source, [SPEAKERS])
        if path.suffix.lower() not in readers.ROWS:
            raise ValueError(
                f"{path} has no column {label}: texts with labels are in"
                f" {', '.join(sorted(readers.ROWS))}"
            )
        with readers.in_file(path):
            texts, names = (
                list(readers.values_of(path, name)) for name in (column or "text", label)
            )
    pairs = [(str(text), str(name)) for text, name in zip(texts, names, strict=True) if text]
    return [pair for number, pair in enumerate(pairs) if number % 10 != 9], pairs[9::10]


def _speakers(folder: Path) -> tuple[list[LabelledText], list[LabelledText]]:
    """The passages of every fifth address of a speaker are held out, those of the others are not."""
    parts: tuple[list[LabelledText], list[LabelledText]] = [], []
    names = (folder / "speakers.txt").read_text("utf-8").splitlines()
    addresses = list(
        zip((folder / "text.txt").read_text("utf-8").split("\n\n"), names, strict=True)
    )
    for name in dict.fromkeys(names):
        texts = [text for text, speaker in addresses if speaker == name]
        for number, text in enumerate(texts if len(texts) >= LEAST_ADDRESSES else ()):
            parts[number % 5 == 4].extend((passage, name) for passage in passages(text))
    return parts


def passages(text: str) -> Iterator[str]:
    """The sentences of a text, in passages of `PASSAGE_WORDS` words or more; fewer at its end are
    left out."""
    words: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) +", text.strip()):
        words += sentence.split()
        if len(words) >= PASSAGE_WORDS:
            yield " ".join(words)
            words.clear()
