"""What a rank must keep to go on exactly: weights, the base optimizer's state, and what is private to the replica."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import detonation as dt
from detonation.core.flat import local
from detonation.train.setup import Session


def collect(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's tensors by flat key, and everything else as JSON values."""
    tensors = {f"model.{name}": local(tensor) for name, tensor in _weights(session).items()}
    names = {id(parameter): name for name, parameter in session.model.named_parameters()}
    values: dict[str, Any] = {}
    sharded: list[str] = []
    for parameter, state in session.base.state.items():
        for key, value in state.items():
            where = f"optimizer.{names[id(parameter)]}.{key}"
            if isinstance(value, Tensor):
                tensors[where] = local(value)
                sharded += [where] if isinstance(value, DTensor) else []
            else:
                values[where] = value
    tensors |= {f"replica.{key}": tensor for key, tensor in dt.replica_state(session.optimizer).items()}
    # A file holds every tensor in its own memory: views and tied weights are written out.
    whole = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    return whole, {"values": values, "sharded": sharded}


def restore(session: Session, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Puts what `collect` returned on this rank into `session`."""
    with torch.no_grad():
        for name, tensor in _weights(session).items():
            local(tensor).copy_(tensors[f"model.{name}"])
    for name, parameter in session.model.named_parameters():
        prefix = f"optimizer.{name}."
        state = {key.removeprefix(prefix): value for key, value in rest["values"].items() if key.startswith(prefix)}
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = _like(parameter, tensor) if key in rest["sharded"] else tensor
        if state:
            session.base.state[parameter] = state
    private = {key.removeprefix("replica."): tensor for key, tensor in tensors.items() if key.startswith("replica.")}
    dt.load_replica_state(session.optimizer, private)


def _like(parameter: Tensor, tensor: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    stride = parameter.stride()
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)


def _weights(session: Session) -> dict[str, Tensor]:
    persistent = session.model.state_dict().keys()
    buffers = {name: tensor for name, tensor in session.model.named_buffers() if name in persistent}
    return {**dict(session.model.named_parameters()), **buffers}
