"""The padding rows of embeddings, which stay where they are unless a replica has a gradient of them."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.core.flat.tensors import bare_name, local, local_gradients, padding_row, whole_of
from detonation.core.link.link import Link
from detonation.core.optim.base_step import BaseStep
from detonation.core.replicator.base import Replicator

_USED = "padding_row_is_used"
"""The attribute of a parameter whose padding row has a gradient."""


def note_padding(model: nn.Module) -> None:
    """Notes the `padding_row` of each embedding with a `padding_idx`, on the shard that holds it.

    Not where another module uses the weights, too, or `use_rows` was told that somebody does: an
    output layer gives that row a gradient.
    """
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            weight: Any = module.weight
            first = 0
            if isinstance(weight, DTensor):
                (chunk,) = weight.__create_chunk_list__()  # type: ignore[no-untyped-call]
                first = chunk.offsets[0]
            row = module.padding_idx - first
            used = users[id(weight)] > 1 or getattr(weight, _USED, False)
            held = 0 <= row < len(local(weight)) and not used
            weight.padding_row = row if held else None


def used_rows(model: nn.Module) -> list[str]:
    """The names of the embeddings whose padding rows have a gradient, as all replicas found."""
    return [bare_name(name) for name, p in model.named_parameters() if getattr(p, _USED, False)]


def release_used_rows(replicators: Sequence[Replicator], base: BaseStep) -> None:
    """Lets the padding rows move of which any replica has a gradient before a step. Collective."""
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
    """Lets the padding rows of the embeddings `names` move, as the replicas of a training did."""
    for replicator in replicators:
        for name in replicator.parameters.keys() & set(names):
            _use(replicator, name, base)


def mark_used(parameter: Tensor, used: bool = True) -> None:
    """Notes whether the padding row of `parameter` moves."""
    setattr(parameter, _USED, used)


def _use(replicator: Replicator, name: str, base: BaseStep) -> None:
    parameter: Any = replicator.parameters[name]
    whole: Any = whole_of(parameter)
    mark_used(whole)
    parameter.padding_row = whole.padding_row = None
    base.release(parameter)
    replicator.forget_held_rows()
