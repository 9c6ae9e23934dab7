"""From kill -9 of a rank to the next step: where a restart spends its seconds.

    python benchmarks/restart.py [--times 3] [--silence-s 15]

Two replicas on the CPU of this machine, killed after a checkpoint: under torchrun, which starts them again by itself,
and under `detonation train`, which is started again as a scheduler would. Medians in seconds:

    notice     until the last of the killed world's other ranks has ended, and with it everybody's wait
    start      until the first new rank is a process: teardown by the launcher, and its start
    import     until Python has imported torch and the package
    meet       recipe and data read, rendezvous and process group
    set up     model, sharding, first handshake
    load       the checkpoint
    first step training, until its record is written
"""

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

PARTS = ("notice", "start", "import", "meet", "set up", "load", "first step")
RECIPE = {
    "model": {"name": "olmo2", "layers": 1, "hidden_size": 32, "heads": 2, "feed_forward": 64},
    "data": {"task": "text", "source": "sotu-sample", "context": 32},
    "scheme": {"name": "demo", "topk": 4, "chunk": 32},
    "optimizer": {"name": "AdamW", "lr": 0.003},
    "train": {
        "steps": 100_000,
        "batch_size": 4,
        "log_every": 1,
        "checkpoint_every": 20,
        "validate_every": 0,
    },
    "mesh": {"replicas": 2, "shards": 1},
}
_TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "9",
)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank(Path(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--silence-s", type=float, default=15.0)
    args = parser.parse_args()
    print(f"{'':16}" + "".join(f"{part:>12}" for part in (*PARTS, "all")))
    for launcher in ("torchrun", "detonation train"):
        rows = [measured(launcher, args.silence_s) for _ in range(args.times)]
        medians = [statistics.median(row[part] for row in rows) for part in PARTS]
        print(
            f"{launcher:16}" + "".join(f"{each:12.2f}" for each in (*medians, sum(medians))),
            flush=True,
        )


def rank(folder: Path, arguments: list[str]) -> int:
    """`detonation arguments...`, which notes in `folder` when each part ended."""
    since_boot = float(
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    ) / os.sysconf("SC_CLK_TCK")
    marks = {"start": time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot}

    from detonation.cli.command import run_command
    from detonation.cluster import launch
    from detonation.train.run import recorder, worker

    def noted(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            marks.setdefault(part, time.time())
            if part == PARTS[-1]:
                (folder / f"{os.getpid()}.part").write_text(json.dumps(marks))
                (folder / f"{os.getpid()}.part").replace(folder / f"{os.getpid()}.json")
            return result

        return call

    marks["import"] = time.time()
    launch.init_rank = noted("meet", launch.init_rank)
    worker.resume = noted("load", worker.resume)
    worker._expect = noted("set up", worker._expect)
    recorder.Recorder.add = noted(PARTS[-1], recorder.Recorder.add)  # type: ignore[method-assign]
    return run_command(arguments)


def measured(launcher: str, silence_s: float) -> dict[str, float]:
    """Seconds of each part of one restart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(
            tomli_w.dumps(RECIPE | {"peers": {"silence_s": silence_s}})
        )
        train = [__file__, "--rank", name, "train", f"{name}/recipe.toml", "--out", f"{name}/run"]
        command = [sys.executable, *(_TORCHRUN if launcher == "torchrun" else ()), *train]
        with started(command) as process:
            old = wait_for(lambda: marks_of(folder, 2))
            wait_for(lambda: list((folder / "run").glob("checkpoints/*/manifest.json")))
            handles = [os.pidfd_open(pid) for pid in old]
            began = time.time()
            os.kill(list(old)[-1], signal.SIGKILL)
            for handle in handles:
                select.select([handle], [], [])
            ended = time.time()
            if launcher == "torchrun":
                new = wait_for(lambda: marks_of(folder, 4))
                return parts(began, ended, [new[pid] for pid in new if pid not in old])
            process.wait()
        with started([*command, "--resume"]):
            new = wait_for(lambda: marks_of(folder, 4))
            return parts(began, ended, [new[pid] for pid in new if pid not in old])


def parts(killed: float, ended: float, ranks: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each part, of the rank that ends it last."""
    ends = [ended, min(marks["start"] for marks in ranks)]
    ends += [max(marks[part] for marks in ranks) for part in PARTS[2:]]
    return {
        part: end - begin for part, begin, end in zip(PARTS, [killed, *ends], ends, strict=False)
    }


def marks_of(folder: Path, count: int) -> dict[int, dict[str, float]]:
    """The notes of `count` processes, by process id; empty where there are fewer."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return (
        {int(path.stem): json.loads(path.read_text()) for path in files}
        if len(files) >= count
        else {}
    )


def wait_for(look: Callable[[], Any], seconds: float = 180) -> Any:
    """What `look` finds, as soon as it finds something."""
    limit = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > limit:
            raise TimeoutError(f"nothing was found within {seconds} s")
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def started(command: list[str]):  # type: ignore[no-untyped-def]
    """The process of `command` without its output; it ends with the context."""
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
