"""Sizes of a run by arithmetic, before any process starts, and settings that do not fit together."""

import torch
from torch import nn

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.traffic import require_below_dense
from detonation.models import build_model
from detonation.train.recipe.schema import Config


def check_sizes(config: Config) -> None:
    """Raises `LargerThanDense`, as the first step would, where a level would send more than full synchronisation."""
    shards = shard_shapes(config)
    for level in config.levels:
        chosen = scheme(level.scheme.name, level.scheme.arguments)
        for shapes in shards if chosen.signal != "nothing" else []:
            require_below_dense(chosen, chosen.codec.layout(shapes), level.replicas)


def shard_shapes(config: Config) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the trained parameters on each rank of a node, without a model in memory."""
    with torch.device("meta"):
        model = build_model(config.model.name, config.model.arguments)
    return [local_shapes(model, shard, config.mesh.shards) for shard in range(config.mesh.shards)]


def local_shapes(model: nn.Module, shard: int, shards: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters on one shard, by name: FSDP2 deals out equal runs of first indices."""
    shapes = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first, *rest = parameter.shape
            each = -(-first // shards)
            shapes[name] = (max(0, min(each, first - shard * each)), *rest)
    return shapes


def misfits(config: Config) -> list[str]:
    """The settings of `config` that do not fit together, one line each, with what to change."""
    steps, warmup, optimizer = config.train.steps, config.schedule.warmup, config.optimizer
    found = []
    if warmup >= steps:
        found.append(f"schedule.warmup is {warmup}, all of the {steps} steps: the learning rate only rises")
    if config.train.clip and optimizer.name == "SignSGD" and not optimizer.arguments.get("momentum"):
        found.append("train.clip changes nothing for SignSGD without momentum, which moves by signs: leave it out")
    for level in config.levels:
        chosen = scheme(level.scheme.name, level.scheme.arguments)
        every = chosen.round.every
        if every > steps:
            found.append(
                f"{chosen.name} exchanges every {every} steps, but there are {steps}: replicas meet at the end alone; "
                "choose a smaller every"
            )
    return found
