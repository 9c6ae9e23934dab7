"""Loads the state of this rank from a checkpoint into a model and its optimizer."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.elastic import (
    SHARD,
    Elastic,
    compare_level_sizes,
    merge_policy,
    merge_shard_state,
    owned_rows,
)
from detonation.checkpoint.files.manifest import Manifest
from detonation.checkpoint.files.reader import Box, CheckpointReader, ReplicaFiles, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint
from detonation.checkpoint.snapshot import (
    FROZEN,
    PADDING,
    entry_of,
    frozen_marks,
    generators,
    groups,
    held_shards,
    omitted_weights,
    point_in,
    replicators_of_shards,
    run_identity,
    weights,
)
from detonation.choices import first_names
from detonation.core.agreement import python_number
from detonation.core.flat.tensors import local
from detonation.core.link import Coordinates
from detonation.core.memory import require_same_keys
from detonation.core.optimizer import Replicated, local_parameters, local_state_of, parameters_of
from detonation.core.replicator import Channel, Replicator, use_rows
from detonation.gates.closeness import Closeness
from detonation.wire.units import load_shard_state, shard_units

_MEMORY = "residual"
_SERVER_RESIDUAL = "server_residual"
"""Name of the server residual (what an owner of rows has aggregated and not sent) in the local
state of a channel."""
_BY_REPLICA = ("taken", "local_steps")
"""Names of local state that has one number per replica."""


@torch.no_grad()
def restore(
    saved: CheckpointReader, model: nn.Module, optimizer: Replicated
) -> tuple[str, Callable[[], str]]:
    """Loads the state in `saved` into model and optimizer. The caller must compare the replicas
    after this call.

    Returns:
        A text that says how the saved state was merged into this run, and a collective function
        that completes the state. The caller calls the function if no rank has raised an error. The
        function returns a text about the state that was dropped.

    Raises:
        ValueError: the checkpoint is of another model, optimizer, scheme or seed.
    """
    optimizer.refuse_loading_hooks()
    own, held = held_shards(model, optimizer)
    manifest = saved.manifest
    file = own_file(saved, own)
    moved = file.moved
    unknown = _check(saved, model, optimizer, own)
    same = _same_shape(manifest, own)
    source: Elastic | ShardReader = file
    if not same:
        source = Elastic(saved, own, levels=optimizer.levels)
    elif any(held.values()):  # this rank holds several shards, each from its own file
        source = Elastic(saved, own, [own.replica])
    # read the options before any state changes, because reading can raise an error
    options = _saved_options(file, optimizer)
    _load_weights(saved, source, file, model)
    described = _described(saved, own, source)
    for name, parameter in local_parameters(model).items():
        load_base_state(described, source, optimizer, name, parameter, manifest.alike)
    for group, saved_options in zip(optimizer.param_groups, options, strict=True):
        group |= saved_options
    known, completed = point_in(file.values)
    # a checkpoint of step 0 may begin several runs, so its run id is not used
    optimizer.run.load(known if manifest.step else "", completed)
    stays_close = bool(same and moved and optimizer.settings.safety.equal != "bits")
    if stays_close:
        optimizer.closeness = Closeness(moved)
    keys = [key.removeprefix("replica.") for key in file.keys if key.startswith("replica.")]
    padding = [key.removeprefix(PADDING) for key in file.values if key.startswith(PADDING)]
    use_rows(padding, optimizer.build(parameters_of(keys)), optimizer.base_step)
    of_shards = replicators_of_shards(optimizer, held)
    if not same:
        assert isinstance(source, Elastic)
        dropped = "".join(_merge_local_state(source, each) for each in of_shards.values())
        how = merge_policy(manifest.replicas, manifest.shards, own) + dropped + unknown
        return how, partial(merge_shard_state, saved, model, own)
    for shard, replicators in of_shards.items():
        _load_local_state(saved.file(own.replica, shard), replicators)
    wire = {k.removeprefix(SHARD): file.tensor(k) for k in file.keys if k.startswith(SHARD)}
    how = "exactly as saved"
    if stays_close:
        how = "exactly as saved, and replicas stay close"
    return how + unknown + _load_generators(file, model), partial(_load_wire, model, wire)


def compare_frozen(saved: CheckpointReader, model: nn.Module, optimizer: Replicated) -> str:
    """Compares the frozen weights that the checkpoint omits with their saved checksums. Returns a
    text if some could not be compared, because they were sharded differently. Changes no state.

    Checkpoints of earlier versions do not describe the frozen weights that they omit, so nothing is
    compared.

    Raises:
        ValueError: a frozen weight has other bytes than in the saved run.
    """
    own, _ = held_shards(model, optimizer)
    files = [own_file(saved, own)]
    if not any(key.startswith(FROZEN) for key in files[0].values):
        return ""
    if not _same_shape(saved.manifest, own):
        files = saved.shards(0)
    other = []
    uncompared = ""
    for name, (number, *box) in frozen_marks(model).items():
        key = FROZEN + name
        marks = [file.values[key] for file in files if key in file.values]
        numbers = [mark[0] for mark in marks if mark[1:] == box]
        if marks and not numbers:
            uncompared = "; frozen weights were not compared: they were sharded otherwise"
        if numbers and number not in numbers:
            other.append(name)
    if other:
        raise ValueError(
            f"the frozen weights are not those of the saved run {saved.path} ({first_names(other)})"
            ": load the same base model, in the same dtype"
        )
    return uncompared


def _load_weights(
    saved: CheckpointReader, source: Elastic | ShardReader, file: ShardReader, model: nn.Module
) -> None:
    """Copies the saved parameters and buffers into `model`.

    Parameters that require no gradient keep their values if `file` does not contain them.
    """
    parameters = local_parameters(model)
    omitted = omitted_weights(model, {*file.keys, *file.values}, saved.path)
    found = {name: tensor for name, tensor in weights(model).items() if name not in omitted}
    _require_fitting_weights(saved, file, found, parameters, source is file)
    for name, tensor in found.items():
        key = f"model.{name}"
        # a buffer has no box (part of a whole tensor), because each rank has the whole buffer
        box = None
        if name in parameters:
            box = Box.of(tensor)
        if isinstance(source, ShardReader):
            read = source.tensor(key)
        else:
            read = source.agreed(key, box, saved.manifest.alike and box is not None)
        local(tensor).copy_(_fitting(key, local(tensor), read))


def _require_fitting_weights(
    saved: CheckpointReader,
    file: ShardReader,
    found: Mapping[str, Tensor],
    parameters: Collection[str],
    cut_alike: bool,
) -> None:
    """Raises `ValueError`, before any state changes, unless each weight in `found` was saved with
    the same dtype and the same box (part of the whole tensor).

    cut_alike: True if `file` must have exactly the part of each parameter that this rank needs.
    """
    for name, tensor in found.items():
        key = f"model.{name}"
        dtype, shape = file.saved_as(key)
        if name in parameters:
            was, here = file.boxes.get(key), Box.of(tensor)
            if cut_alike or was is None or was.whole != here.whole:
                _require_same_box(saved, name, was, here)
            else:
                shape = tuple(local(tensor).shape)
        _require_alike(key, local(tensor), dtype, shape)


def _require_same_box(
    saved: CheckpointReader, name: str, was: Box | None, here: Box | None
) -> None:
    """Raises `ValueError` if a parameter was saved with another shape or as another part."""
    if was is None or here is None or was == here:
        return
    if was.whole != here.whole:
        raise ValueError(
            f"{name} has shape {was.whole} in {saved.path}, {here.whole} here:"
            " resume the same model"
        )
    raise ValueError(
        f"model.{name} was sharded differently: resume with the same mesh and placements"
    )


def _described(
    saved: CheckpointReader, own: Coordinates, source: Elastic | ShardReader
) -> ShardReader | ReplicaFiles:
    """The keys, boxes (parts of whole tensors) and plain values in the files of `source`."""
    if isinstance(source, ShardReader):
        return source
    replicas = range(saved.manifest.replicas)
    if _same_shape(saved.manifest, own):
        replicas = range(own.replica, own.replica + 1)
    elif saved.manifest.alike:
        replicas = range(1)
    return ReplicaFiles([saved.file(replica, 0) for replica in replicas])


def _saved_options(file: ShardReader, optimizer: Replicated) -> list[dict[str, Any]]:
    """The saved options of each parameter group.

    Raises `CorruptCheckpoint` for an option that does not fit the group.
    """
    found = []
    for group, options in zip(optimizer.param_groups, file.groups, strict=True):
        mine = {}
        for key, value in options["options"].items():
            like = group.get(key)
            if key in optimizer.defaults and like is not None:
                mine[key] = _option(key, like, value)
            else:
                # in the saved run, a scheduler or the training loop added this option later
                mine[key] = _of_others(like, value)
        for key, value in options["tensors"].items():
            # the group has no `initial_lr` yet if the program creates its scheduler later
            like = group.get(key, group["lr"])
            mine[key] = _tensor_option(key, like, value, key in optimizer.defaults)
        found.append(mine)
    return found


def _load_wire(model: nn.Module, state: dict[str, Tensor]) -> str:
    """Loads the state of the shard wire (the compressed communication between shards); returns a
    description of the state that was dropped."""
    load_shard_state(model, state)
    if not state or shard_units(model):
        return ""
    return "; dropped: unsent gradients of a shard wire, because the model now has no shard wire"


def _check(
    saved: CheckpointReader, model: nn.Module, optimizer: Replicated, own: Coordinates
) -> str:
    """Raises `ValueError` if the checkpoint does not fit this run. Returns in words what could not
    be compared."""
    manifest = saved.manifest
    file = own_file(saved, own)
    for key, now in run_identity(optimizer).items():
        was = getattr(manifest, key)
        if was != now:
            raise ValueError(
                f"{saved.path} was written with {key} {was}, this run has {now}: resume with the"
                f" same {key}"
            )
    own_groups = [group["parameters"] for group in groups(model, optimizer)]
    saved_groups = [
        group.get("parameters") if isinstance(group, dict) else None for group in file.groups
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
        why = "the scheme exchanges nothing, so the replicas have no common weights"
        raise ValueError(
            f"{saved.path} was saved by {counts}: {why}; resume with {manifest.replicas} replicas"
        )
    return compare_level_sizes(saved, file, optimizer.levels, own)


def _other_groups(saved: Sequence[Any], own: Sequence[Sequence[str]]) -> str:
    """Describes the parameters that only the saved run or only this run has, or that the two runs
    have in different groups.
    """
    was = [name for group in saved if isinstance(group, list) for name in map(str, group)]
    now = [name for group in own for name in group]
    missing, added = ([name for name in a if name not in {*b}] for a, b in ((was, now), (now, was)))
    if missing or added:
        words = [
            (f"{first_names(missing)}, which this one lacks", missing),
            (f"without {first_names(added)}", added),
        ]
        return "other parameters: " + ", and ".join(text for text, names in words if names)
    sizes = [
        [len(group) if isinstance(group, list) else 0 for group in saved],
        [len(group) for group in own],
    ]
    odd = [name for name, other in zip(was, now, strict=False) if name != other]
    order = ""
    if odd:
        order = f", in another order from {odd[0]} on"
    return f"other parameter groups: of {sizes[0]} parameters, here of {sizes[1]}{order}"


def _same_shape(manifest: Manifest, own: Coordinates) -> bool:
    return (manifest.replicas, manifest.shards) == (own.replicas, own.shards)


def own_file(saved: CheckpointReader, own: Coordinates) -> ShardReader:
    """The file with the saved state of this rank. It may be the only file of the checkpoint on this
    node.

    If this run has another number of replicas or shards, it is the first file of the checkpoint.
    """
    if _same_shape(saved.manifest, own):
        return saved.file(own.replica, own.shard)
    return saved.file(0, 0)


def _option(key: str, current: Any, saved: Any) -> Any:
    """Returns the saved value of an option of a parameter group.

    Raises `CorruptCheckpoint` if its type differs from that of `current`.
    """
    current = python_number(current)  # numbers of NumPy were saved as Python numbers
    if isinstance(current, tuple | list) and isinstance(saved, list) and len(current) == len(saved):
        return type(current)(
            _option(key, inner, other) for inner, other in zip(current, saved, strict=True)
        )
    number = all(value is None or _is_number(value) for value in (current, saved))
    switch = isinstance(current, bool | None) and isinstance(saved, bool | None)
    if not (number or switch or (isinstance(current, str) and isinstance(saved, str))):
        raise CorruptCheckpoint(
            f"the option {key} was saved as {str(saved)[:60]!r}, is {current!r} here"
        )
    return saved


def _tensor_option(key: str, current: Any, saved: Any, is_own: bool) -> Any:
    """Returns the value of an option that was saved as a tensor, in the type of the `current`
    value. `is_own` is True if an argument of the optimizer sets the option.
    """
    if isinstance(current, Tensor):
        return current.new_tensor(saved)
    if is_own:
        return _option(key, current, saved)
    if isinstance(saved, list):
        return torch.tensor(saved)
    return saved


def _of_others(current: Any, saved: Any) -> Any:
    """Returns the saved value of an option that no argument of the optimizer sets, such as an
    option of a scheduler."""
    if isinstance(current, tuple) and isinstance(saved, list):
        return tuple(saved)
    return saved


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _load_generators(source: ShardReader, model: nn.Module) -> str:
    """Sets the random generators of this rank to the saved states.

    Returns in words which generators start anew, because the saved run used another kind of device.
    """
    found = generators(model)
    for key in found.keys() & source.keys:
        found[key].set_state(source.tensor(key))
    anew = [key.removeprefix("generator.") for key in found if key not in source]
    if anew:
        return f"; the random generator of {', '.join(anew)} was not saved and starts anew"
    return ""


def load_base_state(
    file: ShardReader | ReplicaFiles,
    source: Elastic | ShardReader,
    optimizer: Replicated,
    name: str,
    parameter: Tensor,
    alike: bool = False,
) -> None:
    """Replaces the base optimizer's state of one parameter.

    `file` has the keys, boxes (parts of whole tensors) and numbers; `source` reads the tensors.
    """
    prefix = f"optimizer.{name}."
    state: dict[str, Any] = {
        _entry(k, prefix): v for k, v in file.values.items() if k.startswith(prefix)
    }
    if not all(isinstance(value, int | float | None) for value in state.values()):
        raise CorruptCheckpoint(f"the state of {name} holds {str(state)[:60]}, must be numbers")
    for key in [key for key in file.keys if key.startswith(prefix)]:
        if isinstance(source, ShardReader):
            tensor, whole = _stored(source, key, parameter)
        else:
            tensor = _assembled(file, source, key, parameter, alike)
            whole = tuple(parameter.shape)
        if key not in file.on_host:
            tensor = tensor.to(local(parameter).device)
        tensor = _in_order_of(local(parameter).detach(), tensor)
        # the saved tensor was a DTensor, or the model was not sharded when it was saved
        wrapped = key in file.wrapped or (key in file.boxes and f"model.{name}" not in file.wrapped)
        if wrapped:
            tensor = _as_dtensor(parameter, tensor, whole)
        state[_entry(key, prefix)] = tensor
    if state:
        optimizer.base.state[parameter] = state
    else:
        optimizer.base.state.pop(parameter, None)


def _in_order_of(weight: Tensor, tensor: Tensor) -> Tensor:
    """Returns `tensor` with the strides of `weight`, if their shapes are equal: a fused step reads
    both tensors in the order in which their elements lie in memory.
    """
    if tensor.shape != weight.shape or tensor.stride() == weight.stride():
        return tensor
    strided = torch.empty_like(weight, dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


def _stored(source: ShardReader, key: str, parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """One tensor of the optimizer's state from this rank's file, and the shape of the whole tensor.

    The shape is () if the tensor was not sharded.
    """
    tensor = source.tensor(key)
    box = source.boxes.get(key)
    whole: tuple[int, ...] = ()
    if box:
        whole = box.whole
    if whole == tuple(parameter.shape) and tensor.shape != local(parameter).shape:
        raise CorruptCheckpoint(
            f"{key} has shape {tuple(tensor.shape)}, not {tuple(local(parameter).shape)}"
        )
    return tensor, whole


def _assembled(
    file: ShardReader | ReplicaFiles, source: Elastic, key: str, parameter: Tensor, alike: bool
) -> Tensor:
    """One tensor of the optimizer's state from the files of several ranks."""
    if key not in file.boxes:
        return source.own(key, alike)
    if file.boxes[key].whole != tuple(parameter.shape):
        raise ValueError(
            f"{key} is not sharded like its parameter: resume with the saved number of shards"
        )
    return source.agreed(key, Box.of(parameter), alike, some=True)


