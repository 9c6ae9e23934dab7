"""The data of a text classifier: tokenized texts, each with a label."""

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
from detonation.data.tokens import load_tokenizer, vocabulary

SPEAKERS = "sotu-speakers"
LEAST_ADDRESSES = 6
PASSAGE_WORDS = 60
"""Smallest number of words in a passage."""

LabelledText = tuple[str, str]
_Texts = list[LabelledText]


def labelled(
    source: str,
    context: int,
    tokenizer: str,
    split: str | None,
    column: str | None,
    label: str | None,
) -> Data:
    """Loads the data of a text classifier. See `text.text` for the arguments.

    Labels are numbered in alphabetical order. A batch is as wide as its longest text. In
    `sotu-speakers` the labels are the speakers with six speeches or more, and every fifth speech of
    each speaker is held out.

    Shapes: `input_ids` and `attention_mask` `[B, up to context]` int64, `labels` `[B]` int64.
    """
    if not tokenizer:
        raise ValueError(
            "data.tokenizer is '', but texts with labels need a tokenizer: set it to that of the"
            " model"
        )
    train, held_out, meant = _read(source, split, column, label)
    names = sorted({name for _, name in train})
    known = {text for text, _ in train}
    if len(names) < 2 or not held_out:
        raise ValueError(
            f"{source} has {len(train)} texts with {len(names)} labels: it needs at least 10"
            " texts and 2 labels"
        )
    held_out = [(text, name) for text, name in held_out if name in names and text not in known]
    if not held_out:
        raise ValueError(
            f"{source} has no text to hold out: each tenth text also occurs among the training"
            " texts, or no training text has its label; remove repeated texts"
        )
    made = load_tokenizer(tokenizer)
    name = source
    if readers.is_hub(source):
        name = readers.label(source)
    first = LabelledTexts(train, names, made, context)
    second = LabelledTexts(held_out, names, made, context)
    sizes = {"vocab": vocabulary(tokenizer), "classes": len(names)}
    exported = {"labels": [meant.get(number, number) for number in names]}
    return Data(name, source, "labels", first, second, sizes, exported)


@final
class LabelledTexts:
    """Texts as token ids, each with the index of its label in `names`."""

    def __init__(
        self, pairs: Sequence[LabelledText], names: Sequence[str], tokenizer: Any, context: int
    ) -> None:
        self.names = list(names)
        self._pad = tokenizer.pad_token_id or 0  # any id will do, because the mask marks padding
        made = {}
        if pairs:
            made = tokenizer([text for text, _ in pairs], truncation=True, max_length=context)
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
) -> tuple[_Texts, _Texts, dict[str, str]]:
    """Returns texts for training, held-out texts, and, if labels are numbers, their names."""
    if source == SPEAKERS:
        readers.refuse(source, split=split, column=column, label=label)
        return *_speakers(locate("sotu")), {}
    label = label or "label"
    meant: dict[str, str] = {}
    if readers.is_hub(source):
        rows = readers.hub_rows(source, split or "train")
        of_texts = readers.column_name(rows, column, ["text"])
        texts = list(readers.texts_in(source, rows[of_texts], of_texts))
        names = readers.column_of(rows, label, [])
        classes = enumerate(readers.class_names(rows, label))
        meant = {str(number): name for number, name in classes}
    else:
        readers.refuse(source, split=split)
        path = check_source(source, [SPEAKERS])
        if path.suffix.lower() not in readers.ROWS:
            raise ValueError(
                f"{path} has no column {label}: give texts with labels in a file of type"
                f" {', '.join(sorted(readers.ROWS))}"
            )
        with readers.in_file(path):
            texts = list(readers.texts_of(path, column or "text"))
            names = list(readers.values_of(path, label))
    numbered = enumerate(zip(texts, names, strict=True), start=1)
    pairs = [
        _pair(f"{source}, row {row}", text, name, label) for row, (text, name) in numbered if text
    ]
    return [pair for number, pair in enumerate(pairs) if number % 10 != 9], pairs[9::10], meant


def _pair(row: str, text: str, name: object, label: str) -> LabelledText:
    if name in (None, ""):
        raise ValueError(f"{row} has a text without a value in column {label}: add a label")
    if not isinstance(name, str | int | float):
        raise ValueError(
            f"{row} has {str(name)[:40]} in column {label}, must be one label: name another column,"
            " or give the text one label"
        )
    return text, str(name)


def _speakers(folder: Path) -> tuple[_Texts, _Texts]:
    """Returns passages for training, and held-out passages. Every fifth speech of a speaker is held
    out.
    """
    parts: tuple[_Texts, _Texts] = ([], [])
    names = (folder / "speakers.txt").read_text("utf-8").splitlines()
    texts = (folder / "text.txt").read_text("utf-8").split("\n\n")
    by_speaker: dict[str, list[str]] = {}
    for text, name in zip(texts, names, strict=True):
        by_speaker.setdefault(name, []).append(text)
    for name, own in by_speaker.items():
        if len(own) < LEAST_ADDRESSES:
            continue
        for number, text in enumerate(own):
            parts[number % 5 == 4].extend((passage, name) for passage in passages(text))
    return parts


def passages(text: str) -> Iterator[str]:
    """Yields passages of whole sentences, each with `PASSAGE_WORDS` words or more. Drops the last
    sentences if they have fewer words.
    """
    words: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) +", text.strip()):
        words += sentence.split()
        if len(words) >= PASSAGE_WORDS:
            yield " ".join(words)
            words.clear()
