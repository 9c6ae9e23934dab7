"""Views: the shards of a trainer as parts of a whole model, in one process and in the same memory."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from detonation.checkpoint.files.reader import Box, ShardReader
from detonation.core.flat.tensors import padding_row
from detonation.core.optimizer.gathered import local_parameters
from detonation.core.optimizer.trained import note_padding
from detonation.feed.shared_state import part_of


def shard_views(saved: ShardReader, model: nn.Module, trained: Collection[str]) -> nn.Module:
    """A module with the names of `model`, whose parameters are the parts that the shard of `saved` has of them.

    A step of an optimizer on it moves `model`. Neither the gradients nor `requires_grad` of `model` change.

    Args:
        trained: The names of the parameters that training moves.
    """
    views: dict[str, Tensor] = {}
    parameters = local_parameters(model)
    note_padding(model)
    for name, parameter in parameters.items():
        box = saved.boxes.get(f"model.{name}", Box.of(parameter))
        view = nn.Parameter(part_of(parameter.detach(), box), requires_grad=name in trained)
        view.whole_numel = parameter.numel()  # type: ignore[attr-defined]
        if (row := padding_row(parameter)) is not None and box.offset[0] <= row < box.offset[0] + box.shape[0]:
            view.padding_row = row - box.offset[0]  # type: ignore[attr-defined]
        views[name] = view
    return _tree(views)


def require_elementwise(base: torch.optim.Optimizer, views: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` where an optimizer looks at more than one shard of a parameter at a time."""
    name = type(base).__name__
    for view in views.values():
        for state in base.state.get(view, {}).values():
            if isinstance(state, Tensor) and state.ndim and state.shape != view.shape:
                raise ValueError(f"{name} keeps state of whole matrices: its shards cannot be followed in one process")
    if name == "Muon":
        raise ValueError("Muon moves whole matrices: its shards cannot be followed in one process")


def _tree(parameters: Mapping[str, Tensor]) -> nn.Module:
    """A module in which each parameter has its full name, in the order of the model."""
    root = nn.Module()
    for name, parameter in parameters.items():
        owner = root
        *path, own_name = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(own_name, parameter)  # type: ignore[arg-type]
    return root
