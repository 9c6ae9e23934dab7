"""The copy of the training state for a follower: a feed describes and writes the copy with these
functions, and a follower loads it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from detonation.checkpoint.files.manifest import versions
from detonation.checkpoint.files.reader import Box, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, shard_content
from detonation.checkpoint.restore import load_base_state
from detonation.checkpoint.snapshot import Snapshot, point_in, weights
from detonation.choices import first_names
from detonation.core.flat.padding_rows import note_padding
from detonation.core.flat.tensors import local, padding_row
from detonation.core.optim import SignSGD
from detonation.core.optimizer import Replicated, local_parameters
from detonation.core.schemes import collective_for
from detonation.feed.frames import encoded, table_of
from detonation.log.writer import identity, padding_of, rounding
from detonation.muon.muon import Muon

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Creates the base optimizer of training from parameter groups."""
BUFFERS = 1 << 31
NORM = (1 << 32) - 1
"""Message numbers for tensors that are not messages: `BUFFERS` for the model's first buffer (other
buffers have the next numbers), and `NORM` for the gradient norm for clipping.
"""
PRIVATE = ("residual", "server_residual", "generator", "taken", "local_steps")
"""Prefixes of the state that replicas do not share: the unsent values of one replica, and its
number of local steps.
"""


def require_followable(optimizer: Replicated) -> None:
    """Raises `ValueError` if the messages of `optimizer` alone do not determine the weights."""
    if len(optimizer.levels) > 1:
        raise ValueError(
            "a feed needs an optimizer with one level of replication, not several: use"
            " detonation.Feed.of_weights"
        )
    if optimizer.settings.intra_node is not None:
        raise ValueError(
            "a feed cannot serve intra_node, because ranks share messages of some parameters: use"
            " detonation.Feed.of_weights"
        )
    if optimizer.closeness is not None and (own := optimizer.coordinates.replica):
        why = (
            f"replica {own} copies parts of replica 0's weights to stay close to them, and no"
            " message contains these parts"
        )
        raise ValueError(f"{why}: serve the feed from replica 0, or use detonation.Feed.of_weights")
    ((_, scheme),) = optimizer.levels
    if scheme.signal == "nothing":
        raise ValueError(
            f"{scheme.name} exchanges nothing, so there is nothing to follow: use another scheme,"
            " or detonation.Feed.of_weights"
        )
    collectives = [scheme.link]
    if optimizer.is_built:
        for each in optimizer.build():
            link = each.link
            found = collective_for(scheme, each.layout, link.replicas, link.local_ranks)
            collectives.append(found)
    if scheme.round.delay and "owner" in collectives:
        # A copy of the state waits for messages of earlier steps.
        # With owners, this replica alone would then start the second collective of an exchange.
        raise ValueError(
            f"{scheme.name} with a delay and owners cannot be followed: use link='all-gather'"
        )


def describe_training(optimizer: Replicated) -> dict[str, Any]:
    """Returns everything that a follower needs before it can load the state, as JSON values."""
    ((_, scheme),) = optimizer.levels
    replicators = optimizer.build()
    settings = optimizer.settings
    kind = type(optimizer.base)
    described = {
        **identity(optimizer),
        "step": optimizer.step_count,
        "shard": optimizer.coordinates.shard,
        "arguments": dict(scheme.arguments),
        "optimizer": [kind.__module__, kind.__name__],
        "non_finite": settings.safety.non_finite,
        "kernels": settings.kernels,
        "balance": settings.balance,
        "trained": [slot.name for each in replicators for slot in each.layout.slots],
        **rounding(optimizer),
        **padding_of(optimizer),
        "equal": settings.safety.equal,
        "versions": versions(),
    }
    # encode and decode once: JSON turns tuples into lists, so followers receive equal values
    return table_of(encoded(described))


@torch.no_grad()
def memory_norm(optimizer: Replicated) -> float:
    """Norm of the values that this replica has computed and not sent, over all parameters of its
    shard.
    """
    found = [each.channel.memory.residual for each in optimizer.build() if each.channel.memory]
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in found))


def shared_content(snapshot: Snapshot) -> list[memoryview]:
    """Returns the state that all replicas share, in the format of a checkpoint's shard file."""
    tensors = {}
    for key, tensor in snapshot.tensors.items():
        part, _, rest = key.partition(".")
        private = part == "generator" or (part == "replica" and not is_shared(rest))
        if not private:
            tensors[key] = tensor
    return list(shard_content(tensors, snapshot.rest))


@torch.no_grad()
def load_weights_of(saved: ShardReader, model: nn.Module) -> None:
    """Copies the weights in `saved` into `model`, which must be whole or sharded as in training.

    Raises `ValueError` if the weights belong to another model.
    """
    targets = {f"model.{name}": tensor for name, tensor in weights(model).items()}
    for key, target in targets.items():
        tensor = saved.tensor(key)
        whole = tuple(target.shape)
        part = local(target)
        box = saved.boxes.get(key, Box.of(target))
        if part is target and box.whole == whole:
            part = part_of(part, box)
        if part.shape != tensor.shape or part.dtype != tensor.dtype:
            here = f"{whole} {part.dtype}"
            there = f"{box.whole} {tensor.dtype}"
            raise ValueError(
                f"{key.removeprefix('model.')} is {there} in training, but {here} here, so this is"
                " another model: give the model that is trained"
            )
        part.copy_(tensor)
    if extra := sorted(
        key for key in saved.keys if key.startswith("model.") and key not in targets
    ):
        raise ValueError(
            f"training has {extra[0].removeprefix('model.')}, which this model lacks, so this is"
            " another model: give the model that is trained"
        )


