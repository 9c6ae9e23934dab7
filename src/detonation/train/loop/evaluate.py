"""Validation: loss, accuracy and BLEU on held-out examples, the same for every run of a recipe."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from detonation.data import batches, predictions
from detonation.data.translation import TranslationPairs
from detonation.models.pretrained import CLASSIFIES
from detonation.train.loop.session import Session


@torch.no_grad()
def validate(session: Session) -> dict[str, float]:
    """Mean `val_loss` over all predictions and, for classes, `val_accuracy`.

    Collective; each rank takes its share.
    """
    train = session.config.train
    session.model.eval()
    sums = torch.zeros(
        3, dtype=torch.float64, device=session.device
    )  # loss, predictions, right: NaN without classes
    held_out = list(
        batches(
            session.data.validation, train.batch_size, train.validation_batches * train.batch_size
        )
    )
    rounds = -(-len(held_out) // session.world_size)
    for i in range(rounds):
        # FSDP gathers weights in every forward pass: a rank without a batch takes part with one
        # that does not count.
        index = i * session.world_size + session.rank
        batch = to(held_out[index % len(held_out)], session.device)
        with autocast(session):
            output = session.model(**batch)
        if index < len(held_out):
            count, right, logits = (
                predictions(session.data.kind, batch),
                math.nan,
                getattr(output, "logits", None),
            )
            if session.data.kind in CLASSIFIES and logits is not None:
                right = float((logits.argmax(-1) == batch["labels"]).sum())
            sums += torch.tensor(
                [output.loss.item() * count, count, right], dtype=sums.dtype, device=session.device
            )
    session.model.train()
    loss, count, right = (
        torch.tensor(session.world.all_gather(sums)(), dtype=sums.dtype).sum(0).tolist()
    )
    result = {"val_loss": loss / count}
    return result if math.isnan(right) else {**result, "val_accuracy": right / count}


@torch.no_grad()
def translate(session: Session) -> dict[str, float]:
    """The `val_bleu` of greedy translations of held-out sentences, from 0 to 100. Collective; ranks
    share them.

    Each id takes a forward pass, and all ranks make as many, because FSDP gathers weights in each.
    """
    from sacrebleu.metrics.bleu import BLEU

    pairs, train, bleu = session.data.validation, session.config.train, BLEU()
    assert isinstance(pairs, TranslationPairs)
    session.model.eval()
    counts = torch.zeros(
        10, dtype=torch.int64, device=session.device
    )  # right and all 1- to 4-grams, and two lengths
    wanted = min(train.bleu_sentences, len(pairs))
    for first in range(0, wanted, train.batch_size * session.world_size):
        mine = range(first + session.rank, wanted, session.world_size)[: train.batch_size]
        batch = to(
            pairs[torch.tensor([*mine] or [0])], session.device
        )  # a rank without a sentence takes part
        ids = greedy(session, batch)
        if mine:
            found = bleu.corpus_score(
                [pairs.text(row) for row in ids.tolist()],
                [[pairs.text([i for i in row if i >= 0]) for row in batch["labels"].tolist()]],
            )
            counts += torch.tensor(
                [*found.counts, *found.totals, found.sys_len, found.ref_len], device=session.device
            )
    session.model.train()
    total = torch.tensor(session.world.all_gather(counts)()).sum(0).tolist()
    score = BLEU.compute_bleu(total[:4], total[4:8], total[8], total[9], smooth_method="exp")
    return {"val_bleu": float(score.score)}


def greedy(session: Session, batch: dict[str, Tensor]) -> Tensor:
    """The likeliest ids, one after the other, as many as the labels have."""  # [B, target_length]
    model: Any = session.model
    ids = [torch.full_like(batch["labels"][:, 0], model.config.decoder_start_token_id)]
    given: dict[str, Any] = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for _ in range(batch["labels"].shape[1]):
        with autocast(session):
            output = model(**given, decoder_input_ids=ids[-1][:, None], use_cache=True)
        ids.append(output.logits[:, -1].argmax(-1))
        # The sentence was read, and the keys and values of the ids so far are there: the next pass
        # reads one id only.
        given["encoder_outputs"] = (output.encoder_last_hidden_state,)
        cached = (
            "cache" if hasattr(output, "cache") else "past_key_values"
        )  # which transformers 5.24 renamed
        given[cached] = getattr(output, cached)
    return torch.stack(ids[1:], 1)


def autocast(session: Session) -> AbstractContextManager[object]:
    """bf16 arithmetic where the recipe asks for it, on an accelerator: most CPUs multiply in it far
    more slowly."""
    if session.config.train.autocast != "bf16" or session.device.type == "cpu":
        return nullcontext()
    return torch.autocast(session.device.type, dtype=torch.bfloat16)


def to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
