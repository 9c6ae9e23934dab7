"""Text in blocks of ids: bytes, for which any language or code needs no tokenizer, or tokens."""

from itertools import islice
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from detonation.data.dataset import Data
from detonation.data.download.sources import check_source, locate
from detonation.data.formats import documents as own
from detonation.data.formats import hub
from detonation.data.streaming import TextStream
from detonation.data.tokens import TEXT_VOCAB, all_ids, document_encoder, vocabulary

PIECE = 8192
"""Ids per piece of the split. Context that crosses a border of held-out and training text is negligible."""
HELD_OUT = 200
"""Documents that a stream holds out."""
TEXT_SAMPLE = Path(__file__).with_name("sotu_sample.txt")
_AT_ONCE = 1 << 20
"""Bytes whose pairs are counted at once."""
_NAMED = ["sotu-sample", "sotu", "shakespeare"]


def text(
    source: str = "sotu-sample",
    context: int = 128,
    tokenizer: str = "",
    streaming: bool = False,
    split: str | None = None,
    column: str | None = None,
) -> Data:
    """Loads text in blocks of `context` ids, and holds out 10 % of it for validation.

    Args:
        source: `sotu-sample` (shipped: 24 State of the Union speeches, 1 MB), `sotu` (all 233, 10.8 MB),
            `shakespeare` (the works, 5.1 MB), a file (`.txt`, `.md`, `.jsonl`, `.csv`, `.parquet`), a directory of such
            files, a directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        context: Ids per example, at least 2; the model predicts `context - 1` of them.
        tokenizer: A directory or an id of the hub; bytes by default.
        streaming: Read documents when they are needed instead of all at the start, each rank its own, in the order of
            the source; the first 200 are held out. For rows alone, and texts that fit into no memory.
        split: Only with `hf:` and `save_to_disk`; "train" by default.
        column: The column of the text, where a source has rows; "text" by default.

    Shapes: `input_ids` and `labels` `[B, context]` int64.

    Raises:
        MissingData: The source was not fetched.
        ValueError: The text is shorter than ten blocks, `context` is below 2, or the source cannot be read.
    """
    if context < 2:
        raise ValueError(f"context must be at least 2 ids, not {context}: one to read and one to predict")
    sizes = {"vocab": vocabulary(tokenizer)}
    if streaming:
        return Data(_label(source), source, "text", *_streamed(source, context, tokenizer, split, column), sizes)
    ids, unit = all_ids(_read(source, split, column), tokenizer), "tokens" if tokenizer else "bytes"
    if len(ids) < 10 * context:
        raise ValueError(f"{source} has {len(ids)} {unit}; context {context} needs at least {10 * context}")
    train, held_out = hold_out(ids)
    if len(held_out) < context:
        raise ValueError(f"{source} has {len(held_out)} {unit} to hold out: a context of at most that, not {context}")
    return Data(_label(source), source, "text", TextBlocks(train, context), TextBlocks(held_out, context), sizes)


@final
class TextBlocks:
    """Consecutive blocks of a text without overlap; an example is one block, as input and as labels."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.ids = text[: len(text) // context * context].view(-1, context)  # [blocks, context]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        ids = self.ids[indices].long()  # [B, context]
        return {"input_ids": ids, "labels": ids.clone()}


def hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ids into training and held-out ones: every tenth piece is held out, independent of the context.

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


def bigram_loss(data: Data) -> float | None:
    """Validation loss in nats per byte of a bigram model with add-one smoothing: a baseline for trained models.

    It makes the predictions that a model makes, so the first byte of each block does not count. None for other data
    than bytes in blocks.
    """
    train, held_out = data.train, data.validation
    if not (isinstance(train, TextBlocks) and isinstance(held_out, TextBlocks) and train.ids.dtype == torch.uint8):
        return None
    counts = _pairs(train.ids) + 1.0
    nats = (counts.sum(1, keepdim=True) / counts).log()  # [first, second]
    occurring = _pairs(held_out.ids)
    return float((occurring * nats).sum() / occurring.sum())


def _pairs(blocks: Tensor) -> Tensor:
    """Counts each pair of neighbouring bytes inside the blocks."""  # [blocks, context] -> [vocab, vocab] float64
    counts = torch.zeros(TEXT_VOCAB * TEXT_VOCAB, dtype=torch.float64)
    for part in torch.split(blocks, max(1, _AT_ONCE // blocks.shape[1])):  # a code has eight times the bytes
        codes = part[:, :-1].long() * TEXT_VOCAB + part[:, 1:].long()
        counts += torch.bincount(codes.flatten(), minlength=TEXT_VOCAB * TEXT_VOCAB)
    return counts.view(TEXT_VOCAB, TEXT_VOCAB)


def _label(source: str) -> str:
    if hub.is_hub(source):
        return hub.label(source)
    return source if source in _NAMED else Path(source).stem


def _read(source: str, split: str | None, column: str | None) -> list[bytes]:
    """The documents of a source."""
    if hub.is_hub(source):
        texts = hub.column(hub.hub_rows(source, split or "train"), column, ["text"])
        return [str(value).encode() for value in texts if value]
    hub.refuse(source, split=split)
    if source in _NAMED:
        hub.refuse(source, column=column)
        return [(TEXT_SAMPLE if source == "sotu-sample" else locate(source) / "text.txt").read_bytes()]
    return own.documents(check_source(source, _NAMED), column)


def _streamed(
    source: str, context: int, tokenizer: str, split: str | None, column: str | None
) -> tuple[TextStream, TextBlocks]:
    """The stream of a source, and what it holds out."""
    if source in _NAMED:
        raise ValueError(f"{source} is read as a whole: leave data.streaming out")
    if not hub.is_hub(source):
        hub.refuse(source, split=split)
        check_source(source, _NAMED)
    rows, encode = hub.stream(source, split or "train"), document_encoder(tokenizer)
    with hub.one_line(source):
        first = list(islice(rows, HELD_OUT))
    if not first:
        raise ValueError(f"{source} holds no rows")
    name = column or "text"
    if name not in first[0]:
        raise ValueError(f"no column {name}; there are {', '.join(first[0])}")
    held_out = [str(row[name]).encode() for row in first if row[name]]
    ids = torch.tensor([token for document in held_out for token in encode(document)])
    if len(ids) < context:
        raise ValueError(f"the first {len(first)} rows of {source} have {len(ids)} ids: a context of at most that")
    return TextStream(source, rows, name, encode, context, held_out), TextBlocks(ids, context)
