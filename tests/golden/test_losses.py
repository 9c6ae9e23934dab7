"""The first losses of the quick recipe, committed in full precision: what a change of the arithmetic anywhere moves.

Made by `PYTHONPATH=tests python tests/golden/test_losses.py`. Compared up to what another processor rounds differently.
"""

import json
import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import worlds
from detonation.cluster.processes.signals import Stop
from detonation.train.loop.fit import fit
from detonation.train.loop.session import check_config, start_session
from detonation.train.recipe.resolve import parse_sets, read_recipe, resolve
from detonation.train.recipe.schema import Config

GOLDEN = Path(__file__).with_name("losses.json")
RECIPE = Path(__file__).parents[2] / "recipes" / "quick-lm.toml"
SCHEMES = ["full", "demo", "random_sign", "diloco"]


def config(scheme: str) -> Config:
    """Six steps as 2 x 2, a round of DiLoCo included."""
    short = ["train.steps=6", "train.validation_batches=1", "schedule.warmup=2", f"scheme.name={scheme}"]
    rounds = ["scheme.every=3"] if scheme == "diloco" else []
    return check_config(resolve(read_recipe(RECIPE), parse_sets([*short, *rounds])))


def trained(mesh: DeviceMesh) -> dict[str, list[float]]:
    """Of each scheme the mean training loss of each step."""
    found = {}
    for scheme in SCHEMES:
        session, records = start_session(config(scheme), torch.device("cpu")), []
        fit(session, 0, session.config.train.steps, records.append, Stop())
        found[scheme] = [record.loss for record in records]
    return found


@lru_cache
def losses() -> dict[str, list[float]]:
    return worlds.run(trained, 2, 2)[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_losses_are_the_committed_ones(scheme):
    assert losses()[scheme] == pytest.approx(json.loads(GOLDEN.read_text())[scheme], abs=2e-3)


def test_a_logged_loss_is_the_mean_over_predictions():
    """The published code divides by the number of keys of a batch: its curves are off by a factor."""
    assert json.loads(GOLDEN.read_text())["full"][0] == pytest.approx(math.log(256), abs=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.write_text(json.dumps(losses(), indent=1) + "\n")
