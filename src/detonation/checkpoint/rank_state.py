"""The state of one rank in a model and its optimizer, as both saving and loading name it."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from detonation.core.agreement.buffers import persistent_buffers
from detonation.core.optimizer.gathered import local_parameters
from detonation.core.optimizer.replicated import Replicated


def run_identity(optimizer: Replicated) -> dict[str, Any]:
    """Levels, seed and optimizer class, as the manifest spells them: they must be the same when a run is resumed."""
    levels = [{"scheme": scheme.name, **scheme.arguments} for _, scheme in optimizer.levels]
    return {
        "levels": json.loads(json.dumps(levels)),
        "seed": optimizer.settings.seed,
        "optimizer": type(optimizer.base).__name__,
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as shards."""
    return {**local_parameters(model), **persistent_buffers(model)}


def frozen_weights(model: nn.Module) -> set[str]:
    """The names of the parameters that require no gradient, which a checkpoint may leave out."""
    return {name for name, parameter in local_parameters(model).items() if not parameter.requires_grad}


def groups(model: nn.Module, optimizer: Replicated) -> list[dict[str, Any]]:
    """The options of each parameter group, and the names of its parameters.

    Raises `ValueError` for an option that is neither a tensor nor a plain value.
    """
    names = {id(parameter): name for name, parameter in local_parameters(model).items()}
    return [
        {
            "parameters": [names.get(id(parameter), "") for parameter in group["params"]],
            "options": {k: plain(k, v) for k, v in group.items() if k != "params" and not isinstance(v, Tensor)},
            "tensors": {k: plain(k, v.tolist()) for k, v in group.items() if isinstance(v, Tensor)},
        }
        for group in optimizer.param_groups
    ]


def generators(model: nn.Module) -> dict[str, torch.Generator]:
    """torch's default random generators on this rank, by key."""
    found = {"generator.cpu": torch.default_generator}
    if any(parameter.is_cuda for parameter in model.parameters()):
        found["generator.cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def plain(key: str, value: Any) -> Any:
    """`value` with tuples as lists. Raises `ValueError` where it is no JSON value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(key, inner) for inner in value]
    raise ValueError(f"{key} is {value!r} of type {type(value).__name__}: a checkpoint holds tensors and plain values")
