"""State that a follower begins with: how a feed describes and writes it, and how it is put into
an optimizer."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from detonation.checkpoint.files.manifest import versions
from detonation.checkpoint.files.reader import Box, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, shard_content
from detonation.checkpoint.restore import load_base_state
from detonation.checkpoint.snapshot import Snapshot, weights
from detonation.core.flat.padding_rows import note_padding
from detonation.core.flat.tensors import local, padding_row
from detonation.core.optimizer.gathered import local_parameters
from detonation.core.optimizer.replicated import Replicated
from detonation.core.schemes.traffic import collective_for
from detonation.feed.frames import encoded, table_of
from detonation.log.writer import identity, padding_of, rounding

BUFFERS = 1 << 31
NORM = (1 << 32) - 1
"""Places, among those of messages, of the model's buffers from the first one on, and of the
norm for clipping."""
PRIVATE = ("residual", "server_residual", "generator", "taken", "local_steps")
"""How the kinds of state begin that stay where they are: the memory of one replica, and who took
which local steps."""


def require_followable(optimizer: Replicated) -> None:
    """Raises `ValueError` if the messages of `optimizer` are not all that moves the weights of
    its replicas."""
    if len(optimizer.levels) > 1:
        raise ValueError("a feed takes one level of replication, not several")
    if optimizer.settings.intra_node is not None:
        raise ValueError(
            "a feed takes no intra_node: its ranks share the messages of some parameters"
        )
    if optimizer.closeness is not None and (own := optimizer.coordinates.replica):
        why = (
            f"replica {own} of close replicas takes over parts of the weights of replica 0, which"
            " no message has"
        )
        raise ValueError(f"{why}: serve the feed from replica 0, or use detonation.Feed.of_weights")
    ((_, scheme),) = optimizer.levels
    if scheme.signal == "nothing":
        raise ValueError(f"under {scheme.name} replicas agree on nothing that could be followed")
    built = []
    if optimizer.is_built:
        built = optimizer.build()
    ways = [
        collective_for(scheme, each.layout, each.link.replicas, each.link.local_ranks)
        for each in built
    ]
    if scheme.round.delay and "owner" in (scheme.link, *ways):
        # a copy waits for messages in flight, which would start the second collective on this
        # replica alone
        raise ValueError(
            f"{scheme.name} with a delay and owners cannot be followed: use link='all-gather'"
        )


def describe_training(optimizer: Replicated) -> dict[str, Any]:
    """All that a follower must know before it can load the state, as JSON values."""
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
    return table_of(encoded(described))  # tuples as lists


@torch.no_grad()
def memory_norm(optimizer: Replicated) -> float:
    """Norm of the signals that this replica has not sent yet, over all parameters of its shard."""
    found = [each.channel.memory.residual for each in optimizer.build() if each.channel.memory]
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in found))


def shared_content(snapshot: Snapshot) -> list[memoryview]:
    """State that all replicas share, as the file of a checkpoint has it."""
    tensors = {
        key: tensor for key, tensor in snapshot.tensors.items() if not key.startswith("generator.")
    }
    own = {
        key
        for key in tensors
        if key.startswith("replica.") and not is_shared(key.removeprefix("replica."))
    }
    tensors = {key: tensor for key, tensor in tensors.items() if key not in own}
    return list(shard_content(tensors, snapshot.rest))


@torch.no_grad()
def load_weights_of(saved: ShardReader, model: nn.Module) -> None:
    """Copies the part of the weights that `saved` has into `model`, which is whole or sharded
    alike, or is refused."""
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
                f"{key.removeprefix('model.')} is {there} in training, is {here} here: another"
                " model"
            )
        part.copy_(tensor)
    if extra := sorted(
        key for key in saved.keys if key.startswith("model.") and key not in targets
    ):
        raise ValueError(
            f"training has {extra[0].removeprefix('model.')}, which is not here: another model"
        )


def part_of(whole: Tensor, box: Box) -> Tensor:
    """Part of a whole tensor that a box is, in the same memory.

    Shapes: any -> the shape of the box.
    """
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        if start + size > whole.shape[dim]:
            start = 0  # an empty shard begins beyond the end
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
    """Puts the state of the base optimizer, and of the replicators, into an optimizer that took no
    step.

    Its memory stays empty. Raises `ValueError` if it is of another model or scheme.
    """
    for name, parameter in parameters.items():
        load_base_state(saved, saved, optimizer, name, parameter)
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        group |= options_of_group(options)
    optimizer.build()
    current = optimizer.local_state()
    found = {key.removeprefix("replica."): key for key in saved.keys if key.startswith("replica.")}
    odd = sorted(found.keys() - current.keys()) or sorted(
        key for key in current.keys() - found.keys() if is_shared(key)
    )
    if odd:
        raise ValueError(
            f"the state is of another model or scheme: {odd[0]} and {len(odd) - 1} more differ"
        )
    for level, replicator in enumerate(optimizer.build()):
        mine = {}
        for key, tensor in replicator.local_state().named().items():
            full = f"{level}.{key}"
            if full in found:
                mine[key] = saved.tensor(found[full])
            else:
                mine[key] = torch.zeros_like(tensor)
            if mine[key].shape != tensor.shape:
                raise ValueError(
                    f"{full} is {tuple(mine[key].shape)} in training, is {tuple(tensor.shape)} here"
                )
        replicator.local_state().load(mine)
    optimizer.resume_at(step)


def is_shared(key: str) -> bool:
    """False for the state that is one replica's own, such as 0.residual.layer.weight."""
    return not key.partition(".")[2].startswith(PRIVATE)


def options_of_group(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group, as a state has them."""
    plain = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in saved["options"].items()
    }
    return plain | {key: torch.tensor(value) for key, value in saved["tensors"].items()}


def shard_views(saved: ShardReader, model: nn.Module, trained: Collection[str]) -> nn.Module:
    """A module with the names of `model`, whose parameters are the parts that the shard of `saved`
    has of them.

    A step of an optimizer on it moves `model`. Neither the gradients nor `requires_grad` of `model`
    change; views of `trained` parameters require gradients.
    """
    views: dict[str, Tensor] = {}
    parameters = local_parameters(model)
    note_padding(model)
    for name, parameter in parameters.items():
        box = saved.boxes.get(f"model.{name}", Box.of(parameter))
        view = nn.Parameter(part_of(parameter.detach(), box), requires_grad=name in trained)
        view.whole_numel = parameter.numel()  # type: ignore[attr-defined]
        if (row := padding_row(parameter)) is not None and box.offset[0] <= row < box.offset[
            0
        ] + box.shape[0]:
            view.padding_row = row - box.offset[0]  # type: ignore[attr-defined]
        views[name] = view
    return _tree(views)


def require_elementwise(base: torch.optim.Optimizer, views: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` if an optimizer looks at more than one shard of a parameter at a time."""
    name = type(base).__name__
    for view in views.values():
        for state in base.state.get(view, {}).values():
            if isinstance(state, Tensor) and state.ndim and state.shape != view.shape:
                raise ValueError(
                    f"{name} keeps state of whole matrices: its shards cannot be followed in one"
                    " process"
                )
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
