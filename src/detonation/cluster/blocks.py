"""The layers of a model: units of sharding, of compilation, and of memory for backward."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of every outermost `nn.ModuleList`: the layers of a transformer."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers_of(child)


def checkpoint_activations(model: nn.Module) -> None:
    """Keeps the inputs of each layer alone for backward, which computes the rest again. In place; names stay.

    After `compile_layers` and before `shard`, whose hooks gather a layer's weights around both computations.

    Raises:
        ValueError: The model has no layers.
    """
    for layer in _some_layers(model, "train.checkpoint_activations"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: nn.Module, backend: str) -> None:
    """Compiles each layer by itself: layers of one shape are compiled once. In place; names stay.

    The hooks of `shard` stay outside of the compiled code.

    Raises:
        ValueError: The model has no layers, or torch has no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"train.compile is {backend!r}, but must be one of {', '.join(sorted(known))}")
    for layer in _some_layers(model, "train.compile"):
        layer.forward = torch.compile(layer.forward, backend=backend)


def _some_layers(model: nn.Module, setting: str) -> list[nn.Module]:
    layers = list(layers_of(model))
    if not layers:
        raise ValueError(f"{setting} works on layers, the elements of an nn.ModuleList, and the model has none")
    return layers
