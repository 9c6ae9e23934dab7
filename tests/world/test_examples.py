"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

WRAPPER = """
import runpy, sys
from pathlib import Path

runpy.run_path(sys.argv[1])
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
# caches of torch.distributed.tensor keep the groups of a sharded model until the process ends
if "fsdp2" not in sys.argv[1] and any("gloo" in name for name in threads):
    sys.exit(f"threads are left: {threads}")
"""
"""An interpreter that is taken down around the threads of a process group may abort, though rarely."""
EXAMPLES = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_its_replicas_end_equal_and_the_network_is_quiet_at_the_end(path, tmp_path):
    assert len(path.read_text().splitlines()) <= 60
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    command = [*launcher, str(wrapper), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after = (float(loss) for loss in done.stdout.split("loss ")[1].split(",")[0].split(" -> "))
    assert after < before / 2 and "replicas equal: True" in done.stdout
