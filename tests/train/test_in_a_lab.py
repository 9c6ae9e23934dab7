"""A run whose nodes are namespaces: the same training, over real links."""

import dataclasses
import os
from pathlib import Path

import pytest

from detonation.cluster.network.namespaces import NoLab
from detonation.train.recipe.schema import to_table
from detonation.train.run.run import on_ranks
from detonation.train.run.worker import Task, work


def test_training_in_a_lab_is_the_same_training(tiny, train, tmp_path):
    config = tiny("train.steps=2", mesh={"replicas": 2, "shards": 2, "link": "1gbit", "lab": True})
    task = Task(to_table(config), "tiny", str(tmp_path / "lab"))
    try:
        there = on_ranks(work, dataclasses.asdict(task), config.mesh, nodes=2)
    except NoLab as error:
        pytest.skip(str(error))
    here = train("here", "train.steps=2", "mesh.shards=2")
    assert [run["fingerprint"] for run in there] == [run["fingerprint"] for run in here]
    assert there[0]["bytes_sent_per_step"] == here[0]["bytes_sent_per_step"]
    assert not list(Path("/run/netns").glob(f"detonation-{os.getpid()}-*"))
