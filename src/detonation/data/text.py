"""Text as bytes: every byte is a token, so any language or code works without a tokenizer."""

from pathlib import Path
from typing import final

import torch
from torch import Tensor

from detonation.data.dataset import Data
from detonation.data.download import hub
from detonation.data.download.sources import check_source, locate

TEXT_VOCAB = 256
PIECE = 8192
"""Bytes per piece of the split. Context that crosses a border of held-out and training text is negligible."""
TEXT_SAMPLE = Path(__file__).with_name("sotu_sample.txt")


def text(source: str = "sotu-sample", context: int = 128, split: str | None = None, column: str | None = None) -> Data:
    """Loads text in blocks of `context` bytes and holds out 10 % of the bytes for validation.

    Args:
        source: `sotu-sample` (shipped: 24 State of the Union speeches, 1 MB), `sotu` (all 233, 10.8 MB),
            `shakespeare` (the works, 5.1 MB), a text file, a directory of `*.txt`, or `hf:NAME[:CONFIG]`.
        context: Bytes per example, at least 2; the model predicts `context - 1` of them.
        split, column: Only with `hf:`; "train" and "text" by default.

    Shapes: `input_ids` and `labels` `[B, context]` int64.

    Raises:
        MissingData: The source was not fetched.
        ValueError: The text is shorter than ten blocks, or `context` is below 2.
    """
    if context < 2:
        raise ValueError(f"context must be at least 2 bytes, not {context}: one to read and one to predict")
    name, raw = _read(source, split, column)
    if len(raw) < 10 * context:
        raise ValueError(f"{source} has {len(raw)} bytes; context {context} needs at least {10 * context}")
    train, held_out = hold_out(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    if len(held_out) < context:
        raise ValueError(f"{source} has {len(held_out)} bytes to hold out: a context of at most that, not {context}")
    return Data(name, source, "text", TextBlocks(train, context), TextBlocks(held_out, context), {"vocab": TEXT_VOCAB})


@final
class TextBlocks:
    """Consecutive blocks of a text without overlap; an example is one block, as input and as labels."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.bytes = text[: len(text) // context * context].view(-1, context)  # uint8 [blocks, context]

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        ids = self.bytes[indices].long()  # [B, context]
        return {"input_ids": ids, "labels": ids.clone()}


def hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    """Splits text into training and held-out bytes: every tenth piece is held out, independent of the context.

    Shapes: `[bytes]` uint8 -> `[train]` and `[held out]` uint8.

    >>> train, held_out = hold_out(torch.arange(20, dtype=torch.uint8))
    >>> held_out
    tensor([18, 19], dtype=torch.uint8)
    """
    length = min(PIECE, max(1, len(text) // 10))
    end = len(text) // (10 * length) * 10 * length
    tens = text[:end].view(-1, 10, length)
    # The remainder is shorter than ten pieces and goes to training.
    return torch.cat([tens[:, :9].reshape(-1), text[end:]]), tens[:, 9].reshape(-1)


def bigram_loss(data: Data) -> float:
    """Validation loss in nats per byte of a bigram model with add-one smoothing: a baseline for trained models.

    It makes the predictions that a model makes, so the first byte of each block does not count.
    """
    if not isinstance(data.train, TextBlocks) or not isinstance(data.validation, TextBlocks):
        raise ValueError(f"a bigram model needs text, not {data.kind}")
    counts = _pairs(data.train.bytes) + 1.0
    nats = (counts.sum(1, keepdim=True) / counts).log()  # [first, second]
    occurring = _pairs(data.validation.bytes)
    return float((occurring * nats).sum() / occurring.sum())


def _pairs(blocks: Tensor) -> Tensor:
    """Counts each pair of neighbouring bytes inside the blocks."""  # [blocks, context] -> [vocab, vocab] float64
    codes = blocks[:, :-1].long() * TEXT_VOCAB + blocks[:, 1:].long()
    return torch.bincount(codes.flatten(), minlength=TEXT_VOCAB * TEXT_VOCAB).view(TEXT_VOCAB, TEXT_VOCAB).double()


def _read(source: str, split: str | None, column: str | None) -> tuple[str, bytes]:
    """Reads a source: its label and its bytes."""
    if hub.is_hub(source):
        rows = hub.hub_rows(source, split or "train")
        texts = hub.column(rows, column, ["text"])
        return hub.label(source), b"\n\n".join(str(value).encode() for value in texts)
    hub.refuse(source, split=split, column=column)
    if source == "sotu-sample":
        return source, TEXT_SAMPLE.read_bytes()
    if source in ("sotu", "shakespeare"):
        return source, (locate(source) / "text.txt").read_bytes()
    path = check_source(source, ["sotu-sample", "sotu", "shakespeare"])
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{source} holds no *.txt")
    return path.stem, b"\n\n".join(file.read_bytes() for file in files)
