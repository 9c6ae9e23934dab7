"""A run whose nodes are namespaces: the same training, over real links."""

import os
from pathlib import Path

import pytest
from benchmarks.lab import NoNamespaces, namespace_cluster

from detonation.cluster.launch import run_local
from detonation.link_speed import LinkSpeed
from detonation.train.recipe.resolve import Request
from detonation.train.run.joining import RunTask
from detonation.train.run.worker import train_on_rank


def test_training_in_namespaces_is_the_same_training(tiny, train, tmp_path):
    config = tiny("train.steps=2", mesh={"replicas": 2, "shards": 2})
    request = Request(Path("tiny.toml"), out=tmp_path / "there")
    try:
        with namespace_cluster(2, LinkSpeed.parse("1gbit")) as made:
            there = run_local(
                train_on_rank,
                4,
                [RunTask(request, config)],
                enter=lambda rank: made.enter(rank // 2),
            )
    except NoNamespaces as error:
        pytest.skip(str(error))
    here = train("here", "train.steps=2", "mesh.shards=2")
    assert [run["fingerprint"] for run in there] == [run["fingerprint"] for run in here]
    assert there[0]["bytes_sent_per_step"] == here[0]["bytes_sent_per_step"]
    assert not list(Path("/run/netns").glob(f"detonation-{os.getpid()}-*"))
