"""Whatever names several machines runs in the lab, or says why it does not."""

import re

import pytest
import test_lab

from docs.pages import PAGES, ROOT, blocks

SEVERAL = re.compile(
    r"--(nnodes|node-rank|master-addr|rdzv|meet|join|publish)\b|\b(HEAD|REPLICA)=|TCPStore\("
    r"|\b(srun|sbatch|mpirun|kubectl|wg-quick|ufw)\b|\bsky launch\b|\bdetonation (meet|follow)\b"
    r"|\b(10|192\.168)(\.\d+){2,3}\b"
)
"""What a block has that names several machines."""
MACHINES = re.compile(r"needs? (a|an|the|it|two|several|more|other|SLURM)\b")
"""Reasons that are none: the lab has machines."""
SPANS = {
    "HEAD=10.10.0.1 ADDRESS=10.10.0.2 GPUS=8 bash torchrun-elastic.sh quick-lm --out runs/first": "test_lab",
    "sbatch slurm.sbatch quick-lm runs/first": "test_lab",
    "mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500 detonation train quick-lm --out runs/first": "test_lab",
    "kubectl apply -f kubernetes.yaml": "test_lab runs the command of its pods",
    "sky launch -c detonation skypilot.yaml": "test_lab runs its task",
    "HEAD=10.10.0.1 NODE=0 bash torchtitan.sh": "a model of 8 billion parameters",
}
"""Whole command lines in running text that name several machines, and who runs them."""
LAUNCHED = {
    "torchrun-elastic.sh": "test_torchrun_elastic_on_two_machines_whose_names_lead_to_loopback",
    "slurm.sbatch": "test_the_script_of_slurm_on_two_nodes",
    "skypilot.yaml": "test_the_task_of_skypilot_on_two_nodes",
    "kubernetes.yaml": "test_the_pods_of_kubernetes",
    "torchtitan.sh": "",  # a model of 8 billion parameters
}


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_a_block_that_names_several_machines_runs_in_the_lab(page):
    for block in blocks(page):
        if not SEVERAL.search(block.text) or block.language not in ("bash", "python"):
            continue
        if block.how:
            assert page in test_lab.PAGES, f"{block}: test_lab.py has no machines for this page"
        else:
            assert block.not_run, f"{block}: <!-- lab: MACHINES --> or <!-- not run: REASON -->"
            assert not MACHINES.search(block.not_run), f"{block}: the lab has machines"


def spans(page):
    """The command lines in the running text of a page that name several machines, and are whole."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", text):
        words = " ".join(span.split())
        begins = r"(HEAD=|sbatch |srun |mpirun |torchrun |kubectl |sky |detonation )"
        whole = re.match(begins, words) and not re.search(r"\.\.\.|[A-Z]{3,}(?!\w*=)", words)
        if whole and len(words.split()) > 2 and SEVERAL.search(words):
            yield words


def test_a_command_line_in_the_text_that_names_several_machines_is_known():
    found = {span for page in [*PAGES, "README.md"] for span in spans(page)}
    assert found == SPANS.keys()


def test_every_launch_file_runs_in_the_lab():
    files = {path.name for path in (ROOT / "examples" / "launch").iterdir()}
    assert files == LAUNCHED.keys()
    assert all(hasattr(test_lab, test) for test in LAUNCHED.values() if test)


def test_every_page_of_the_lab_has_blocks_for_it():
    assert all(any(block.how for block in blocks(page)) for page in test_lab.PAGES)
