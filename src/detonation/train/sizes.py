"""Sizes: whether a run would send more than full synchronisation, by arithmetic, before any process starts."""

import torch
from torch import nn

import detonation as dt
from detonation import models
from detonation.core.traffic import check
from detonation.train.config import Config


def check_sizes(config: Config) -> None:
    """Raises `LargerThanDense`, as the first step would, where a level would send more than full synchronisation."""
    with torch.device("meta"):
        model = models.build(config.model.name, config.model.arguments)
    for level in config.levels:
        scheme = dt.scheme(level.scheme.name, level.scheme.arguments)
        for shard in range(config.mesh.shards if scheme.signal != "nothing" else 0):
            check(scheme, scheme.codec.layout(local_shapes(model, shard, config.mesh.shards)), level.replicas)


def local_shapes(model: nn.Module, shard: int, shards: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters on one shard, by name: FSDP2 deals out equal runs of first indices."""
    shapes = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first, *rest = parameter.shape
            each = -(-first // shards)
            shapes[name] = (max(0, min(each, first - shard * each)), *rest)
    return shapes
