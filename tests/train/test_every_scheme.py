"""Every scheme by its name, with what the quick recipe is tuned to, on a real model as 2 replicas."""

import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import worlds
from detonation.cluster.processes.signals import Stop
from detonation.core.schemes.scheme import SCHEMES
from detonation.train.loop.checks import check_config
from detonation.train.loop.fit import fit
from detonation.train.loop.session import start_session
from detonation.train.recipe.resolve import parse_sets, read_recipe, resolve
from detonation.train.recipe.schema import Config

RECIPE = read_recipe(Path(__file__).parents[2] / "recipes" / "quick-lm.toml")
SMALL = [
    "model.layers=1", "model.hidden_size=32", "model.heads=2", "model.feed_forward=64", "data.context=32",
    "mesh.shards=1", "train.steps=5", "train.batch_size=4", "train.validation_batches=1", "schedule.warmup=2",
]  # fmt: skip
SHORT = {
    "every": 2,
    "fragments": 2,
    "delay": 1,
}  # rounds that end within five steps, and one that is left open


def small(name: str) -> Config:
    tuned = check_config(
        resolve(RECIPE, parse_sets([*SMALL, f"scheme.name={name}"]))
    ).scheme.arguments
    rounds = [f"scheme.{key}={value}" for key, value in SHORT.items() if tuned.get(key)]
    return check_config(resolve(RECIPE, parse_sets([*SMALL, f"scheme.name={name}", *rounds])))


def trained(mesh, configs):
    results = {}
    for name, config in configs.items():
        session, records = start_session(config, torch.device("cpu")), []
        fit(session, 0, config.train.steps, records.append, Stop())
        results[name] = (
            [r.loss for r in records],
            records[-1].val_loss,
            session.world.fingerprint(session.model)[1],
        )
    return results


@lru_cache
def all_of_them():
    return worlds.run(trained, 2, 1, {name: small(name) for name in SCHEMES})[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_trains_by_its_name_and_its_replicas_end_equal(name):
    losses, validation, equal = all_of_them()[name]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < losses[0] - 0.01 and validation < losses[0]
    assert equal is (name != "none")
