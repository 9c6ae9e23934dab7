"""World: ranks of several GPUs over NCCL, one GPU each: what one process cannot show."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.children import ROOT, end, environment, how_it_ended
from benchmarks.gpu.common import Job

TITLE = "Ranks of several GPUs"
WORLDS = {2: (2, 1, ("overlap", "wire", "killed")), 4: (2, 2, ("overlap", "lanes"))}
"""By the number of ranks: replicas, shards, and the cases of ranks.py."""
NOTICED_S = 90.0
"""Seconds in which the others have to end once a rank was killed; their collectives wait for 20."""


def measure(job: Job) -> None:
    gpus = torch.cuda.device_count() if job.on_gpu else 2 if job.tiny else 4
    for ranks, (replicas, shards, cases) in WORLDS.items():
        if ranks <= gpus:
            world(job, ranks, [*cases, "--replicas", str(replicas), "--shards", str(shards)])
        else:
            job.note(f"{gpus} GPU, so no world of {ranks} ranks: NCCL takes one rank per GPU")
    good = job.findings.checks - len(job.findings.failures)
    job.headline(
        f"{good} of {job.findings.checks} checks among ranks hold" if good else "it needs two GPUs"
    )


def world(job: Job, ranks: int, arguments: list[str]) -> None:
    """Runs a world of ranks, each a process, and reads what rank 0 says."""
    steps, width = (5, 32) if job.tiny else (200, 1024) if job.on_gpu else (20, 128)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.ranks",
        *arguments,
        "--device",
        job.device.type,
    ]
    command += ["--steps", str(steps), "--width", str(width)]
    logs = [job.file(f"{ranks}-ranks.{rank}.txt") for rank in range(ranks)]
    said, dumps = job.file(f"{ranks}-ranks.jsonl"), job.findings.path.parent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    shared = environment(job.device.type) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    # NCCL's flight recorder: the last collectives of each rank, in a file where one of them lasts too long
    shared |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    shared |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(dumps / f"nccl-{ranks}-ranks-")}
    processes = []
    try:
        for rank, log in enumerate(logs):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (
                log.open("wb") as errors,
                said.open("wb") if rank == 0 else log.open("ab") as lines,
            ):
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=own, stdout=lines, stderr=errors, process_group=0
                    )
                )
        codes, waited_s = ended(processes, max(60.0, job.left_s()))
    finally:
        for process in processes:
            end(process)
    for line in said.read_text().splitlines():
        found = json.loads(line)
        job.check(f"{found['world']}, {found['case']}", found["holds"], found["seen"])
        times = {"ms": found["ms"], "with_overlap": found.get("with_overlap", "")}
        job.row(
            world=found["world"],
            case=found["case"],
            **times,
            holds="yes" if found["holds"] else "no",
        )
    judge(job, arguments, codes, waited_s, logs)
    job.findings.files += sorted(path.name for path in dumps.glob(f"nccl-{ranks}-ranks-*"))


def ended(
    processes: "list[subprocess.Popen[Any]]", most_s: float
) -> tuple[list[int | None], float]:
    """The exit codes of processes, None for one that did not end, and the seconds from the first end to the last."""
    began, first = time.monotonic(), 0.0
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if not first and any(process.poll() is not None for process in processes):
            first = now
        if now - began > most_s or (first and now - first > NOTICED_S):
            break
        time.sleep(0.02)
    return [process.poll() for process in processes], time.monotonic() - first if first else 0.0


def judge(
    job: Job, arguments: list[str], codes: list[int | None], waited_s: float, logs: list[Path]
) -> None:
    """Checks how the ranks ended: well, or after the last one was killed."""
    words = [how_it_ended(code, NOTICED_S) for code in codes]
    whole = "\n".join(log.read_text() for log in logs)
    if "killed" not in arguments:
        job.check(
            f"{len(codes)} ranks end",
            all(code == 0 for code in codes),
            f"they {', '.join(words)}",
            whole,
        )
        return
    alone = codes[-1] == -signal.SIGKILL and all(code not in (None, 0) for code in codes[:-1])
    job.check("the others end when a rank is killed", alone, f"they {', '.join(words)}", whole)
    holds = "yes" if alone else "no"
    job.row(
        world=f"{len(codes)} ranks",
        case="until they end",
        ms=1e3 * waited_s,
        with_overlap="",
        holds=holds,
    )
