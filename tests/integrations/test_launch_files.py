"""The files of examples/launch: sound, started with stand-ins for the launchers, and every command in them is taken.

A stand-in writes down how it was called. The parsers of torchrun and of detonation then read its command line, and the
recipe is resolved for the world that the launcher would make.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from torch.distributed.run import parse_args
from tyro.conf import FlagCreatePairsOff

from detonation.cli.arguments import Train, verbs
from detonation.cluster.init import LaunchPosition
from detonation.train.recipe.resolve import read_layers
from limits import LIMIT_S

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
CALLED = '#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done > "$CALLS/$(basename "$0")"\nexit "${CODE:-0}"\n'
GPUS = 8


@pytest.fixture
def ran(tmp_path):
    """Runs a script of bash, and returns its outcome and the command lines of the stand-ins that it called."""
    for name in ("torchrun", "srun", "scontrol"):
        (tmp_path / name).write_text(CALLED)
        (tmp_path / name).chmod(0o755)

    def run(*command, **env):
        for name in ("torchrun", "srun", "scontrol"):
            (tmp_path / "calls" / name).unlink(missing_ok=True)
        (tmp_path / "calls").mkdir(exist_ok=True)
        path = f"{tmp_path}:{os.environ['PATH']}"
        own = {
            "PATH": path,
            "CALLS": str(tmp_path / "calls"),
            **{key: str(value) for key, value in env.items()},
        }
        done = subprocess.run(
            ["bash", *command],
            cwd=tmp_path,
            env=own,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return done, {
            call.name: call.read_text().splitlines() for call in (tmp_path / "calls").iterdir()
        }

    return run


def under_torchrun(words):
    """torchrun's reading of its command line, and the command line of its ranks' program."""
    arguments = parse_args(words)
    return arguments, [arguments.training_script, *arguments.training_script_args]


def checked(words, nodes):
    """The verb of `detonation words...` on `nodes` of 8 ranks, whose recipe is sound for that world."""
    verb = tyro.cli(verbs(), args=words, config=(FlagCreatePairsOff,))
    assert isinstance(verb, Train)
    position = LaunchPosition(0, nodes * GPUS, 0, GPUS)
    flags = {"replicas": verb.replicas, "shards": verb.shards}
    config = read_layers(verb.recipe, [], position, mesh=flags).config()
    assert (config.mesh.replicas, config.mesh.shards) == (nodes, GPUS)
    return verb


def beside_python(name):
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := beside_python("shellcheck"):
        subprocess.run([shellcheck, script], check=True)


def test_torchrun_elastic_takes_one_node_or_two(ran):
    done, calls = ran(
        LAUNCH / "torchrun-elastic.sh", "quick-lm", "--out", "runs/x", "--steps", "9", HEAD="node0"
    )
    assert done.returncode == 0, done.stderr
    launcher, words = under_torchrun(calls["torchrun"])
    assert (launcher.nnodes, launcher.rdzv_endpoint, launcher.module) == (
        "1:2",
        "node0:29500",
        True,
    )
    for nodes in (1, 2):
        verb = checked(words[1:], nodes)
        assert (
            words[0] == "detonation"
            and verb.resume
            and verb.steps == 9
            and launcher.max_restarts > 0
        )
    _, calls = ran(LAUNCH / "torchrun-elastic.sh", "quick-lm", HEAD="node0", ADDRESS="10.0.0.2")
    assert (
        launcher.local_addr is None
        and under_torchrun(calls["torchrun"])[0].local_addr == "10.0.0.2"
    )
    assert ran(LAUNCH / "torchrun-elastic.sh", "quick-lm")[0].returncode != 0
    assert ran(LAUNCH / "torchrun-elastic.sh", HEAD="node0")[0].returncode == 2


@pytest.mark.parametrize(
    ("code", "finished", "restarts", "outcome", "again"),
    [
        (0, True, 0, 0, False),  # done
        (2, False, 0, 2, False),  # bad input
        (0, False, 0, 0, True),  # stopped on request, its time was over
        (1, False, 3, 0, True),  # a rank was lost
        (1, False, 20, 1, False),  # once more would help no more
    ],
)
def test_slurm_queues_again_what_is_not_done(
    ran, tmp_path, code, finished, restarts, outcome, again
):
    if finished:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "summary.json").touch()
    env = {"SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": restarts, "CODE": code}
    (tmp_path / "scontrol").write_text(CALLED.replace("${CODE:-0}", "0"))
    done, calls = ran(LAUNCH / "slurm.sbatch", "quick-lm", "runs", **env)
    assert done.returncode == outcome, done.stderr
    assert calls.get("scontrol") == (["requeue", "7"] if again else None)
    words = calls["srun"][calls["srun"].index("detonation") :]
    assert checked(words[1:], nodes=4).out == Path("runs")


def test_slurm_asks_for_a_replica_on_each_node():
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in (LAUNCH / "slurm.sbatch").read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (
        "4",
        "8",
        "8",
    )
    assert (
        options["signal"].startswith("USR1@") and "requeue" in options
    )  # the batch step itself takes no signal


def test_the_parts_of_the_kubernetes_manifest_fit_together():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    launcher, words = under_torchrun([*container["command"][1:], *container["args"]])
    assert (
        service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert launcher.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29500"
    assert int(launcher.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(launcher.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    verb = checked(words[1:], int(launcher.nnodes))
    assert verb.resume and launcher.max_restarts > 0
    assert str(verb.out.parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_kubernetes_manifest_keeps_to_its_schema():
    validate = beside_python("kubernetes-validate")
    if not validate:
        pytest.skip("kubernetes-validate is not installed")
    done = subprocess.run(
        [validate, "--strict", LAUNCH / "kubernetes.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_task_of_skypilot_starts_every_node(ran):
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    sky = {
        "NUM_NODES": task["num_nodes"],
        "NODE_RANK": 1,
        "NUM_GPUS_PER_NODE": 8,
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    done, calls = ran(
        "-euc",
        task["run"],
        **task["envs"],
        **{f"SKYPILOT_{key}": text for key, text in sky.items()},
        HOME="/home/me",
    )
    assert done.returncode == 0, done.stderr
    launcher, words = under_torchrun(calls["torchrun"])
    assert (launcher.nnodes, launcher.node_rank, launcher.master_addr) == ("4", 1, "10.0.0.1")
    verb = checked(words[1:], nodes=4)
    assert verb.resume and launcher.max_restarts > 0 and verb.out == Path("/home/me/runs/first")


def test_skypilot_takes_the_task():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    assert task.num_nodes == 4 and task.run


def test_torchtitans_script_starts_torchtitan_with_replicas(ran):
    script = LAUNCH / "torchtitan.sh"
    done, calls = ran(script, "--training.steps", "9", HEAD="node0", NODE=3)
    assert done.returncode == 0, done.stderr
    launcher, words = under_torchrun(calls["torchrun"])
    assert (launcher.nnodes, launcher.node_rank, words[0]) == ("4", 3, "torchtitan.train")
    assert words[words.index("--module") + 1] == "detonation.integrations.torchtitan"
    assert ran(script, HEAD="node0")[0].returncode != 0
    pytest.importorskip("torchtitan.trainer", reason="the extra titan", exc_type=ImportError)
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(words[1:])
    assert (
        config.optimizer.scheme == "loco" and config.parallelism.data_parallel_replicate_degree == 4
    )
