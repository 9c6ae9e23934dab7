"""Puts a checkpoint's state of this rank into a model and its optimizer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.elastic import SHARD, Elastic, merge_shard_state, owned_rows
from detonation.checkpoint.files.manifest import Manifest
from detonation.checkpoint.files.reader import Box, CheckpointReader, ReplicaFiles, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint
from detonation.checkpoint.snapshot import (
    entry_of,
    frozen_weights,
    generators,
    groups,
    held_shards,
    replicators_of_shards,
    run_identity,
    weights,
)
from detonation.core.flat.tensors import local
from detonation.core.link.coordinates import Coordinates
from detonation.core.memory import require_same_keys
from detonation.core.optimizer.gathered import local_parameters
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.state import local_state_of, parameters_of
from detonation.core.replicator.base import Replicator
from detonation.gates.closeness import Closeness
from detonation.wire.units import load_shard_state, shard_units

_MEMORY = "residual"
_SERVER_RESIDUAL = "server_residual"
"""The names of a channel's local state."""
_BY_REPLICA = ("taken", "local_steps")
"""The local state that has a number for each replica."""


@torch.no_grad()
def restore(
    saved: CheckpointReader, model: nn.Module, optimizer: Replicated
) -> tuple[str, Callable[[], str]]:
    """Puts the state of `saved` into both; the caller then compares the replicas.

    Returns:
        In words, how the saved world was merged into this one; and what is left to do, which is
        collective and comes when no rank has raised. It returns in words what had to be dropped.

    Raises:
        ValueError: the checkpoint is of another model, optimizer, scheme or seed.
    """
    (own, held), manifest = held_shards(model, optimizer), saved.manifest
    moved = _own_file(saved, own).moved
    found = weights(model)
    _check(saved, model, optimizer, own)
    same = _same_shape(manifest, own)
    source: Elastic | ShardReader = _own_file(saved, own)
    if not same or any(held.values()):  # pieces are put together
        source = Elastic(saved, own, [own.replica] if same else None)
    parameters, frozen = local_parameters(model), frozen_weights(model)
    if not any(
        f"model.{name}" in _own_file(saved, own).keys for name in frozen
    ):  # saved without them
        found = {name: tensor for name, tensor in found.items() if name not in frozen}
    for name, tensor in found.items():
        key = f"model.{name}"
        if isinstance(source, ShardReader):
            read = source.tensor(key)
            if (
                name in parameters
                and (was := source.boxes.get(key))
                and was != (here := Box.of(tensor))
            ):
                if was.whole != here.whole:
                    raise ValueError(
                        f"{name} is {was.whole} in {saved.path}, here {here.whole}: resume the same"
                        " model"
                    )
                raise ValueError(
                    f"{key} was cut otherwise over the shards: resume with the same mesh and"
                    " placements"
                )
        else:
            box = (
                Box.of(tensor) if name in parameters else None
            )  # buffers are whole, and each replica has its own
            read = source.agreed(key, box, manifest.alike and box is not None)
        local(tensor).copy_(_fitting(key, local(tensor), read))
    replicas = [own.replica] if same else range(1 if manifest.alike else manifest.replicas)
    described = (
        ReplicaFiles([saved.file(r, 0) for r in replicas])
        if isinstance(source, Elastic)
        else source
    )
    for name, parameter in parameters.items():
        load_base_state(described, source, optimizer, name, parameter, manifest.alike)
    for group, options in zip(optimizer.param_groups, _own_file(saved, own).groups, strict=True):
        group |= {
            key: _option(key, group.get(key), value) for key, value in options["options"].items()
        }
        for key, value in options["tensors"].items():
            like = group.get(key, group["lr"])  # a scheduler that is made later adds initial_lr
            group[key] = (
                like.new_tensor(value) if isinstance(like, Tensor) else _option(key, like, value)
            )
    if stays_close := bool(same and moved and optimizer.settings.safety.equal != "bits"):
        optimizer.closeness = Closeness(moved)
    keys = [
        key.removeprefix("replica.")
        for key in _own_file(saved, own).keys
        if key.startswith("replica.")
    ]
    optimizer.build(parameters_of(keys))
    optimizer.refuse_overlap()
    of_shards = replicators_of_shards(optimizer, held)
    if same:
        for shard, replicators in of_shards.items():
            _load_local_state(saved.file(own.replica, shard), replicators)
        file = _own_file(saved, own)
        wire = {k.removeprefix(SHARD): file.tensor(k) for k in file.keys if k.startswith(SHARD)}
        how = "exactly as saved, and replicas stay close" if stays_close else "exactly as saved"
        return how + _load_generators(file, model), partial(_load_wire, model, wire)
    assert isinstance(source, Elastic)
    dropped = "".join(_merge_local_state(source, replicators) for replicators in of_shards.values())
    how = _merge_policy(manifest.replicas, manifest.shards, own) + dropped
    return how, partial(merge_shard_state, saved, model, own)


def _load_wire(model: nn.Module, state: dict[str, Tensor]) -> str:
    load_shard_state(model, state)
    if not state or shard_units(model):
        return ""
    return "; dropped: what a shard wire had not sent, because the model has none now"


