"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_and_its_replicas_end_equal(path):
    assert len(path.read_text().splitlines()) <= 60
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after = (float(loss) for loss in done.stdout.split("loss ")[1].split(",")[0].split(" -> "))
    assert after < before / 2 and "replicas equal: True" in done.stdout
