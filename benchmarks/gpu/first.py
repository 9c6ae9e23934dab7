"""First: each kernel alone, in a process of its own, on three odd shapes beside ordinary torch."""

import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.gpu.children import ROOT, end, environment, how_it_ended
from benchmarks.gpu.common import Job

TITLE = "Each kernel once"
KERNELS = (
    "scan_kernel", "seal_kernel", "inspect_kernel", "encode_kernel", "decode_kernel",
    "rotation_kernel", "weigh_kernel", "seal_sum_kernel", "inspect_sum_kernel",
)  # fmt: skip
"""In the order of a step; the cases are in one_kernel.py."""
TINY = KERNELS[:3]
LAUNCH_S = 20.0
"""Seconds that one launch may take, its compilation included."""


@dataclass
class Found:
    """The outcome of one kernel.

    Args:
        interpreted: "yes" or "no"; "" where the process ended before it knew.
        good: The shapes on which it was right.
        failures: The line of each failure, and all that is known of it.
    """

    kernel: str
    interpreted: str = ""
    good: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)


def measure(job: Job) -> None:
    if find_spec("triton") is None:
        job.check("triton can be imported", not job.on_gpu, "no kernel runs without it")
        job.headline("there is no triton, so no kernel ran")
        return
    kernels, shapes = (TINY, (0,)) if job.tiny else (KERNELS, (0, 1, 2))
    logs = {kernel: job.findings.path.with_suffix(f".{kernel}.txt") for kernel in kernels}
    workers = min(5 if job.on_gpu else 2, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        act = partial(alone, job, shapes=shapes)
        for found in pool.map(lambda kernel: act(kernel, log=logs[kernel]), kernels):
            log = logs[found.kernel]
            for line, whole in found.failures:
                job.check(
                    found.kernel, False, line, f"{whole}\n{log.read_text() if log.exists() else ''}"
                )
            if found.failures and log.exists():
                job.findings.files.append(log.name)
            for _ in range(found.good):
                job.check(found.kernel, True)
            job.row(
                kernel=found.kernel,
                right_on=f"{found.good} of {len(shapes)} shapes",
                interpreted=found.interpreted,
                s=found.seconds,
            )
    good = job.findings.checks - len(job.findings.failures)
    job.headline(
        f"{good} of {len(kernels) * len(shapes)} launches of {len(kernels)} kernels are right"
    )


def alone(job: Job, kernel: str, shapes: tuple[int, ...], log: Path) -> Found:
    """Runs one kernel in a process, and reads what it says as it says it."""
    found, began = Found(kernel), time.monotonic()
    if job.left_s() < 1:
        found.failures.append(("not begun when the time was up", ""))
        return found
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.one_kernel",
        kernel,
        "--device",
        job.device.type,
    ]
    env = environment(job.device.type)
    if not job.on_gpu:
        env |= {
            "TRITON_INTERPRET": "1",
            "DETONATION_KERNELS": "triton",
        }  # the CPU plays an accelerator
    launch, shape, told, most_s = "no launch", "", 0, 0.0
    code: int | None = 0
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--shapes", *map(str, shapes)],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, process_group=0,
        )  # fmt: skip
        lines = queue.SimpleQueue[bytes | None]()
        reader = Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            while True:
                most_s = LAUNCH_S if launch != "no launch" else max(LAUNCH_S, job.left_s())
                raw = lines.get(timeout=most_s)
                if raw is None:
                    code = process.wait()
                    break
                for line in _parsed(raw):
                    if "interpreted" in line:
                        found.interpreted = "yes" if line["interpreted"] else "no"
                        if job.on_gpu and line["interpreted"]:
                            found.failures.append(("is interpreted, on the CPU", ""))
                    elif "shapes" in line:
                        shape = f"shapes {line['shapes']}"
                    elif "launch" in line:
                        launch = f"{line['launch']}, {line['programs']} programs, {_text(line['constants'])}"
                    elif line.get("seen"):
                        told += 1
                        found.failures.append(
                            _failure(found, shape, line["seen"], launch, line.get("traceback", ""))
                        )
                    elif "compared" in line:
                        found.good += 1
        except queue.Empty:
            code = None
        finally:
            end(process)
            reader.join()
    if code != 0 and not told:  # it says why it ends with 1
        found.failures.append(
            _failure(found, shape, f"the process {how_it_ended(code, most_s)}", launch)
        )
    found.seconds = time.monotonic() - began
    return found


def _failure(
    found: Found, shape: str, seen: str, launch: str, traceback: str = ""
) -> tuple[str, str]:
    line = (
        f"{shape}: {seen}; launched last: {launch}; interpreted: {found.interpreted or 'unknown'}"
    )
    return line, f"{line}\n{traceback}"


def _text(constants: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())


def _parsed(raw: bytes) -> Iterator[dict[str, Any]]:
    if raw.startswith(b"{"):
        yield json.loads(raw)


def _read(source: Any, lines: "queue.SimpleQueue[bytes | None]") -> None:
    with closing(source):
        for line in source:
            lines.put(line)
    lines.put(None)
