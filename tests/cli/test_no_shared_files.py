"""Two nodes that share no file system: the run, its end after a kill, and every verb that reads what it left."""

import ctypes
import json
import os
import signal
import subprocess

import pytest
from test_restart import SETS, result

from commands import Command, launched, write_recipe
from detonation.cli import verbs
from detonation.cli.command import run_command

pytestmark = pytest.mark.usefixtures("soon")

_NEW_MOUNTS = 0x00020000


def world(shards):
    return "--replicas", 2, "--shards", shards


def test_a_replica_that_does_not_write_the_summary_names_no_resume(tmp_path):
    """Also where its directory has metrics, because it wrote the run before it left."""
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).touch()
    (line,) = verbs._page_of(tmp_path)
    assert "another replica writes it" in line
    assert "--resume" not in line


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["whole", "shards"]
)
def shards(request):
    """Of a replica, which is a node."""
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """The result of the run on one machine that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train = (
        "train",
        write_recipe(folder / "tiny.toml"),
        "--out",
        folder / "run",
        *SETS[4:],
        *world(shards),
    )
    command = Command(folder, *train)
    assert command.wait() == 0, command.stderr
    return result(folder / "run")


@pytest.fixture
def nodes(tmp_path, shards):
    """How a rank gets to its node, the --out of the ranks, and the directory of each node as this process sees it.

    As root each rank has mount points of its own, otherwise a working directory of its own.
    """
    behind = [tmp_path / f"node{node}" for node in range(2)]
    for directory in behind:
        directory.mkdir()
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        return (
            (lambda rank: os.chdir(behind[rank // shards])),
            "run",
            [directory / "run" for directory in behind],
        )
    (tmp_path / "scratch").mkdir()

    def enter(rank):
        """The same path is the disk of each node: `unshare --mount`, then `mount --bind`."""
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(
            ["mount", "--bind", behind[rank // shards], tmp_path / "scratch"], check=True
        )

    return enter, tmp_path / "scratch" / "run", [directory / "run" for directory in behind]


def test_a_run_is_killed_and_goes_on_and_nothing_is_lost(tmp_path, nodes, shards, whole, capsys):
    enter, out, (first, second) = nodes
    recipe = write_recipe(tmp_path / "tiny.toml")

    def start(restarts):
        env = {"TORCHELASTIC_MAX_RESTARTS": 3, "TORCHELASTIC_RESTART_COUNT": restarts}
        return launched(
            tmp_path,
            2 * shards,
            "train",
            recipe,
            "--out",
            out,
            *SETS[4:],
            *world(shards),
            "--keep",
            2,
            env=env,
            enter=enter,
        )

    ranks = start(0)
    ranks[0].wait_for_step(5)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    assert [rank.wait() for rank in ranks[:-1]] == [1] * (len(ranks) - 1)
    said = f"no shared file system: each node keeps the checkpoints of its own ranks in its own {out} (ranks "
    assert f"{said}{['0', '0-1'][shards - 1]}; " in ranks[0].stdout
    ranks = start(1)
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), ranks[0].stderr
    assert "\nresumed after step " in ranks[0].stdout
    assert result(first) == whole
    files = [
        sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
        for run in (first, second)
    ]
    assert {"summary.json", "metrics.jsonl", "report.html"} <= {*files[0]}
    assert files[1] == ["checkpoints", "config.toml", "environment.json"]
    for run in (first, second):
        assert len(list((run / "checkpoints").iterdir())) == 2
    ranks = start(2)
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), (
        "finished, which only the node of rank 0 knows"
    )
    capsys.readouterr()
    for run, there in ((first, 1), (second, 0)):
        assert run_command(["verify", str(run), "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoints"][0]
        assert found["elsewhere"] == [
            f"replica{there}-shard{shard}.safetensors" for shard in range(shards)
        ]
        assert run_command(["export", str(run), "--out", str(tmp_path / f"model{there}")]) == 0
    models = [(tmp_path / f"model{node}" / "model.safetensors").read_bytes() for node in range(2)]
    assert models[0] == models[1], "replicas of the scheme are equal"
    capsys.readouterr()
    assert run_command(["report", str(first)]) == 0
    assert run_command(["report", str(second)]) == 2
    assert "metrics and summary are on the node of rank 0" in capsys.readouterr().err


def test_a_node_where_the_directory_is_taken_is_named_before_training(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
    (tmp_path / "node1" / "run").mkdir()
    (tmp_path / "node1" / "run" / "thesis.tex").touch()
    ranks = launched(
        tmp_path,
        2,
        "train",
        recipe,
        "--out",
        "run",
        enter=lambda rank: os.chdir(tmp_path / f"node{rank}"),
    )
    assert [rank.wait() for rank in ranks] == [2, 2]
    told = [rank.errors for rank in ranks if rank.errors]
    assert len(told) == 1 and told[0].startswith(
        "error: run directory run is not empty: choose another --out (on "
    )
    assert [path.name for path in (tmp_path / "node1" / "run").iterdir()] == ["thesis.tex"]
