"""Right: the laws on the device, in one process and among real ranks, by the package's own tests."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch
from benchmarks.gpu.common import ROOT, Job, environment

TITLE = "Right"
HERE = ["tests/laws/test_on_device.py"]
"""Laws 1 to 11 over all schemes in one process, equal bits of two runs, and the engine against the reference."""
WORLDS = ["tests/world/test_interplay.py", "tests/world/test_slow_backend.py", "tests/world/test_late.py"]
"""Real ranks: forks, which use the GPU while this process does not. NCCL takes one rank per GPU, gloo any number."""


def measure(job: Job) -> None:
    tested(job, "laws, one process", HERE)
    if job.tiny:
        tested(job, "real ranks", WORLDS[1:2])
    else:
        tested(job, "real ranks", WORLDS)
    if job.on_gpu and torch.cuda.device_count() < 2:
        job.note("one GPU: NCCL ran with one rank; two ranks on one GPU talked over gloo")
    good = job.findings.checks - len(job.findings.failures)
    job.headline(f"{good} of {job.findings.checks} tests passed on {job.device.type}")


def tested(job: Job, name: str, files: list[str]) -> None:
    """Runs files of tests with their tensors on the device; each test is a check."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
        command += ["-p", "no:cacheprovider", f"--junitxml={found}", *(["-k", "random or law_6"] * job.tiny), *files]
        env = environment(job.device.type)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, timeout=max(20, job.left_s()), capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            job.check(name, False, "not done when the time was up")
            return
        if not found.exists() or done.returncode not in (0, 1, 5):  # passed, failed, none chosen
            job.check(name, False, (done.stdout + done.stderr).strip()[-300:])
            return
        passed = failed = skipped = 0
        for case in ElementTree.parse(found).getroot().iter("testcase"):
            broken = next((child for child in case if child.tag in ("failure", "error")), None)
            if any(child.tag == "skipped" for child in case):
                skipped += 1
                continue
            message = "" if broken is None else (broken.get("message") or "").split("\n")[0]
            label = "::".join(filter(None, [case.get("classname", "").rsplit(".", 1)[-1], case.get("name")]))
            job.check(label, broken is None, message[:300])
            passed, failed = passed + (broken is None), failed + (broken is not None)
        job.row(tests=name, passed=passed, failed=failed, left_out=skipped)
