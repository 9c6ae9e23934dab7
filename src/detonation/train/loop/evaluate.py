"""Validation: loss, accuracy and BLEU. Every run of a recipe uses the same held-out examples."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from detonation.data import batches, predictions
from detonation.data.translation import TranslationPairs
from detonation.models.pretrained import CLASSIFIES
from detonation.train.loop.session import Session

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


@torch.no_grad()
def validate(session: Session) -> dict[str, float]:
    """Returns `val_loss`, the mean loss of all predictions. If the data have classes, also returns
    `val_accuracy`.

    Collective: ranks divide the batches among themselves.
    """
    session.model.eval()
    sums = _over_ranks(session, partial(_losses_of_part, session, list(_held_out(session))))
    session.model.train()
    loss, count, right = sums
    result = {"val_loss": float(loss / count)}
    if right.isnan():
        return result
    return {**result, "val_accuracy": float(right / count)}


def require_predictions(session: Session) -> None:
    """Raises `ValueError` if no held-out example has a prediction."""
    if not any(predictions(session.data.kind, batch) for batch in _held_out(session)):
        raise ValueError(
            "no validation example has a prediction, because all their labels are -100: raise"
            " train.validation_batches, or use other validation data"
        )


def _held_out(session: Session) -> Iterator[dict[str, Tensor]]:
    train = session.config.train
    most = train.validation_batches * train.batch_size
    return batches(session.data.validation, train.batch_size, most)


def _over_ranks(session: Session, part: Callable[[int, int], Tensor]) -> Tensor:
    """Returns the sum of `part(index, parts)` over all `parts` parts of a validation. Each rank
    computes one part. If a replica is lost, the other ranks divide all the work anew. Collective.
    """
    present = [*range(session.world_size)]
    while True:
        own = part(present.index(session.rank), len(present))
        rank = own.new_tensor([session.rank])
        rows = torch.tensor(session.world.all_gather(torch.cat([rank, own]))(), dtype=own.dtype)
        if len(rows) == len(present):
            return rows[:, 1:].sum(0)
        present = rows[:, 0].tolist()  # a lost replica has no rows


def _losses_of_part(
    session: Session, held_out: Sequence[dict[str, Tensor]], part: int, parts: int
) -> Tensor:
    """Returns sums over the batches of one part, `[3]`: losses, predictions, and correct
    predictions (NaN if there are no classes).
    """
    sums = torch.zeros(3, dtype=torch.float64, device=session.device)
    for i in range(-(-len(held_out) // parts)):
        # FSDP gathers weights in each forward, so a rank without a batch must run forward, too.
        # A rank without a batch repeats another batch, and does not count the loss of this batch.
        index = i * parts + part
        batch = to(held_out[index % len(held_out)], session.device)
        with autocast(session):
            output = session.model(**batch)
        count = predictions(session.data.kind, batch)
        # the mean loss of 0 predictions is NaN
        if index < len(held_out) and count:
            right = math.nan
            logits = getattr(output, "logits", None)
            if session.data.kind in CLASSIFIES and logits is not None:
                right = float((logits.argmax(-1) == batch["labels"]).sum())
            sums += sums.new_tensor([output.loss.item() * count, count, right])
    return sums


@torch.no_grad()
def translate(session: Session) -> dict[str, float]:
    """Returns `val_bleu` of greedy translations of held-out sentences, from 0 to 100.

    Collective: ranks divide the sentences among themselves. Each generated token needs a forward
    pass. All ranks run the same number of passes, because FSDP gathers weights in each pass.
    """
    from sacrebleu.metrics.bleu import BLEU

    session.model.eval()
    total = _over_ranks(session, partial(_ngrams_of_part, session, BLEU())).tolist()
    session.model.train()
    score = BLEU.compute_bleu(total[:4], total[4:8], total[8], total[9], smooth_method="exp")
    return {"val_bleu": float(score.score)}


def _ngrams_of_part(session: Session, bleu: "BLEU", part: int, parts: int) -> Tensor:
    """Returns counts over the translations of one part, `[10]`: matching n-grams (4), all n-grams
    (4), lengths of translations and references.
    """
    pairs = session.data.validation
    train = session.config.train
    assert isinstance(pairs, TranslationPairs)
    counts = torch.zeros(10, dtype=torch.int64, device=session.device)
    wanted = min(train.bleu_sentences, len(pairs))
    for first in range(0, wanted, train.batch_size * parts):
        mine = range(first + part, wanted, parts)[: train.batch_size]
        # A rank without sentences must run forward, too: it translates an uncounted sentence.
        indices = [*mine] or [0]
        batch = to(pairs[torch.tensor(indices)], session.device)
        ids = greedy(session, batch)
        if mine:
            translations = [pairs.text(row) for row in ids.tolist()]
            labels = [[i for i in row if i >= 0] for row in batch["labels"].tolist()]
            references = [pairs.text(row) for row in labels]
            found = bleu.corpus_score(translations, [references])
            counts += counts.new_tensor(
                [*found.counts, *found.totals, found.sys_len, found.ref_len]
            )
    return counts


def greedy(session: Session, batch: dict[str, Tensor]) -> Tensor:
    """Translates a batch by greedy decoding. Returns token ids `[B, target_length]`, which is also
    the shape of the labels.
    """
    model: Any = session.model
    ids = [torch.full_like(batch["labels"][:, 0], model.config.decoder_start_token_id)]
    given: dict[str, Any] = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for _ in range(batch["labels"].shape[1]):
        with autocast(session):
            output = model(**given, decoder_input_ids=ids[-1][:, None], use_cache=True)
        ids.append(output.logits[:, -1].argmax(-1))
        # the next pass reuses the encoder's output and the cached keys, and reads only one token
        given["encoder_outputs"] = (output.encoder_last_hidden_state,)
        cached = "past_key_values"
        if hasattr(output, "cache"):  # transformers 5.24 renamed `past_key_values` to `cache`
            cached = "cache"
        given[cached] = getattr(output, cached)
    return torch.stack(ids[1:], 1)


def autocast(session: Session) -> AbstractContextManager[object]:
    """Returns a context manager with bf16 autocast if the recipe asks for bf16. On a CPU the
    context manager does nothing, because most CPUs are far slower in bf16.
    """
    if session.config.train.autocast != "bf16" or session.device.type == "cpu":
        return nullcontext()
    return torch.autocast(session.device.type, dtype=torch.bfloat16)


def to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
