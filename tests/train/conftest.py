"""A run small enough for a test: a real model on the shipped text, in fractions of a second a step."""

from pathlib import Path

import pytest

from detonation.cluster.launch import run_local
from detonation.train.loop.checks import check_config
from detonation.train.recipe.resolve import Request, parse_sets, resolve
from detonation.train.run.joining import RunTask
from detonation.train.run.worker import train_on_rank
from limits import LIMIT_S

RECIPE = {
    "model": {"name": "olmo2", "layers": 1, "hidden_size": 32, "heads": 2, "feed_forward": 64},
    "data": {"task": "text", "source": "sotu-sample", "context": 32},
    "scheme": {"name": "demo", "topk": 4, "chunk": 32},
    "optimizer": {"name": "AdamW", "lr": 0.003},
    "train": {"steps": 6, "batch_size": 4, "validation_batches": 4},
    "schedule": {"warmup": 2},
    "mesh": {"replicas": 2, "shards": 1},
}


@pytest.fixture
def tiny_recipe():
    """The tables of the tiny recipe."""
    return RECIPE


@pytest.fixture
def tiny():
    """The configuration of a tiny run, with overrides as --set says them and other tables where they are given."""

    def configured(*sets, **tables):
        return check_config(resolve({**RECIPE, **tables}, parse_sets(sets)))

    return configured


@pytest.fixture
def train(tiny, tmp_path):
    """Runs the tiny recipe in a local world into `tmp_path / out`; returns every rank's summary."""

    def trained(out, *sets, tables=None, stop_after=None, **options):
        config = tiny(*sets, **(tables or {}))
        request = Request(Path("tiny.toml"), out=tmp_path / out, stop_after=stop_after)
        world_size = sum(config.mesh.sizes)
        return run_local(
            train_on_rank, world_size, [RunTask(request, config, **options)], timeout_s=LIMIT_S
        )

    return trained
