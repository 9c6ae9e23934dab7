"""The examples run in a world of as many ranks as their first line says, placed as torchrun places them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import free_port
from covering import some
from limits import LIMIT_S

RANKS = """
import contextlib, gc, importlib, json, os, runpy, sys
from pathlib import Path

# once, for all ranks of all examples
for name in ("_dynamo", "distributed.fsdp", "distributed.pipelining", "distributed.tensor.parallel"):
    importlib.import_module("torch." + name)
import detonation

gc.freeze()  # to look for garbage in what is imported would copy all of it in each rank
for line in sys.stdin:
    path, world, port, out = json.loads(line)
    ranks = []
    for rank in range(world):
        ranks.append(os.fork())
        if not ranks[-1]:
            for descriptor, file in ((0, os.devnull), (1, out + ".out"), (2, out + ".err")):
                os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            runpy.run_path(path)
            threads = []
            for thread in Path("/proc/self/task").glob("*/stat"):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    name, _, rest = thread.read_text().rpartition(")")
                    if not int(rest.split()[6]) & 4:  # PF_EXITING: who waited for its end goes on a moment before it
                        threads.append(name)
            # caches of torch.distributed.tensor keep the groups of a sharded model until the process ends
            sharded = any(name in path for name in ("fsdp2", "lightning", "axes"))
            left = not sharded and any("gloo" in name for name in threads)
            sys.exit(f"threads are left: {threads}" if left else 0)
    print(any([os.waitpid(rank, 0)[1] for rank in ranks]), flush=True)
"""
"""Each rank ends as an interpreter does: taken down around the threads of a process group it may abort, though rarely.
"""
EVERY = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.py"))
BESIDE_A_RUN = ("my_model", "follow_serve", "read_weights")
"""tests/train tries the first, test_follow_serve.py the second, tests/laws/test_follow_weights.py the third."""
OWN = [path for path in EVERY if path.stem not in BESIDE_A_RUN]
EXAMPLES = [
    path
    for path in OWN
    if not re.search("^(import|from) (ray|detonation.integr)", path.read_text(), re.M)
]
"""The others need libraries, and run in tests/integrations."""
LONG = ("ddp_hook", "three_axes")
"""Their parts are in tests/integrations/test_ddp.py and tests/world/test_replicas.py."""


@pytest.fixture(scope="module")
def launcher():
    """A process that runs examples: each is a line of JSON to it; it answers whether one of the ranks failed."""
    with subprocess.Popen(
        [sys.executable, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0


@pytest.mark.long_cases("diloco_two_tiers")
@some(
    "path",
    EXAMPLES,
    keep=[path for path in EXAMPLES if path.stem not in LONG],
    ids=lambda p: p.stem,
)
def test_an_example_is_short_its_replicas_end_equal_and_the_network_is_quiet_at_the_end(
    path, launcher, tmp_path
):
    assert len(path.read_text().splitlines()) <= 60
    ranks = int(re.search(r"--nproc-per-node (\d+)", path.read_text())[1])
    wanted = json.dumps([str(path), ranks, free_port(), str(tmp_path / "rank")])
    launcher.stdin.write(wanted.encode() + b"\n")
    launcher.stdin.flush()
    assert launcher.stdout.readline() == b"False\n", (tmp_path / "rank.err").read_text()
    said = (tmp_path / "rank.out").read_text()
    before, after = (float(loss) for loss in said.split("loss ")[1].split(",")[0].split(" -> "))
    assert after < before / 2 and "replicas equal: True" in said
