"""The state of one rank under the names that saving and loading share, and the copy of this state
on the host.
"""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.extra_values import encoded_number
from detonation.checkpoint.files.reader import MOVED, Box
from detonation.choices import first_names
from detonation.core.agreement import persistent_buffers, python_number
from detonation.core.compute.checksum import checksum
from detonation.core.flat.padding_rows import used_rows
from detonation.core.flat.tensors import Piece, local
from detonation.core.link import Coordinates, sizes_of
from detonation.core.optimizer import Replicated, local_parameters
from detonation.core.replicator import Replicator
from detonation.gates.closeness import Closeness
from detonation.wire.units import shard_state


def run_identity(optimizer: Replicated) -> dict[str, Any]:
    """The levels of replication, the seed and the class of the optimizer, as stored in the
    manifest.

    A resumed run must have the same levels, seed and optimizer class.
    """
    levels = [{"scheme": scheme.name, **scheme.identity} for _, scheme in optimizer.levels]
    return {
        "levels": json.loads(json.dumps(levels)),
        "seed": optimizer.settings.seed,
        "optimizer": type(optimizer.base).__name__,
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters (as shards) and the persistent buffers of `model`, by name."""
    return {**local_parameters(model), **persistent_buffers(model)}


def frozen_weights(model: nn.Module) -> set[str]:
    """Names of parameters that require no gradient, which a checkpoint may omit."""
    return {
        name for name, parameter in local_parameters(model).items() if not parameter.requires_grad
    }


def groups(model: nn.Module, optimizer: Replicated) -> list[dict[str, Any]]:
    """Options of each parameter group, and the names of its parameters.

    Raises `ValueError` for an option that is neither a tensor nor a plain value.
    """
    names = {id(parameter): name for name, parameter in local_parameters(model).items()}
    return [
        {
            "parameters": [names.get(id(parameter), "") for parameter in group["params"]],
            "options": {
                k: plain(k, python_number(v))
                for k, v in group.items()
                if k != "params" and not isinstance(v, Tensor)
            },
            "tensors": {k: plain(k, v.tolist()) for k, v in group.items() if isinstance(v, Tensor)},
        }
        for group in optimizer.param_groups
    ]


def generators(model: nn.Module) -> dict[str, torch.Generator]:
    """Default random generators of torch on this rank, by key."""
    found = {"generator.cpu": torch.default_generator}
    if any(parameter.is_cuda for parameter in model.parameters()):
        found["generator.cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def plain(key: str, value: Any) -> Any:
    """Returns `value`, with tuples converted to lists. Raises `ValueError` if it is not a plain
    value.
    """
    if value is None or isinstance(value, bool | int | float):
        return encoded_number(value)
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [plain(key, inner) for inner in value]
    raise ValueError(
        f"{key} is {value!r} of type {type(value).__name__}: a checkpoint holds tensors and plain"
        " values"
    )


FROZEN = "frozen."
"""Prefix of the keys under which a checkpoint describes the frozen weights that it omits."""


def frozen_marks(model: nn.Module) -> dict[str, list[Any]]:
    """For each frozen weight, by name: the checksum of the local shard, and the position of this
    shard in the whole weight (see `Box`). Waits for the device.
    """
    parameters = local_parameters(model)
    found: dict[str, list[Any]] = {}
    for name in sorted(frozen_weights(model)):
        box = Box.of(parameters[name])
        number = int(checksum(local(parameters[name])))
        found[name] = [number, [*box.whole], [*box.offset], [*box.shape]]
    return found


def omitted_weights(model: nn.Module, keys: Collection[str], path: Path) -> set[str]:
    """Names of the frozen weights of `model` that a file of the checkpoint `path` omits. The file
    has these `keys`.

    Raises `ValueError` if the file omits weights that `model` trains.
    """
    frozen = frozen_weights(model)
    omitted = {key.removeprefix(FROZEN) for key in keys if key.startswith(FROZEN)}
    if not any(f"model.{name}" in keys for name in frozen):
        omitted |= frozen
    if trained := [name for name in local_parameters(model) if name in omitted - frozen]:
        raise ValueError(
            f"{path} leaves out the frozen weights {first_names(trained)}, which this run trains:"
            " give the model these weights, freeze them (requires_grad_(False)), and unfreeze them"
            " after the load"
        )
    return omitted


_log = logging.getLogger("detonation.checkpoint")
PADDING = "padding."
"""Prefix of the keys under which a checkpoint names the embeddings whose padding rows get
gradients."""


FIRST_OPTIONS = "first options"
"""Key under which a checkpoint holds the options that its run gave to `replicate`."""
RUN = "run"
"""Key under which a checkpoint holds the id of its run."""
COMPLETED = "completed"
"""Key under which a checkpoint says how often rounds were completed since its step."""

LEVEL_SIZES = "level sizes"
"""Key under which a checkpoint holds the number of replicas of each level, innermost first."""


def level_sizes_in(values: Mapping[str, Any]) -> list[int] | None:
    """The saved number of replicas of each level; None if an older version wrote the checkpoint."""
    sizes = values.get(LEVEL_SIZES)
    if isinstance(sizes, list) and all(type(size) is int for size in sizes):
        return sizes
    return None


def point_in(values: Mapping[str, Any]) -> tuple[str, int | None]:
    """Returns the id of the run, and how often open rounds were completed since the last step (see
    `RunPoint`). Both are in `values`, the values of a checkpoint that are no tensors. Returns ""
    and None for a checkpoint of an older version.
    """
    known = values.get(RUN)
    completed = values.get(COMPLETED)
    if not isinstance(known, str):
        known = ""
    if type(completed) is not int:
        completed = None
    return known, completed


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank that a checkpoint saves.

    tensors: copies on the host, by key. boxes: for each tensor that is sharded like a parameter,
    the part of the whole tensor that this rank has. wrapped: keys of DTensors. on_host: keys of
    tensors that are on the host although the parameters are not. values: plain values by key.
    groups: the parameter groups.
    """

    tensors: dict[str, Tensor]
    boxes: dict[str, Box]
    wrapped: list[str]
    on_host: list[str]
    values: dict[str, Any]
    groups: list[dict[str, Any]]

    @property
    def rest(self) -> dict[str, Any]:
        """Everything except the tensors, in a form that JSON can represent."""
        boxes = {key: [box.whole, box.offset, box.shape] for key, box in self.boxes.items()}
        marks = {"wrapped": self.wrapped, "on_host": self.on_host}
        return {"boxes": boxes, **marks, "values": self.values, "groups": self.groups}


@torch.no_grad()
def take_snapshot(model: nn.Module, optimizer: Replicated, frozen: bool = True) -> Snapshot:
    """Copies the weights on which all replicas agreed last, and this rank's optimizer state, local
    state and random generators.

    Waits for messages in flight. frozen: True to copy parameters that require no gradient.

    Raises:
        ValueError: the optimizer holds something that is neither a tensor nor a number, or belongs
            to no parameter.
    """
    optimizer.set_up()
    if odd := [key for key in optimizer.base.state if not isinstance(key, Tensor)]:
        raise ValueError(
            f"the optimizer keeps a state {odd[0]!r} without a parameter: it cannot be saved"
        )
    _warn_of_extra_state(model)
    omitted: dict[str, list[Any]] = {}
    if not frozen:
        omitted = frozen_marks(model)
    left_out = omitted.keys()
    found = {
        f"model.{name}": tensor for name, tensor in weights(model).items() if name not in left_out
    }
    of_base, values = _base_state(model, optimizer)
    found |= of_base
    found |= {f"replica.{key}": tensor for key, tensor in optimizer.local_state().items()}
    wire = {
        k: t for k, t in shard_state(model).items() if k.removeprefix("reference.") not in left_out
    }
    found |= {f"shard.0.{key}": tensor for key, tensor in wire.items()}
    values |= {FROZEN + name: mark for name, mark in omitted.items()}
    values |= {PADDING + name: 1 for name in used_rows(model)}
    values[FIRST_OPTIONS] = optimizer.first_options
    values[LEVEL_SIZES] = sizes_of(optimizer.levels)
    if run := optimizer.run.use():
        values[RUN] = run
    if optimizer.run.completed is not None:
        values[COMPLETED] = optimizer.run.completed
    if isinstance(optimizer.closeness, Closeness):
        values |= {MOVED + name: moved for name, moved in optimizer.closeness.movements().items()}
    # make contiguous copies on the host that share no memory with the model
    tensors = {
        key: (
            local(tensor.detach())
            .to("cpu", memory_format=torch.contiguous_format, copy=True)
            .contiguous()
        )
        for key, tensor in found.items()
    }
    tensors |= {key: generator.get_state().clone() for key, generator in generators(model).items()}
    wrapped = [key for key, tensor in found.items() if isinstance(tensor, DTensor)]
    home = next(local(parameter).device.type for parameter in model.parameters())
    on_host = [key for key, tensor in found.items() if tensor.device.type == "cpu" != home]
    return Snapshot(
        tensors, _boxes(model, found), wrapped, on_host, values, groups(model, optimizer)
    )


def _base_state(
    model: nn.Module, optimizer: Replicated
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and numbers in the state of the base optimizer, by key.

    Raises `ValueError` for any other value.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in local_parameters(model).items():
        for key, value in optimizer.base.state.get(parameter, {}).items():
            full_key = state_key(name, key)
            if isinstance(value, Tensor):
                tensors[full_key] = value
            elif isinstance(value, int | float | None):
                values[full_key] = encoded_number(value)
            else:
                raise ValueError(
                    f"{full_key} is {str(value)[:60]}, but an optimizer state must be a tensor or a"
                    " number"
                )
    return tensors, values


Held = Mapping[int, Mapping[str, Tensor]]
"""Pieces of parameters that this rank holds, by number of the shard and by name. For a rank with
one whole shard the inner mapping is {}.
"""


def held_shards(model: nn.Module, optimizer: Replicated) -> tuple[Coordinates, Held]:
    """The coordinates of the shard for which this rank saves its first file, and all shards that
    this rank holds.

    All replicas have equally many shards, even if they have different numbers of ranks: a rank of a
    smaller replica then has several shards.
    """
    axis = optimizer.levels[0][0]
    own = optimizer.coordinates
    cut = getattr(axis, "cut", None)
    if cut is None:
        return own, {own.shard: {}}
    parts = [*cut(local_parameters(model)).values()]
    held = {shard: pieces for shard, pieces in enumerate(parts) if pieces}
    return Coordinates(own.replica, own.replicas, min(held), len(parts)), held


def replicators_of_shards(optimizer: Replicated, held: Held) -> dict[int, list[Replicator]]:
    """Returns, for each shard index in `held`, the replicators of the parameters in this shard.
    `held` has all shards that this rank holds (see `held_shards`).
    """
    found: dict[int, list[Replicator]] = {shard: [] for shard in held}
    shard_of = {
        piece.ranks: n
        for n, mine in held.items()
        for piece in mine.values()
        if isinstance(piece, Piece)
    }
    all_pieces = [
        (each.link, p) for each in optimizer.build() for p in each.parameters.values()
    ]  # a replicator of whole parameters belongs to the first shard
    of_links = {
        link: shard_of[piece.ranks] for link, piece in all_pieces if isinstance(piece, Piece)
    }
    for replicator in optimizer.build():
        found[of_links.get(replicator.link, next(iter(held)))].append(replicator)
    return found


def split_snapshot(snapshot: Snapshot, optimizer: Replicated, held: Held) -> dict[int, Snapshot]:
    """Cuts `snapshot` into the shards that this rank holds. Returns the parts by number of the
    shard.

    Raises `ValueError` for a state of the optimizer that cannot be cut like its parameter.
    """
    if not any(held.values()):
        return dict.fromkeys(held, snapshot)
    number = {id(each): i for i, each in enumerate(optimizer.build())}
    found = {}
    for shard, replicators in replicators_of_shards(optimizer, held).items():
        part = replace(snapshot, tensors={}, boxes={})
        _cut_shared(snapshot, part, held[shard])
        for level, replicator in enumerate(replicators):
            _renumber(snapshot, part, replicator, number[id(replicator)], level)
        found[shard] = part
    return found


def _cut_shared(snapshot: Snapshot, part: Snapshot, pieces: Mapping[str, Tensor]) -> None:
    """Adds all tensors except the local state to `part`. Sharded tensors are cut like `pieces`."""
    for key, tensor in snapshot.tensors.items():
        if key.startswith("replica."):
            continue
        piece = pieces.get(_parameter_of(key))
        box = snapshot.boxes.get(key)
        if isinstance(piece, Piece) and box is not None:
            if box.whole != tuple(piece.whole.shape):
                raise ValueError(
                    f"{key} is not cut like its parameter, so it cannot be saved if nodes have"
                    " different numbers of ranks: start equally many ranks on each node"
                )
            tensor = tensor[piece.rows].contiguous()
            part.boxes[key] = Box.of(piece)
        part.tensors[key] = tensor


def _renumber(
    snapshot: Snapshot, part: Snapshot, replicator: Replicator, number: int, level: int
) -> None:
    """Copies the local state of `replicator` from `snapshot` to `part`. The keys of this state
    contain `number` in `snapshot`, and `level` in `part`.
    """
    before = f"replica.{number}."
    for key, tensor in snapshot.tensors.items():
        if not key.startswith(before):
            continue
        now = f"replica.{level}.{key.removeprefix(before)}"
        part.tensors[now] = tensor
        piece = replicator.parameters.get(_parameter_of(key))
        if piece is not None and piece.shape == tensor.shape:
            part.boxes[now] = Box.of(piece)


_warned: WeakSet[nn.Module] = WeakSet()  # the models that `_warn_of_extra_state` has inspected


def _warn_of_extra_state(model: nn.Module) -> None:
    """Warns once per model about modules with state other than parameters and buffers, such as fp8
    scales.
    """
    if model in _warned:
        return
    _warned.add(model)
    extra = [
        name
        for name, m in model.named_modules()
        if type(m).get_extra_state is not nn.Module.get_extra_state
    ]
    if extra:
        _log.warning(
            "a checkpoint does not hold the extra state (get_extra_state) of %s",
            ", ".join(extra[:4]),
        )


def _boxes(model: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Box]:
    """The boxes (parts of the whole tensors) of all tensors that are DTensors, or are sharded like
    their parameter."""
    parameters = local_parameters(model)
    boxes = {}
    # Compute only one box (part of a whole tensor) per layout, because torch computes it slowly.
    by_layout: dict[object, Box] = {}
    for key, tensor in found.items():
        like: Tensor | None = tensor
        if not isinstance(tensor, DTensor):
            like = parameters.get(_parameter_of(key))
        if like is None or (like is not tensor and local(like).shape != tensor.shape):
            continue
        layout: object = like.shape
        if isinstance(like, DTensor):
            layout = like.shape, like.device_mesh, like.placements
        if layout not in by_layout:
            by_layout[layout] = Box.of(like)
        boxes[key] = by_layout[layout]
    return boxes


def state_key(name: str, key: object) -> str:
    """Key of an entry of the base optimizer's state. A dot in `key` itself is escaped.

    Raises `ValueError` if `key` is no text, because loading would return it as text.

    >>> state_key("layers.0.weight", "ema.fast"), entry_of("ema%2Efast")
    ('optimizer.layers.0.weight.ema%2Efast', 'ema.fast')
    """
    if not isinstance(key, str):
        raise ValueError(
            f"the optimizer keeps a state of {name} under {key!r} of type {type(key).__name__}: "
            "a checkpoint holds texts as keys, so rename it in the optimizer"
        )
    return f"optimizer.{name}.{key.replace('%', '%25').replace('.', '%2E')}"


def entry_of(spelled: str) -> str:
    """Undoes the escaping of `state_key`: returns the key of an entry in the optimizer's state."""
    return spelled.replace("%2E", ".").replace("%25", "%")


def _parameter_of(key: str) -> str:
    """Name of the parameter in a key.

    Keys are model.<name>, optimizer.<name>.<entry>, replica.<level>.<kind>.<name> or shard.0...
    """
    part, _, rest = key.partition(".")
    if part == "optimizer":
        return rest.rpartition(".")[0]
    if part == "model":
        return rest
    return ".".join(rest.split(".")[2:])
