"""Padding rows of embeddings. Such a row does not change until a replica has a gradient for it."""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.core.flat.tensors import bare_name, local

_USED = "padding_row_is_used"
"""Name of the attribute that marks a parameter whose padding row gets gradients."""


def note_padding(model: nn.Module) -> None:
    """Sets the attribute `padding_row` of the weight of each embedding that has a `padding_idx`.
    The attribute is the index of the padding row in the local shard.

    The attribute is None if the local shard does not hold this row, or if the row gets gradients.
    The row gets gradients if the embedding shares its weight with another module, such as an output
    layer, or if `mark_used` has marked the weight.
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
            weight.padding_row = None
            if 0 <= row < len(local(weight)) and not used:
                weight.padding_row = row


def used_rows(model: nn.Module) -> list[str]:
    """Names of the embedding weights whose padding rows get gradients, as `mark_used` has marked
    them."""
    return [bare_name(name) for name, p in model.named_parameters() if getattr(p, _USED, False)]


def mark_used(parameter: Tensor, used: bool = True) -> None:
    """Marks an embedding weight: its padding row gets gradients, or no gradients if `used` is
    False."""
    setattr(parameter, _USED, used)