def _entry(key: str, prefix: str) -> str:
    """Returns the key of an entry in the optimizer's own state: `key` without `prefix`.

    The prefix contains the name of the parameter. It is unambiguous: no parameter's name begins
    with another parameter's name and a dot.

    Raises `ValueError` for a key with a dot. Only earlier versions wrote such keys, which even
    these versions could not read.
    """
    spelled = key.removeprefix(prefix)
    if "." in spelled:
        raise ValueError(
            f"{key} is the optimizer state {spelled!r}, saved by an earlier version of detonation,"
            " which did not distinguish such keys from names of parameters: save a new checkpoint"
            " with the installed version, or rename the state"
        )
    return entry_of(spelled)


def _as_dtensor(parameter: Tensor, tensor: Tensor, whole: tuple[int, ...]) -> Tensor:
    """Returns a DTensor that is sharded like `parameter` and has `tensor` as its local part. If
    `parameter` is a plain tensor, returns `tensor` unchanged.
    """
    if not isinstance(parameter, DTensor):
        return tensor
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(whole),
        stride=stride,
    )


def _load_local_state(source: ShardReader, replicators: Sequence[Replicator]) -> None:
    """Loads the local state of a shard, if this run has as many replicas and shards as the saved
    run."""
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
    """Merges the local states of all replicas; returns a description of the state that was
    dropped.
    """
    dropped = ""
    for level, replicator in enumerate(replicators):
        local_state = replicator.local_state()
        boxes = {name: Box.of(parameter) for name, parameter in replicator.parameters.items()}
        prefix = f"replica.{level}."
        merged = _merged(source, prefix, local_state.named(), boxes)
        dropped += _merge_server_residual(source, prefix, replicator.channel, boxes, merged)
        local_state.load(merged)
    return dropped