def part_of(whole: Tensor, box: Box) -> Tensor:
    """Returns the part `box` of a whole tensor, as a view.

    Shapes: any -> the shape of the box.
    """
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        if start + size > whole.shape[dim]:
            start = 0  # the offset of an empty shard may be beyond the end of the tensor
            if size:
                raise CorruptCheckpoint(
                    f"a box ends beyond its tensor of shape {tuple(whole.shape)}"
                )
        whole = whole.narrow(dim, start, size)
    return whole


@torch.no_grad()
def load_shared_state(
    saved: ShardReader, optimizer: Replicated, parameters: Mapping[str, Tensor], step: int
) -> None:
    """Loads the state of the base optimizer and of the replicators into a new optimizer.

    The memory of unsent values in the new optimizer stays empty. Raises `ValueError` if the state
    belongs to another model or scheme.
    """
    for name, parameter in parameters.items():
        load_base_state(saved, saved, optimizer, name, parameter)
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        group |= options_of_group(options)
    optimizer.run.load(*point_in(saved.values))
    optimizer.build()
    current = optimizer.local_state()
    found = {key.removeprefix("replica."): key for key in saved.keys if key.startswith("replica.")}
    odd = sorted(found.keys() - current.keys()) or sorted(
        key for key in current.keys() - found.keys() if is_shared(key)
    )
    if odd:
        raise ValueError(
            f"the state belongs to another model or scheme: it differs in {first_names(odd)}"
        )
    for level, replicator in enumerate(optimizer.build()):
        mine = {}
        for key, tensor in replicator.local_state().named().items():
            full = f"{level}.{key}"
            loaded = torch.zeros_like(tensor)
            if full in found:
                loaded = saved.tensor(found[full])
            if loaded.shape != tensor.shape:
                raise ValueError(
                    f"the state {full} has shape {tuple(loaded.shape)} in training, but"
                    f" {tuple(tensor.shape)} here: use the model and scheme of training"
                )
            mine[key] = loaded
        replicator.local_state().load(mine)
    optimizer.resume_at(step)


def is_shared(key: str) -> bool:
    """True if replicas share the state under `key`. False for state of a single replica, such as
    0.residual.layer.weight.
    """
    return not key.partition(".")[2].startswith(PRIVATE)


def base_optimizer(
    make: MakeOptimizer | None,
    about: dict[str, Any],
    saved: Sequence[Any],
    parameters: Mapping[str, Tensor],
) -> torch.optim.Optimizer:
    """Creates the base optimizer of training over `parameters`, with the parameter groups in
    `saved`.
    """
    groups = []
    for group in saved:
        members = [parameters[name] for name in group["parameters"]]
        groups.append({"params": members, **options_of_group(group)})
    if make is None:
        make = _by_name(about["optimizer"])
    return make(groups)


def _by_name(name: Sequence[str]) -> MakeOptimizer:
    module, kind = name
    ours: dict[str, Any] = {"SignSGD": SignSGD, "Muon": Muon}
    found = None
    if module.startswith("detonation."):
        found = ours.get(kind)
    if module.startswith("torch.optim."):
        found = getattr(torch.optim, kind, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(
            f"training uses the optimizer {module}.{kind}: pass follow(..., optimizer=...) a"
            " function that makes this optimizer"
        )
    return found


def options_of_group(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a saved parameter group, with their original types."""
    options = dict(saved["options"])
    for key, value in options.items():
        if isinstance(value, list):
            options[key] = tuple(value)
    for key, value in saved["tensors"].items():
        options[key] = torch.tensor(value)
    return options


def shard_views(saved: ShardReader, model: nn.Module, trained: Collection[str]) -> nn.Module:
    """Returns a module with the parameter names of `model`. Its parameters are views of the parts
    of `model` that `saved` holds.

    An optimizer that steps this module changes the weights of `model`, but neither the gradients
    nor the `requires_grad` of `model`. Views of the parameters in `trained` require gradients.
    """
    views: dict[str, Tensor] = {}
    parameters = local_parameters(model)
    note_padding(model)
    for name, parameter in parameters.items():
        box = saved.boxes.get(f"model.{name}", Box.of(parameter))
        view = nn.Parameter(part_of(parameter.detach(), box), requires_grad=name in trained)
        view.whole_numel = parameter.numel()  # type: ignore[attr-defined]
        row = padding_row(parameter)
        if row is not None and 0 <= row - box.offset[0] < box.shape[0]:
            view.padding_row = row - box.offset[0]  # type: ignore[attr-defined]
        views[name] = view
    return _tree(views)


def require_elementwise(base: torch.optim.Optimizer, views: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` if the optimizer needs whole parameters, because it then cannot
    step shards.
    """
    name = type(base).__name__
    for view in views.values():
        for state in base.state.get(view, {}).values():
            if isinstance(state, Tensor) and state.ndim and state.shape != view.shape:
                raise ValueError(
                    f"{name} keeps state of whole matrices, so one process cannot follow its"
                    " shards: shard the model with detonation.shard as in training"
                )
    if name == "Muon":
        raise ValueError(
            "Muon moves whole matrices, so one process cannot follow its shards: shard the model"
            " with detonation.shard as in training"
        )


def _tree(parameters: Mapping[str, Tensor]) -> nn.Module:
    """Returns a module that holds `parameters` under their full names, in the same order."""
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
