"""Text as bytes: every byte is a token, so there is no tokenizer to fetch, and any language or code will do."""

from pathlib import Path
from typing import final

import torch
from torch import Tensor

from detonation.data import hub
from detonation.data.base import Data
from detonation.data.download.sources import check_source, locate

VOCAB = 256
PIECE = 8192
"""Bytes held out, or not, in one piece: long enough that the ends, where both sides were seen, do not count."""
SAMPLE = Path(__file__).with_name("sotu_sample.txt")


def text(source: str = "sotu-sample", context: int = 128, split: str | None = None, column: str | None = None) -> Data:
    """Blocks of `context` bytes, 10 % of the bytes held out for validation.

    Args:
        source: `sotu-sample` (shipped: 24 State of the Union speeches, 1 MB), `sotu` (all 233, 10.8 MB),
            `shakespeare` (the works, 5.1 MB), a text file, a directory of `*.txt`, or `hf:NAME[:CONFIG]`.
        context: bytes in one example, from 2 on; the model predicts `context - 1` of them.
        split, column: only with `hf:`; "train" and "text" by default.

    Raises `MissingData` for a source that was not fetched, `ValueError` for text shorter than ten blocks.
    """
    if context < 2:
        raise ValueError(f"context must be at least 2 bytes, not {context}: one to read and one to predict")
    name, raw = _read(source, split, column)
    if len(raw) < 10 * context:
        raise ValueError(f"{source} has {len(raw)} bytes; context {context} needs at least {10 * context}")
    train, held_out = hold_out(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    if len(held_out) < context:
        raise ValueError(f"{source} has {len(held_out)} bytes to hold out: a context of at most that, not {context}")
    return Data(name, source, "text", Blocks(train, context), Blocks(held_out, context), {"vocab": VOCAB})


@final
class Blocks:
    """Neighbouring, not overlapping blocks of a text; an example is one block, as input and as labels."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.bytes = text[: len(text) // context * context].view(-1, context)  # uint8 [blocks, context]

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        ids = self.bytes[indices].long()  # [B, context]
        return {"input_ids": ids, "labels": ids.clone()}


def hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    """Train and held-out bytes of `text`, uint8 [bytes]: every tenth piece is held out, whatever the context is.

    >>> train, held_out = hold_out(torch.arange(20, dtype=torch.uint8))
    >>> held_out
    tensor([18, 19], dtype=torch.uint8)
    """
    length = min(PIECE, max(1, len(text) // 10))
    end = len(text) // (10 * length) * 10 * length
    tens = text[:end].view(-1, 10, length)
    # The rest is shorter than ten pieces, and train has it.
    return torch.cat([tens[:, :9].reshape(-1), text[end:]]), tens[:, 9].reshape(-1)


def bigram_loss(data: Data) -> float:
    """Validation loss in nats per byte of counting pairs of bytes: what a model has to beat to have learnt anything.

    Add-one smoothing; the same predictions as a model's, so the first byte of each block is not counted.
    """
    if not isinstance(data.train, Blocks) or not isinstance(data.validation, Blocks):
        raise ValueError(f"a bigram model needs text, not {data.kind}")
    counts = _pairs(data.train.bytes) + 1.0
    nats = (counts.sum(1, keepdim=True) / counts).log()  # [first, second]
    seen = _pairs(data.validation.bytes)
    return float((seen * nats).sum() / seen.sum())


def _pairs(blocks: Tensor) -> Tensor:
    """How often each byte follows each byte inside `blocks`; float64 [VOCAB, VOCAB]."""
    codes = blocks[:, :-1].long() * VOCAB + blocks[:, 1:].long()
    return torch.bincount(codes.flatten(), minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double()


def _read(source: str, split: str | None, column: str | None) -> tuple[str, bytes]:
    """Label and bytes of `source`."""
    if hub.is_hub(source):
        rows = hub.rows(source, split or "train")
        texts = hub.column(rows, column, ["text"])
        return hub.label(source), b"\n\n".join(str(value).encode() for value in texts)
    hub.refuse(source, split=split, column=column)
    if source == "sotu-sample":
        return source, SAMPLE.read_bytes()
    if source in ("sotu", "shakespeare"):
        return source, (locate(source) / "text.txt").read_bytes()
    path = check_source(source, ["sotu-sample", "sotu", "shakespeare"])
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{source} holds no *.txt")
    return path.stem, b"\n\n".join(file.read_bytes() for file in files)
