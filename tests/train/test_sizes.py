"""The arithmetic of sizes is that of the shards that FSDP2 makes."""

import pytest

import detonation as dt
import worlds
from detonation.core.flat.tensors import local
from detonation.train.recipe.sizes import local_shapes
from zoo import Menagerie, built


def sharded(mesh):
    model = dt.shard(built(Menagerie), mesh)
    return {name: tuple(local(p).shape) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("shards", [1, 3])
def test_local_shapes_are_those_of_real_shards(shards):
    whole = built(Menagerie)
    foreseen = [local_shapes(whole, shard, shards) for shard in range(shards)]
    assert worlds.run(sharded, 1, shards) == foreseen
