"""The padding rows of embeddings, which stay where they are unless a replica has a gradient of
them."""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.core.flat.tensors import bare_name, local

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


def mark_used(parameter: Tensor, used: bool = True) -> None:
    """Notes whether the padding row of `parameter` moves."""
    setattr(parameter, _USED, used)
