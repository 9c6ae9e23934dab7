"""Right: the laws on the device, in one process and among real ranks, by the package's own tests."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import torch
from benchmarks.gpu.children import ROOT, environment, how_it_ended, ran
from benchmarks.gpu.common import Job

TITLE = "Right"
HERE = ["tests/laws/test_on_device.py"]
"""Laws 1 to 11 over all schemes in one process, equal bits of two runs, and the engine against the reference."""
WORLDS = [
    "tests/world/test_interplay.py",
    "tests/world/test_slow_backend.py",
    "tests/world/test_late.py",
]
"""Real ranks: forks, which use the GPU while this process does not. NCCL takes one rank per GPU, gloo any number."""
SHARES = 4
"""Processes that share the tests of one process on a GPU, where most of their time is the host's."""


def measure(job: Job) -> None:
    sealed(job)
    tested(job, "laws, one process", HERE, job.left_s() * 2 / 3, shares=SHARES if job.on_gpu else 1)
    tested(
        job,
        "real ranks",
        WORLDS[1:2] if job.tiny else WORLDS,
        job.left_s(),
        shares=2 if job.on_gpu else 1,
    )
    if job.on_gpu and torch.cuda.device_count() < 2:
        job.note("one GPU: NCCL ran with one rank; two ranks on one GPU talked over gloo")
    good = job.findings.checks - len(job.findings.failures)
    job.headline(f"{good} of {job.findings.checks} tests passed on {job.device.type}")


def tested(job: Job, name: str, files: list[str], seconds: float, shares: int = 1) -> None:
    """Runs files of tests with their tensors on the device, dealt to `shares` processes; each test is a check, and
    counts even where a later one ends all of its process."""
    most_s = max(20, seconds)
    with ThreadPoolExecutor(shares) as pool:
        outcomes = list(
            pool.map(lambda share: _share(job, name, files, most_s, share, shares), range(shares))
        )
    passed, failed, skipped = (sum(counts) for counts in zip(*outcomes, strict=True))
    job.row(tests=name, passed=passed, failed=failed, left_out=skipped)


def _share(
    job: Job, name: str, files: list[str], most_s: float, share: int, shares: int
) -> tuple[int, int, int]:
    """Runs one share of the tests; returns how many passed, failed and were left out."""
    slug = name.replace(", ", "-").replace(" ", "-") + f"-{share}" * (shares > 1)
    log, results = job.file(f"{slug}.txt"), job.findings.path.with_suffix(f".{slug}.jsonl")
    results.write_text("")
    known = job.findings.path.with_suffix(".known.json")
    known.write_text(json.dumps(job.findings.passed))
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.each_result"]
    command += [*["-k", "random or law_6"] * job.tiny, *files]
    env = environment(job.device.type) | {
        "GPU_RESULTS": str(results),
        "GPU_SHARE": f"{share}/{shares}",
        "GPU_KNOWN": str(known),
    }
    code = ran(command, env, log, most_s)
    began, ended = "", dict[str, dict[str, str]]()
    for line in map(json.loads, results.read_text().splitlines()):
        began = line.get("began", began)
        if (
            "ended" in line and ended.get(line["ended"], {}).get("outcome") != "failed"
        ):  # which a teardown may do, too
            ended[line["ended"]] = line
    for test, found in ended.items():
        if found["outcome"] == "passed":
            job.findings.passed.append(test)
        if found["outcome"] != "skipped":
            job.check(
                test, found["outcome"] == "passed", found["headline"][:300], found["traceback"]
            )
    if code is None:
        job.leave_out(f"a part of the tests of {name}")
    if code not in (0, 1, 5):  # passed, failed, none chosen
        last = f"; the last test that began: {began}" if began else ""
        job.check(name, False, f"pytest {how_it_ended(code, most_s)}{last}; see {log.name}")
    outcomes = [found["outcome"] for found in ended.values()]
    return outcomes.count("passed"), outcomes.count("failed"), outcomes.count("skipped")


def sealed(job: Job) -> None:
    """Messages are sealed and inspected many times, beside a stream that moves memory; see seals.py."""
    called = "messages sealed and inspected"
    if job.has(called):
        return
    if find_spec("triton") is None:
        job.note("no triton: no message was sealed by a kernel")
        return
    log, times = job.file("seals.txt"), 10_000 if job.on_gpu else 10 if job.tiny else 100
    env, seconds = environment(job.device.type), max(10.0, min(30.0, job.left_s() / 4))
    if not job.on_gpu:
        env |= {
            "TRITON_INTERPRET": "1",
            "DETONATION_KERNELS": "triton",
        }  # the CPU plays an accelerator
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.seals",
        "--device",
        job.device.type,
        "--times",
        str(times),
    ]
    most_s = seconds + 60
    code = ran([*command, "--seconds", str(seconds)], env, log, most_s)
    last = next((line for line in log.read_text().splitlines() if line.startswith('{"rounds"')), "")
    found = json.loads(last) if last else {}
    kinds = {name: number for name, number in found.items() if name != "rounds" and number >= 0}
    seen = (
        f"first wrong rounds: {kinds}"
        if kinds
        else f"the process {how_it_ended(code, most_s)}; see {log.name}"
    )
    if code == 0 and found:
        job.findings.passed.append(called)
    job.check(
        called,
        code == 0 and bool(found),
        seen,
        "" if code == 0 else log.read_text(),
    )
    failed = int(code != 0)
    job.row(
        tests=called,
        passed=found.get("rounds", 0),
        failed=failed,
        left_out=0,
    )
