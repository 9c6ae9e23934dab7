"""Pages, launch files and examples that name several machines run on several machines, as printed."""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from benchmarks.lab import namespace_cluster
from lab import Page, Run
from nodes import Network, machines

from docs.pages import ROOT

__all__ = ["namespace_cluster"]
"""For conftest: this file makes namespaces."""

TUNNEL = {"a": "10.10.0.1/24", "b": "10.10.0.2/24"}
FOUR = {"store": "10.10.0.1/24", "a": "10.10.0.2/24", "b": "10.10.0.3/24", "c": "10.10.0.4/24"}


def tasks(names, **variables):
    """The environment of a task on each of these machines; "%d" becomes the machine's number."""
    return {
        name: {key: str(text).replace("%d", str(n)) for key, text in variables.items()}
        for n, name in enumerate(names)
    }


SLURM = tasks(
    "ab",
    SLURM_JOB_ID=7,
    SLURM_STEP_ID=0,
    SLURM_PROCID="%d",
    SLURM_NTASKS=2,
    SLURM_LOCALID=0,
    SLURM_NODEID="%d",
    SLURM_STEP_NODELIST="a,b",
    SLURM_STEP_TASKS_PER_NODE="1(x2)",
)
MPI = tasks(
    ["node0", "node1"],
    OMPI_COMM_WORLD_RANK="%d",
    OMPI_COMM_WORLD_SIZE=2,
    OMPI_COMM_WORLD_LOCAL_RANK=0,
    OMPI_COMM_WORLD_LOCAL_SIZE=1,
)
SKYPILOT = tasks(
    "ab",
    SKYPILOT_NUM_NODES=2,
    SKYPILOT_NODE_RANK="%d",
    SKYPILOT_NUM_GPUS_PER_NODE=1,
    SKYPILOT_NODE_IPS="10.10.0.1\n10.10.0.2",
)
PAGES = {
    "docs/tutorials/two-machines.md": Page(
        Network({"a": "192.168.1.10/24", "b": "192.168.1.11/24"}, "enp3s0")
    ),
    "docs/tutorials/internet.md": Page(
        Network(TUNNEL, "wg0"), smaller={"scheme.every=30": "scheme.every=3"}
    ),
    "docs/tutorials/elastic.md": Page(
        Network(FOUR),
        smaller={
            "--shards 8": "--shards 2",
            "range(100)": "range(20)",
            "train.steps=6": "train.steps=100000",
        },
    ),
    "docs/tutorials/larger-than-a-node.md": Page(
        Network({"a": "192.168.1.10/24", "b": "192.168.1.11/24"}),
        smaller={"--shards 8": "--shards 4", "shards = 8": "shards = 4"},
    ),
    "docs/follow.md": Page(Network(TUNNEL), smaller={"train.steps=6": "train.steps=300"}),
    "docs/clusters.md": Page(Network(TUNNEL, names={"a": "a", "b": "b"}), env=SLURM),
}


@pytest.fixture
def up(tmp_path):
    """Runs something on the machines of a page."""

    def bring(page, work, name=""):
        with machines(page.network, tmp_path) as found:
            run = Run(name, page, found)
            try:
                work(run)
            finally:
                run.close()

    return bring


@pytest.mark.long_cases("docs/tutorials/internet.md")  # torchrun's kind, as two-machines.md
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_on_its_machines(name, up):
    up(PAGES[name], lambda run: run.blocks(), name)


LAUNCH = ROOT / "examples" / "launch"
TABLE = (ROOT / "docs" / "clusters.md").read_text()


def start_of(script):
    """The command line that the table of docs/clusters.md has for a launcher."""
    (row,) = [span for span in re.findall(r"`([^`\n]+)`", TABLE) if f"{script} " in span]
    return row


def on_each(run, lines):
    """Runs a line on each machine, and waits for all."""
    commands = [run.start(machine, line, line) for machine, line in lines.items()]
    for command in commands:
        run.ended(command)
    return commands


def test_torchrun_elastic_on_two_machines_whose_names_lead_to_loopback(up):
    line = start_of("torchrun-elastic.sh")

    def work(run):
        for machine in "ab":
            shutil.copy(LAUNCH / "torchrun-elastic.sh", run.disk(machine))
        assert "ADDRESS=10.10.0.2" in line
        on_each(run, {"a": line.replace("ADDRESS=10.10.0.2", "ADDRESS=10.10.0.1"), "b": line})

    up(Page(Network(TUNNEL, "wg0"), env={name: {"EVERY": "100"} for name in "ab"}), work)


def test_the_script_of_slurm_on_two_nodes(up):
    line = start_of("slurm.sbatch").replace("sbatch", "bash", 1)

    def work(run):
        for machine in "ab":
            shutil.copy(LAUNCH / "slurm.sbatch", run.disk(machine))
        on_each(run, dict.fromkeys("ab", line))

    up(Page(Network(TUNNEL, names={"a": "a", "b": "b"}), env=SLURM), work)


@pytest.mark.long  # torchrun's kind, as two-machines.md
def test_the_task_of_skypilot_on_two_nodes(up):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    home = {"HOME": "home", **cache}  # what is compiled stays where other tests find it
    env = {name: {**task["envs"], **SKYPILOT[name], **home} for name in "ab"}

    def work(run):
        for machine in "ab":
            (run.disk(machine) / "run.sh").write_text("set -eu\n" + task["run"])
        on_each(run, dict.fromkeys("ab", "bash run.sh"))
        assert (run.disk("a") / "home" / "runs" / "first" / "summary.json").exists()

    up(Page(Network(TUNNEL), env=env), work)


def test_the_pods_of_kubernetes(up):
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    line = " ".join([*container["command"], *container["args"]])
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    pods = {"detonation-0": "10.10.0.1/24", "detonation-1": "10.10.0.2/24"}
    network = Network(pods, debian=False, names={"detonation-0.detonation": "detonation-0"})
    smaller = {
        "--nnodes=4": "--nnodes=2",
        "--nproc-per-node=8": "--nproc-per-node=1",
        " /runs": " runs",
    }
    page = Page(network, dict.fromkeys(pods, env), smaller)
    up(page, lambda run: on_each(run, dict.fromkeys(pods, line)))


def test_mpirun_on_two_nodes(up):
    line = start_of("mpirun")
    network = Network({"node0": "10.10.0.1/24", "node1": "10.10.0.2/24"}, names={"node0": "node0"})
    up(Page(network, env=MPI), lambda run: on_each(run, dict.fromkeys(MPI, line)))


EXAMPLES = {
    path.name: int(found[1])
    for path in sorted((ROOT / "examples").glob("*.py"))
    if (found := re.search(r"^torchrun --nproc-per-node (\d+) ", path.read_text(), re.MULTILINE))
}
OF_LIBRARIES = {"huggingface_accelerate.py", "huggingface_trainer.py", "lightning_trainer.py"}
"""Examples whose libraries make the process group, by torch's rules; tests/integrations runs them."""


@pytest.mark.long_cases("ddp_hook.py", "fsdp2_loop.py")  # the mesh of init_mesh, as on the pages
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - OF_LIBRARIES))
def test_an_example_runs_on_two_machines(name, up):
    line = (
        f"torchrun --nnodes 2 --node-rank 0 --nproc-per-node={EXAMPLES[name] // 2} "
        f"--master-addr 10.10.0.1 --master-port 29500 {ROOT / 'examples' / name}"
    )

    def work(run):
        first, _ = on_each(run, {"a": line, "b": line.replace("--node-rank 0", "--node-rank 1")})
        assert "replicas equal: True" in first.stdout

    up(Page(Network(TUNNEL)), work)
