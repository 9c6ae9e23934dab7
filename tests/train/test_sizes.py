"""The arithmetic of sizes is that of the shards that FSDP2 makes; settings that do not fit together are told of."""

import pytest

import detonation as dt
import worlds
from detonation.core.flat.tensors import local
from detonation.train.loop.checks import local_shapes, misfits
from zoo import Menagerie, built


def sharded(mesh):
    model = dt.shard(built(Menagerie), mesh)
    return {name: tuple(local(p).shape) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("shards", [1, 3])
def test_local_shapes_are_those_of_real_shards(shards):
    whole = built(Menagerie)
    foreseen = [local_shapes(whole, shard, shards) for shard in range(shards)]
    assert worlds.run(sharded, 1, shards) == foreseen


MISFITS = {
    "schedule.warmup is 6, all of the 6 steps, so the learning rate only rises: set a smaller warmup": [
        "schedule.warmup=6"
    ],
    "train.clip changes nothing for SignSGD without momentum, which uses only signs: leave it out": [
        "train.clip=1.0",
        "optimizer.name=SignSGD",
        "optimizer.lr=0.01",
    ],
    "diloco exchanges every 9 steps, but the run has 6: replicas exchange only at the end; choose a smaller every": [
        "scheme.name=diloco",
        "scheme.every=9",
    ],
    "optimizer.embedding_lr_ratio is 30, but Muon was best at 0.3, and 30 is the ratio of AdamW"
    " (docs/findings.md): leave it out, or tune it for Muon": [
        "optimizer.name=Muon",
        "optimizer.lr=0.01",
        "optimizer.embedding_lr_ratio=30",
    ],
}


@pytest.mark.parametrize("line", MISFITS)
def test_settings_that_do_not_fit_together_are_told_of(tiny, line):
    assert misfits(tiny(*MISFITS[line])) == [line]


def test_settings_that_fit_are_not(tiny):
    fitting = (
        [],
        ["optimizer.name=SignSGD", "optimizer.lr=0.01", "optimizer.momentum=0.9", "train.clip=1.0"],
        ["scheme.name=none"],
        ["optimizer.name=Muon", "optimizer.lr=0.01", "optimizer.embedding_lr_ratio=0.3"],
        ["optimizer.name=AdamW", "optimizer.lr=0.01", "optimizer.embedding_lr_ratio=30"],
    )
    assert not any(
        misfits(tiny(*sets)) for sets in (*fitting, ["scheme.name=full", "scheme.precision=fp32"])
    )