def _check(
    saved: CheckpointReader, model: nn.Module, optimizer: Replicated, own: Coordinates
) -> None:
    manifest = saved.manifest
    for key, now in run_identity(optimizer).items():
        was = getattr(manifest, key)
        if was != now:
            raise ValueError(
                f"{saved.path} was written with {key} {was}, this run has {now}: resume with the"
                " same"
            )
    own_groups = [group["parameters"] for group in groups(model, optimizer)]
    saved_groups = [
        group.get("parameters") if isinstance(group, dict) else None
        for group in _own_file(saved, own).groups
    ]
    if own_groups != saved_groups:
        raise ValueError(
            f"{saved.path} was written with {_other_groups(saved_groups, own_groups)}: resume the"
            " same model"
        )
    if manifest.replicas != own.replicas and all(
        scheme.signal == "nothing" for _, scheme in optimizer.levels
    ):
        counts = f"{manifest.replicas} replicas, not {own.replicas}"
        why = "without an exchange they have nothing in common to go on from"
        raise ValueError(f"{saved.path} is of {counts}: {why}; resume with {manifest.replicas}")


def _other_groups(saved: Sequence[Any], own: Sequence[Sequence[str]]) -> str:
    """In words, the parameters that only one of both has, or that both have in other groups."""
    was = [name for group in saved if isinstance(group, list) for name in map(str, group)]
    now = [name for group in own for name in group]
    missing, added = ([name for name in a if name not in {*b}] for a, b in ((was, now), (now, was)))
    if missing or added:
        words = [
            (f"{_few(missing)}, which this one lacks", missing),
            (f"without {_few(added)}", added),
        ]
        return "other parameters: " + ", and ".join(text for text, names in words if names)
    sizes = [
        [len(group) if isinstance(group, list) else 0 for group in saved],
        [len(group) for group in own],
    ]
    odd = [name for name, other in zip(was, now, strict=False) if name != other]
    order = f", in another order from {odd[0]} on" if odd else ""
    return f"other parameter groups: of {sizes[0]} parameters, here of {sizes[1]}{order}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _same_shape(manifest: Manifest, own: Coordinates) -> bool:
    return (manifest.replicas, manifest.shards) == (own.replicas, own.shards)


def _own_file(saved: CheckpointReader, own: Coordinates) -> ShardReader:
    """The file of this rank, which may be the only one on its node; in a world of another shape the
    first of all."""
    return (
        saved.file(own.replica, own.shard) if _same_shape(saved.manifest, own) else saved.file(0, 0)
    )


def _option(key: str, current: Any, saved: Any) -> Any:
    """A saved option of a parameter group.

    Raises `CorruptCheckpoint` where it is of another kind than `current`.
    """
    if isinstance(current, tuple | list) and isinstance(saved, list) and len(current) == len(saved):
        return type(current)(
            _option(key, inner, other) for inner, other in zip(current, saved, strict=True)
        )
    if current is None and isinstance(saved, int | float):
        return saved  # set since the optimizer was made, as a scheduler does
    number = _is_number(current) and _is_number(saved)
    switch = isinstance(current, bool | None) and isinstance(saved, bool | None)
    if not (number or switch or (isinstance(current, str) and isinstance(saved, str))):
        raise CorruptCheckpoint(
            f"the option {key} was saved as {str(saved)[:60]!r}, is {current!r} here"
        )
    return saved


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _load_generators(source: ShardReader, model: nn.Module) -> str:
    """Sets the random generators of this rank; returns in words those that start anew, on another
    kind of device."""
    found = generators(model)
    for key in found.keys() & source.keys:
        found[key].set_state(source.tensor(key))
    anew = [key.removeprefix("generator.") for key in found if key not in source]
    return (
        f"; the random generator of {', '.join(anew)} was not saved and starts anew" if anew else ""
    )


def load_base_state(
    file: ShardReader | ReplicaFiles,
    source: Elastic | ShardReader,
    optimizer: Replicated,
    name: str,
    parameter: Tensor,
    alike: bool = False,
) -> None:
    """Replaces the base optimizer's state of one parameter; `file` has its keys, and its values
    that are no tensors."""
    prefix = f"optimizer.{name}."
    state: dict[str, Any] = {
        _entry(k, prefix): v for k, v in file.values.items() if k.startswith(prefix)
    }
    if not all(isinstance(value, int | float | None) for value in state.values()):
        raise CorruptCheckpoint(f"the state of {name} holds {str(state)[:60]}, must be numbers")
    for key in [key for key in file.keys if key.startswith(prefix)]:
        if isinstance(source, ShardReader):
            tensor, box = source.tensor(key), source.boxes.get(key)
            whole = box.whole if box else ()
            if whole == tuple(parameter.shape) and tensor.shape != local(parameter).shape:
                raise CorruptCheckpoint(
                    f"{key} has shape {tuple(tensor.shape)}, not {tuple(local(parameter).shape)}"
                )
        else:
            sharded = key in file.boxes
            if sharded and file.boxes[key].whole != tuple(parameter.shape):
                raise ValueError(
                    f"{key} is sharded unlike its parameter: resume with as many shards"
                )
            tensor = (
                source.agreed(key, Box.of(parameter), alike, some=True)
                if sharded
                else source.own(key, alike)
            )
            whole = tuple(parameter.shape)
        tensor = tensor if key in file.on_host else tensor.to(local(parameter).device)
        # state of a plain parameter is plain, of a DTensor mostly a DTensor: a model may be sharded
        # since it was saved
        wrapped = key in file.wrapped or (key in file.boxes and f"model.{name}" not in file.wrapped)
        state[_entry(key, prefix)] = _as_dtensor(parameter, tensor, whole) if wrapped else tensor
    if state:
        optimizer.base.state[parameter] = state
    else:
        optimizer.base.state.pop(parameter, None)