def _merged(
    source: Elastic, prefix: str, current: Mapping[str, Tensor], boxes: Mapping[str, Box]
) -> dict[str, Tensor]:
    """The local state of one replicator, merged from the saved replicas. Server residuals are zero
    in this state, because `_merge_server_residual` adds them."""
    merged = {}
    for key, tensor in current.items():
        kind, _, name = key.partition(".")
        full_key = prefix + key
        if kind == _MEMORY:
            merged[key] = _fitting(full_key, tensor, source.memory(full_key, boxes[name]))
        elif kind == _SERVER_RESIDUAL:
            merged[key] = torch.zeros_like(tensor)
        elif key in _BY_REPLICA:
            # keep this replica's initial value, because each saved value belongs to another replica
            merged[key] = tensor
        else:
            merged[key] = _fitting(full_key, tensor, source.agreed(full_key, boxes.get(name)))
    return merged


def _merge_server_residual(
    source: Elastic,
    prefix: str,
    channel: Channel,
    boxes: dict[str, Box],
    merged: dict[str, Tensor],
) -> str:
    """Adds the saved server residual (what owners have aggregated and not sent) to the `merged`
    state: to the residuals of the new owners or, without owners, to the memory of unsent values.

    If this run has neither owners nor a memory, drops the residual and returns a text about it.
    """
    residual = source.server_residual(prefix + _SERVER_RESIDUAL, channel, boxes)
    if residual is None:
        return ""
    if _SERVER_RESIDUAL in merged:
        merged[_SERVER_RESIDUAL] = owned_rows(residual, channel)
        return ""
    if channel.memory is not None:
        for name, piece in zip(boxes, residual, strict=True):
            merged[f"{_MEMORY}.{name}"] += piece
        return ""
    squares = [float(piece.double().square().sum()) for piece in residual]
    norm = sum(squares) ** 0.5
    return (
        f"; dropped: the server residual, norm {norm:.3g}: this run has neither owners nor a memory"
    )


def _fitting(key: str, target: Tensor, source: Tensor) -> Tensor:
    """Returns `source`. Raises `ValueError` if the shape or dtype of `source` differs from that of
    `target`.
    """
    _require_alike(key, target, source.dtype, tuple(source.shape))
    return source


def _require_alike(key: str, target: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tuple(target.shape) != shape or target.dtype != dtype:
        now = f"{target.dtype} {tuple(target.shape)}"
        raise ValueError(
            f"{key} was saved as {dtype} {shape}, but is {now} here: load into the saved model"
        )
