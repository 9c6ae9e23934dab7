"""Validation: loss, accuracy and BLEU. Every run of a recipe uses the same held-out examples."""

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
    """Returns `val_loss`, the mean loss of all predictions. If the data have classes, also returns
    `val_accuracy`.

    Collective: ranks divide the batches among themselves.
    """
    train = session.config.train
    session.model.eval()
    # sums over batches: losses, predictions, correct predictions (NaN if there are no classes)
    sums = torch.zeros(3, dtype=torch.float64, device=session.device)
    most = train.validation_batches * train.batch_size
    held_out = list(batches(session.data.validation, train.batch_size, most))
    rounds = -(-len(held_out) // session.world_size)
    for i in range(rounds):
        # FSDP gathers weights in each forward, so a rank without a batch must run forward, too.
        # A rank without a batch repeats another batch, and does not count the loss of this batch.
        index = i * session.world_size + session.rank
        batch = to(held_out[index % len(held_out)], session.device)
        with autocast(session):
            output = session.model(**batch)
        if index < len(held_out):
            count = predictions(session.data.kind, batch)
            right = math.nan
            logits = getattr(output, "logits", None)
            if session.data.kind in CLASSIFIES and logits is not None:
                right = float((logits.argmax(-1) == batch["labels"]).sum())
            sums += sums.new_tensor([output.loss.item() * count, count, right])
    session.model.train()
    gathered = torch.tensor(session.world.all_gather(sums)(), dtype=sums.dtype)
    loss, count, right = gathered.sum(0).tolist()
    result = {"val_loss": loss / count}
    if math.isnan(right):
        return result
    return {**result, "val_accuracy": right / count}


@torch.no_grad()
def translate(session: Session) -> dict[str, float]:
    """Returns `val_bleu` of greedy translations of held-out sentences, from 0 to 100.

    Collective: ranks divide the sentences among themselves. Each generated token needs a forward
    pass. All ranks run the same number of passes, because FSDP gathers weights in each pass.
    """
    from sacrebleu.metrics.bleu import BLEU

    pairs = session.data.validation
    train = session.config.train
    bleu = BLEU()
    assert isinstance(pairs, TranslationPairs)
    session.model.eval()
    # shape [10]: matching n-grams (4), all n-grams (4), lengths of translations and references
    counts = torch.zeros(10, dtype=torch.int64, device=session.device)
    wanted = min(train.bleu_sentences, len(pairs))
    for first in range(0, wanted, train.batch_size * session.world_size):
        mine = range(first + session.rank, wanted, session.world_size)[: train.batch_size]
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
    session.model.train()
    gathered = torch.tensor(session.world.all_gather(counts)())
    total = gathered.sum(0).tolist()
    score = BLEU.compute_bleu(total[:4], total[4:8], total[8], total[9], smooth_method="exp")
    return {"val_bleu": float(score.score)}


def greedy(session: Session, batch: dict[str, Tensor]) -> Tensor:
    """Translates a batch by greedy decoding. Returns token ids `[B, target_length]`: for each
    sentence as many ids as the labels have.
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
