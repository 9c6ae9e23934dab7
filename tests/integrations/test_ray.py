"""The examples for Ray in a real cluster of one machine.

In Ray Train a worker that fails costs no bit. An elastic actor leaves when its node gets notice.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from limits import LIMIT_S

pytest.importorskip("ray.train", reason="the extra ray")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
RUNS = """
import runpy, sys
from pathlib import Path
import ray, ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

train, folder = runpy.run_path(sys.argv[1])["train"], Path(sys.argv[2])

def fails_once(config):
    report, failed = ray.train.report, folder / "failed"

    def reported(numbers, checkpoint):
        report(numbers, checkpoint=checkpoint)
        if numbers["step"] == 20 and not failed.exists():
            ray.train.get_context().get_world_rank() or failed.touch()
            raise RuntimeError("a worker fails")

    ray.train.report = reported
    train(config)

ray.init(num_cpus=5, include_dashboard=False, object_store_memory=100_000_000, _node_ip_address="127.0.0.1")
for name, function in {"whole": train, "failing": fails_once}.items():
    trainer = TorchTrainer(
        function,
        train_loop_config={"workers": 4, "steps": 40, "every": 10},
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    print("RESULT", trainer.fit().metrics["equal"])
"""


ELASTIC = EXAMPLE.with_name("ray_elastic.py")
LEAVES = """
import runpy, sys, threading
import ray, torch

Replica = runpy.run_path(sys.argv[1])["Replica"]

class Told(Replica):
    # replica 2 gets its notice after step 9, whatever the order of calls
    def __init__(self, *arguments):
        self.reached, self.told = threading.Event(), threading.Event()
        super().__init__(*arguments)

    def leave(self):
        self.reached.wait()
        super().leave()
        self.told.set()

    def after_step(self, step):
        if step == 9 and self.axis.replica == 2:
            self.reached.set()
            self.told.wait()

alone = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
ray.init(num_cpus=3, object_store_memory=100_000_000, **alone)
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
actor = ray.remote(max_concurrency=2)(Told)
replicas = [actor.remote(number, 3, "127.0.0.1", store.port) for number in range(3)]
results = [replica.train.remote(40) for replica in replicas]
ray.get(replicas[2].leave.remote())
for result in ray.get(results):
    print("RESULT", result["steps"], result["left"], result["sum"])
"""


def ran(program, *arguments, folder):
    """The lines of results of a program that uses Ray, in a process of its own."""
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_METRICS_COLLECTION": "1",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home directory
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **quiet},
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]


def test_a_replica_whose_node_gets_notice_leaves_and_the_others_go_on_equal(tmp_path):
    assert len(ELASTIC.read_text().splitlines()) <= 70
    first, second, gone = ran(LEAVES, ELASTIC, folder=tmp_path)
    assert first == second and first[:2] == ["40", "False"]
    steps, left, _ = gone
    assert left == "True" and 10 <= int(steps) < 40


def test_a_worker_that_fails_costs_no_bit(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) <= 70
    results = ran(RUNS, EXAMPLE, tmp_path, folder=tmp_path)
    assert results == [["True"], ["True"]] and (tmp_path / "failed").exists()
    ends = [
        sorted((tmp_path / run).glob("*/step-000040/*.safetensors")) for run in ("whole", "failing")
    ]
    assert len(ends[0]) == len(ends[1]) == 4
    for whole, resumed in (map(load_file, files) for files in zip(*ends, strict=True)):
        assert whole.keys() == resumed.keys() and all(
            torch.equal(whole[key], resumed[key]) for key in whole
        )
