"""The first losses of the quick recipe, committed in full precision: what a change of the arithmetic anywhere moves.

Made by `python tests/golden/test_losses.py`. Compared up to what another processor rounds differently.
"""

import json
import math
import tempfile
from pathlib import Path

import pytest

from detonation.train.run import Request, run

GOLDEN = Path(__file__).with_name("losses.json")
RECIPE = Path(__file__).parents[2] / "recipes" / "quick-lm.toml"
SCHEMES = ["full", "demo", "random_sign", "diloco"]


def losses(scheme: str, out: Path) -> list[float]:
    """The mean training loss of each of six steps as 2 x 2, a round of DiLoCo included."""
    short = ["train.steps=6", "train.validation_batches=1", "schedule.warmup=2", f"scheme.name={scheme}"]
    rounds = ["scheme.every=3"] if scheme == "diloco" else []
    run(Request(RECIPE, (*short, *rounds), out=out, to_stderr=True), lambda error: pytest.fail(str(error)))
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_losses_are_the_committed_ones(scheme, tmp_path):
    assert losses(scheme, tmp_path / "run") == pytest.approx(json.loads(GOLDEN.read_text())[scheme], abs=2e-3)


def test_a_logged_loss_is_the_mean_over_predictions():
    """The published code divides by the number of keys of a batch: its curves are off by a factor."""
    assert json.loads(GOLDEN.read_text())["full"][0] == pytest.approx(math.log(256), abs=0.1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps({s: losses(s, Path(folder, s)) for s in SCHEMES}, indent=1) + "\n")
