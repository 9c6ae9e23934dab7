"""The example for Ray Train in a real cluster of one machine: it learns, and a worker that fails costs no bit."""

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


def test_a_worker_that_fails_costs_no_bit(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_METRICS_COLLECTION": "1",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    command, env = (
        [sys.executable, "-c", RUNS, str(EXAMPLE), str(tmp_path)],
        {**os.environ, **quiet},
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RESULT True") == 2 and (tmp_path / "failed").exists()
    ends = [
        sorted((tmp_path / run).glob("*/step-000040/*.safetensors")) for run in ("whole", "failing")
    ]
    assert len(ends[0]) == len(ends[1]) == 4
    for whole, resumed in (map(load_file, files) for files in zip(*ends, strict=True)):
        assert whole.keys() == resumed.keys() and all(
            torch.equal(whole[key], resumed[key]) for key in whole
        )