def _entry(key: str, prefix: str) -> str:
    """The optimizer's own key of a saved entry.

    No parameter's name continues that of another after a dot.

    Raises `ValueError` for a key with a dot, as versions wrote it that did not read it again.
    """
    spelled = key.removeprefix(prefix)
    if "." in spelled:
        raise ValueError(
            f"{key} is the state {spelled!r} of an optimizer, saved by a version that does not "
            "tell such keys from names: save again with this version, or rename the state"
        )
    return entry_of(spelled)


def _as_dtensor(parameter: Tensor, tensor: Tensor, whole: tuple[int, ...]) -> Tensor:
    """`tensor` as the local part of a DTensor like `parameter`, where that is a DTensor."""
    if not isinstance(parameter, DTensor):
        return tensor
    stride = torch.empty(whole, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride
    )


def _load_local_state(source: ShardReader, replicators: Sequence[Replicator]) -> None:
    """Loads the local state of a shard, in a world of the shape that saved."""
    current = {f"replica.{key}": tensor for key, tensor in local_state_of(replicators).items()}
    saved = {key for key in source.keys if key.startswith("replica.")}
    require_same_keys("the checkpoint", current, saved)
    loaded = {
        key: _fitting(key, tensor, source.tensor(key))
        for key, tensor in current.items()
        if key in saved
    }
    for level, replicator in enumerate(replicators):
        prefix = f"replica.{level}."
        replicator.local_state().load(
            {k.removeprefix(prefix): t for k, t in loaded.items() if k.startswith(prefix)}
        )


def _merge_local_state(source: Elastic, replicators: Sequence[Replicator]) -> str:
    """Merges the local states of all replicas; returns in words the state that had to be dropped."""
    dropped = ""
    for level, replicator in enumerate(replicators):
        local_state, channel = replicator.local_state(), replicator.channel
        own_boxes = {name: Box.of(parameter) for name, parameter in replicator.parameters.items()}
        merged = {}
        for key, tensor in local_state.named().items():
            kind, _, name = key.partition(".")
            full_key = f"replica.{level}.{key}"
            if kind == _MEMORY:
                merged[key] = _fitting(full_key, tensor, source.memory(full_key, own_boxes[name]))
            elif kind == _SERVER_RESIDUAL:
                merged[key] = torch.zeros_like(tensor)
            elif key in _BY_REPLICA:  # of other replicas: all begin a round of equal steps
                merged[key] = tensor
            else:
                merged[key] = _fitting(
                    full_key, tensor, source.agreed(full_key, own_boxes.get(name))
                )
        residual = source.server_residual(f"replica.{level}.{_SERVER_RESIDUAL}", channel, own_boxes)
        if residual is not None and _SERVER_RESIDUAL in merged:
            merged[_SERVER_RESIDUAL] = owned_rows(residual, channel)
        elif residual is not None and channel.memory is not None:
            for name, piece in zip(own_boxes, residual, strict=True):
                merged[f"{_MEMORY}.{name}"] += piece
        elif residual is not None:
            norm = sum(float(piece.double().square().sum()) for piece in residual) ** 0.5
            dropped += (
                f"; dropped: the server residual of the owners, norm {norm:.3g}, has no place in"
                " this world"
            )
        local_state.load(merged)
    return dropped


def _fitting(key: str, target: Tensor, source: Tensor) -> Tensor:
    """`source`, unchanged.

    Raises `ValueError` where its shape or dtype differs from that of `target`.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        was, now = f"{source.dtype} {tuple(source.shape)}", f"{target.dtype} {tuple(target.shape)}"
        raise ValueError(
            f"{key} was saved as {was}, is {now} here: it is of another model or scheme"
        )
    return source


def _merge_policy(replicas: int, shards: int, own: Coordinates) -> str:
    worlds = f"from {replicas} replicas x {shards} shards to {own.replicas} x {own.shards}"
    if replicas == own.replicas:
        return f"{worlds}: weights and memory exact, resharded"
    joiners = "; joiners start with none" if own.replicas > replicas else " of neighbours"
    mean = "its mean over the replicas is kept"
    return (
        f"{worlds}: weights exact where replicas agreed, else their mean; memory merged by"
        f" mean{joiners}, {mean}"
    )
