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
from detonation.train.loop.checks import check_config
from detonation.train.loop.fit import fit
from detonation.train.loop.session import start_session
from detonation.train.recipe.resolve import parse_sets, read_recipe, resolve
from detonation.train.recipe.schema import Config

GOLDEN = Path(__file__).with_name("losses.json")
RECIPE = Path(__file__).parents[2] / "recipes" / "quick-lm.toml"
STEPS = 4
CASES = {
    "full": ["scheme.name=full"],
    "demo": ["scheme.name=demo"],
    "demo in fp32": ["scheme.name=demo", "scheme.precision=fp32"],
    "random_sign": ["scheme.name=random_sign"],
    "diloco": ["scheme.name=diloco", "scheme.every=3"],
}


def config(sets: list[str]) -> Config:
    """Of six steps as 2 x 2 the first are taken, a round of DiLoCo included."""
    short = ["train.steps=6", "train.validation_batches=1", "schedule.warmup=2"]
    return check_config(resolve(read_recipe(RECIPE), parse_sets([*short, *sets])))


def trained(mesh: DeviceMesh) -> dict[str, list[float]]:
    """Of each case the mean training loss of each step."""
    found = {}
    for case, sets in CASES.items():
        session, records = start_session(config(sets), torch.device("cpu")), []
        fit(session, 0, STEPS, records.append, Stop())
        found[case] = [record.loss for record in records]
    return found


@lru_cache
def losses() -> dict[str, list[float]]:
    return worlds.run(trained, 2, 2)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_first_losses_are_the_committed_ones(case):
    assert losses()[case] == pytest.approx(json.loads(GOLDEN.read_text())[case], abs=2e-3)


def test_a_logged_loss_is_the_mean_over_predictions():
    """The published code divides by the number of keys of a batch: its curves are off by a factor."""
    assert json.loads(GOLDEN.read_text())["full"][0] == pytest.approx(math.log(256), abs=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.write_text(json.dumps(losses(), indent=1) + "\n")
