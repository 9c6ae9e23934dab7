"""Validation: loss and accuracy on held-out examples, the same for every run of a recipe."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from detonation.core.optimizer.trained import reshard
from detonation.data import batches, predictions
from detonation.train.loop.session import Session


@torch.no_grad()
def validate(session: Session) -> dict[str, float]:
    """Mean `val_loss` over all predictions and, for images, `val_accuracy`. Collective; each rank takes its share."""
    train = session.config.train
    session.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=session.device)  # loss, predictions, right
    held_out = list(batches(session.data.validation, train.batch_size, train.validation_batches * train.batch_size))
    rounds = -(-len(held_out) // session.world_size)
    for i in range(rounds):
        # FSDP gathers weights in every forward pass: a rank without a batch takes part with one that does not count.
        index = i * session.world_size + session.rank
        batch = to(held_out[index % len(held_out)], session.device)
        with autocast(session):
            output = session.model(**batch)
        if index < len(held_out):
            sums += _sums(session, batch, output.loss, getattr(output, "logits", None))
    session.model.train()
    reshard(session.model)  # look-ahead moves the shards next
    loss, count, right = torch.tensor(session.world.all_gather(sums)(), dtype=sums.dtype).sum(0).tolist()
    result = {"val_loss": loss / count}
    return result if math.isnan(right) else {**result, "val_accuracy": right / count}


def _sums(session: Session, batch: dict[str, Tensor], loss: Tensor, logits: Tensor | None) -> Tensor:
    """The sum of the losses, the number of predictions, and of right ones: NaN where there are no classes."""
    count = predictions(session.data.kind, batch)
    right = math.nan
    if session.data.kind == "images" and logits is not None:
        right = float((logits.argmax(-1) == batch["labels"]).sum())
    return torch.tensor([loss.item() * count, count, right], dtype=torch.float64, device=session.device)


def autocast(session: Session) -> AbstractContextManager[object]:
    """bf16 arithmetic where the recipe asks for it."""
    if session.config.train.autocast != "bf16":
        return nullcontext()
    return torch.autocast(session.device.type, dtype=torch.bfloat16)


def to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """`batch` on `device`."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
