"""Snapshot: all that one rank needs to go on, copied to the host, each tensor with its place in the whole one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.manifest import Untrustworthy
from detonation.core.flat.layout import local
from detonation.core.optimizer.replicated import Replicated


@dataclass(frozen=True)
class Box:
    """The part of a tensor of shape `whole` that begins at `offset` and has shape `shape`."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Box":
        """Where the local part of `tensor` lies."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return cls(tuple(tensor.shape), tuple(chunk.offsets), tuple(tensor.to_local().shape))

    def overlap(self, other: "Box") -> tuple[slice, ...] | None:
        """The part that both have, in the coordinates of the whole; None where they have none."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [min(a, b) for a, b in zip(self.ends, other.ends, strict=True)]
        return tuple(map(slice, starts, ends)) if all(a < b for a, b in zip(starts, ends, strict=True)) else None

    @property
    def ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offset, self.shape, strict=True)]

    def within(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """`part` of the whole in the coordinates of this box."""
        return tuple(slice(s.start - o, s.stop - o) for s, o in zip(part, self.offset, strict=True))


@dataclass(frozen=True)
class Snapshot:
    """Tensors of the host by key; `boxes` of those that are cut like a parameter; plain `values`; option groups.

    wrapped: keys of DTensors. on_host: keys of tensors that were on the host though their parameter is not.
    """

    tensors: dict[str, Tensor]
    boxes: dict[str, Box]
    wrapped: list[str]
    on_host: list[str]
    values: dict[str, Any]
    groups: list[dict[str, Any]]

    @property
    def rest(self) -> dict[str, Any]:
        """All but the tensors, as JSON."""
        boxes = {key: [box.whole, box.offset, box.shape] for key, box in self.boxes.items()}
        marks = {"wrapped": self.wrapped, "on_host": self.on_host}
        return {"boxes": boxes, **marks, "values": self.values, "groups": self.groups}


@torch.no_grad()
def take(model: nn.Module, optimizer: Replicated) -> Snapshot:
    """Copies the state of this rank: weights that the replicas agreed on last, optimizer, private state, generators.

    Waits for messages on their way. Raises `ValueError` where the optimizer keeps something that is no tensor or plain
    value.
    """
    optimizer.set_up()
    with optimizer.settled():
        found = {f"model.{name}": tensor for name, tensor in weights(model).items()}
        values: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.base.state.get(parameter, {}).items():
                where = f"optimizer.{name}.{key}"
                if isinstance(value, Tensor):
                    found[where] = value
                else:
                    values[where] = _plain(where, value)
        found |= {f"replica.{key}": tensor for key, tensor in optimizer.private().items()}
        boxes = _boxes(cut_like(model, found))
        tensors = {key: _copy(tensor) for key, tensor in found.items()} | _generators(model)
        wrapped = [key for key, tensor in found.items() if isinstance(tensor, DTensor)]
        home = next(local(parameter).device.type for parameter in model.parameters())
        on_host = [key for key, tensor in found.items() if tensor.device.type == "cpu" != home]
    return Snapshot(tensors, boxes, wrapped, on_host, values, groups(model, optimizer))


def _boxes(like: Mapping[str, Tensor]) -> dict[str, Box]:
    """The box of each tensor; asking torch takes long, and most are cut as others are."""
    known: dict[object, Box] = {}
    boxes = {}
    for key, tensor in like.items():
        way = (tensor.shape, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else tensor.shape
        boxes[key] = known[way] = known[way] if way in known else Box.of(tensor)
    return boxes


def cut_like(model: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each key whose tensor is cut as a parameter is (or by itself): what tells how."""
    parameters = dict(model.named_parameters())
    like: dict[str, Tensor] = {}
    for key, tensor in found.items():
        parameter = parameters.get(about(key))
        if isinstance(tensor, DTensor):
            like[key] = tensor
        elif parameter is not None and local(parameter).shape == tensor.shape:
            like[key] = parameter
    return like


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that a model saves, by name, as shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation the gathered parameters stand in for the shards
    persistent = model.state_dict().keys()
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def groups(model: nn.Module, optimizer: Replicated) -> list[dict[str, Any]]:
    """The options of each parameter group, and the names of its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {
            "parameters": [names.get(id(parameter), "") for parameter in group["params"]],
            "options": {k: _plain(k, v) for k, v in group.items() if k != "params" and not isinstance(v, Tensor)},
            "tensors": {k: _plain(k, v.tolist()) for k, v in group.items() if isinstance(v, Tensor)},
        }
        for group in optimizer.param_groups
    ]


def generators(model: nn.Module) -> dict[str, torch.Generator]:
    """torch's own sources of randomness on this rank."""
    found = {"generator.cpu": torch.default_generator}
    if any(parameter.is_cuda for parameter in model.parameters()):
        found["generator.cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def _generators(model: nn.Module) -> dict[str, Tensor]:
    return {key: generator.get_state().clone() for key, generator in generators(model).items()}


def about(key: str) -> str:
    """The parameter that `key` is about: model.<name>, optimizer.<name>.<what>, replica.<level>.<what>.<name>."""
    part, _, rest = key.partition(".")
    if part == "optimizer":
        return rest.rpartition(".")[0]
    return rest if part == "model" else ".".join(rest.split(".")[2:])


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host that shares memory with nothing."""
    here = local(tensor.detach())
    return here.to("cpu", memory_format=torch.contiguous_format, copy=True).contiguous()


def _plain(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    raise ValueError(f"{key} is {value!r} of type {type(value).__name__}: a checkpoint holds tensors and plain values")


def box_from(value: Any) -> Box:
    """The box that `rest` spelled. Raises `Untrustworthy`."""
    if isinstance(value, list) and len(value) == 3 and all(isinstance(part, list) for part in value):
        whole, offset, shape = value
        numbers = [*whole, *offset, *shape]
        if len(whole) == len(offset) == len(shape) and all(type(n) is int and n >= 0 for n in numbers):
            return Box(tuple(whole), tuple(offset), tuple(shape))
    raise Untrustworthy(f"a box is {str(value)[:60]!r}, must be three lists of as many sizes")
