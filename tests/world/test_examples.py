"""The examples run in a world of as many ranks as their first line says, placed as torchrun places them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import free_port
from limits import LIMIT_S

RANKS = """
import gc, os, runpy, sys
from pathlib import Path

import torch.distributed.fsdp  # once, for all ranks

gc.freeze()  # to look for garbage in what is imported would copy all of it in each rank
ranks, world = [], sys.argv[2]
for rank in range(int(world)):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        runpy.run_path(sys.argv[1])
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        # caches of torch.distributed.tensor keep the groups of a sharded model until the process ends
        sharded = any(name in sys.argv[1] for name in ("fsdp2", "lightning", "axes"))
        left = not sharded and any("gloo" in name for name in threads)
        sys.exit(f"threads are left: {threads}" if left else 0)
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""
"""Each rank ends as an interpreter does: taken down around the threads of a process group it may abort, though rarely.
"""
EVERY = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.py"))
BESIDE_A_RUN = ("my_model", "follow_serve", "read_weights")
"""tests/train tries the first, test_follow_serve.py the second, tests/laws/test_follow_weights.py the third."""
OWN = [path for path in EVERY if path.stem not in BESIDE_A_RUN]
EXAMPLES = [path for path in OWN if not re.search("^(import|from) (ray|detonation.integr)", path.read_text(), re.M)]
"""The others need libraries, and run in tests/integrations."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_its_replicas_end_equal_and_the_network_is_quiet_at_the_end(path):
    assert len(path.read_text().splitlines()) <= 60
    if "lightning" in path.stem:
        pytest.importorskip("lightning", reason="the extra lightning is not installed")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = re.search(r"--nproc-per-node (\d+)", path.read_text())[1]
    command, env = [sys.executable, "-c", RANKS, str(path), ranks], {**os.environ, **meeting}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    assert done.returncode == 0, done.stderr
    before, after = (float(loss) for loss in done.stdout.split("loss ")[1].split(",")[0].split(" -> "))
    assert after < before / 2 and "replicas equal: True" in done.stdout
