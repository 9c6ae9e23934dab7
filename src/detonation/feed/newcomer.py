"""A newcomer: the state of a follower as the state of a replica that goes on from there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from detonation.checkpoint.files.reader import Box
from detonation.core.agreement.safety import Safety
from detonation.core.link.communicator import Axis
from detonation.core.link.elastic_communicator import ElasticCommunicator
from detonation.core.optimizer.gathered import local_parameters
from detonation.core.optimizer.reconfigure import welcome
from detonation.core.optimizer.replicate import replicate
from detonation.core.optimizer.replicated import Replicated
from detonation.feed.shard import MakeOptimizer, ShardFollower, base_optimizer, scheme_of_training
from detonation.feed.shared_state import is_shared, part_of


@torch.no_grad()
def joined_optimizer(
    model: nn.Module, shards: Sequence[ShardFollower], make: MakeOptimizer | None, axis: Axis, safety: Safety
) -> Replicated:
    """An optimizer over the parameters of `model` along `axis`, at the step of the shards, with an empty memory.

    Collective over `axis`; see `Follower.join`.
    """
    first = shards[0]
    about, saved, before = first.about, first.saved, first.optimizer
    assert saved is not None and before is not None
    if len(shards) > 1 and axis.size() > 1:
        raise ValueError(f"training has {len(shards)} shards, this model is whole: make it with detonation.shard first")
    parameters = local_parameters(model)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in about["trained"])
    base = base_optimizer(make, about, saved.groups, parameters)
    for mine, group in zip(base.param_groups, before.param_groups, strict=True):
        mine |= {key: value for key, value in group.items() if key != "params"}
    for name, parameter in parameters.items():
        views = [local_parameters(shard.module)[name] for shard in shards]
        states = [s.optimizer.base.state.get(view, {}) for s, view in zip(shards, views, strict=True) if s.optimizer]
        base.state[parameter].update(
            {key: _whole([state[key] for state in states], _boxes(shards, name), parameter) for key in states[0]}
        )
        if not states[0]:
            del base.state[parameter]
    chosen = scheme_of_training(about)
    alike = {key: about[key] for key in ("clip", "balance", "seed", "kernels")}
    optimizer = replicate(base, model, axis, chosen, **alike, safety=safety)
    _hand_over(shards, optimizer, parameters)
    if isinstance(axis, ElasticCommunicator):
        welcome(optimizer.build(), optimizer.settings, optimizer.param_groups, newcomer=True)
        optimizer.step_count = before.step_count
        for replicator in optimizer.build():
            replicator.go_on()
        return optimizer
    optimizer.resume_at(before.step_count)
    return optimizer


def _hand_over(shards: Sequence[ShardFollower], optimizer: Replicated, parameters: dict[str, Tensor]) -> None:
    """Gives the replicators the state that all replicas share."""
    found = [shard.optimizer.local_state() for shard in shards if shard.optimizer is not None]
    for level, replicator in enumerate(optimizer.build()):
        state: dict[str, Tensor] = {}
        for key, tensor in replicator.local_state().named().items():
            full, name = f"{level}.{key}", key.partition(".")[2]
            if not is_shared(full) or full not in found[0]:
                state[key] = tensor.clone()  # empty
            elif name in parameters:
                state[key] = _whole([each[full] for each in found], _boxes(shards, name), tensor)
            else:
                state[key] = found[0][full]
        replicator.local_state().load(state)


def _boxes(shards: Sequence[ShardFollower], name: str) -> list[Box | None]:
    if len(shards) == 1:
        return [None]
    return [shard.saved.boxes[f"model.{name}"] for shard in shards if shard.saved is not None]


def _whole(parts: Sequence[Any], boxes: Sequence[Box | None], like: Tensor) -> Any:
    """The parts of a tensor as one, in memory of its own; other values are those of the first shard."""
    first, box = parts[0], boxes[0]
    if not isinstance(first, Tensor):
        return first
    if box is None or not first.ndim or first.shape != box.shape:
        return first.clone()
    whole = torch.empty(like.shape, dtype=first.dtype, device=first.device)
    for part, each in zip(parts, boxes, strict=True):
        assert each is not None
        part_of(whole, each).copy_(part)
    return whole
