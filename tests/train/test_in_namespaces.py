"""A run whose nodes are namespaces: the same training, over real links."""

import os
from pathlib import Path

import pytest

from detonation.cluster.network.namespaces import NoNamespaces
from detonation.train.run.request import Request
from detonation.train.run.start import on_ranks, train_afresh
from detonation.train.run.worker import RunTask, train_on_rank


def test_training_in_namespaces_is_the_same_training(tiny, train, tmp_path):
    config = tiny("train.steps=2", mesh={"replicas": 2, "shards": 2, "link": "1gbit", "namespaces": True})
    request = Request(Path("tiny.toml"), out=tmp_path / "there")
    try:
        there = on_ranks(train_on_rank, RunTask(request, config), train_afresh, [], config.mesh, nodes=2)
    except NoNamespaces as error:
        pytest.skip(str(error))
    here = train("here", "train.steps=2", "mesh.shards=2")
    assert [run["fingerprint"] for run in there] == [run["fingerprint"] for run in here]
    assert there[0]["bytes_sent_per_step"] == here[0]["bytes_sent_per_step"]
    assert not list(Path("/run/netns").glob(f"detonation-{os.getpid()}-*"))
