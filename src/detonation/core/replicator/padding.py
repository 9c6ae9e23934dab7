"""Releases padding rows for which a replica has a gradient."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from detonation.core.flat.padding_rows import mark_used
from detonation.core.flat.tensors import local_gradients, padding_row, whole_of
from detonation.core.link.link import Link
from detonation.core.optim.base_step import BaseStep
from detonation.core.replicator.base import Replicator


def release_used_rows(replicators: Sequence[Replicator], base: BaseStep) -> None:
    """Releases the padding rows for which any replica has a gradient before a step. Collective."""
    asked: dict[Link, list[tuple[Replicator, str]]] = {}
    words: dict[Link, list[bool]] = {}
    for each in (each for each in replicators if each.holds_padding):
        found = zip(each.parameters.items(), local_gradients(each.parameters), strict=True)
        for (name, parameter), gradient in found:
            if (row := padding_row(parameter)) is not None:
                asked.setdefault(each.link, []).append((each, name))
                used = gradient is not None and bool(gradient[row].any())
                words.setdefault(each.link, []).append(used)
    for link, mine in words.items():
        device = asked[link][0][0].channel.runtime.device
        table = link.collect(torch.tensor(mine, dtype=torch.int64, device=device))
        for (replicator, name), used in zip(asked[link], table.any(0).tolist(), strict=True):
            if used:
                _use(replicator, name, base)


def use_rows(names: Collection[str], replicators: Sequence[Replicator], base: BaseStep) -> None:
    """Releases the padding rows of the embeddings `names`, as the replicas of a training did."""
    for replicator in replicators:
        for name in replicator.parameters.keys() & set(names):
            _use(replicator, name, base)


def _use(replicator: Replicator, name: str, base: BaseStep) -> None:
    parameter: Any = replicator.parameters[name]
    whole: Any = whole_of(parameter)
    mark_used(whole)
    parameter.padding_row = whole.padding_row = None
    base.release(parameter)
    replicator.forget_held_rows()
