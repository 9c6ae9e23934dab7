"""Compiles the kernels of the tests and parts that follow, in several processes, before the clock of a part starts.

    PYTHONPATH=src:tests:. python -m benchmarks.gpu.compiling [--target 90] [--schemes NAME ...]

The device `meta` plays the steps, and each launch is compiled instead (see aot.py), as Triton's JIT specialises it: a
step that runs later finds the kernel in Triton's cache, unless an address of its own is aligned otherwise. `--target`
is a compute capability, for a machine without a GPU.
"""

import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.children import environment, how_it_ended, ran

MOST_S = 240


def compile_all(
    out: Path, *arguments: str, processes: int | None = None, device: str = "cuda"
) -> str:
    """Compiles in as many processes as there are cores, at most 16; says how many kernels, and how long it took."""
    began, count = time.monotonic(), processes or min(16, len(os.sched_getaffinity(0)))
    env = environment(device)
    logs = [out / f"compiling.{share}.txt" for share in range(count)]

    def one(share: int) -> int | None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.compiling",
            "--share",
            str(share),
            "--of",
            str(count),
        ]
        return ran([*command, *arguments], env, logs[share], MOST_S)

    with ThreadPoolExecutor(count) as pool:
        codes = list(pool.map(one, range(count)))
    kernels = {
        line
        for log in logs
        for line in log.read_text().splitlines()
        if line.startswith("compiled ")
    }
    failed = [
        f"{log.name} {how_it_ended(code, MOST_S)}"
        for log, code in zip(logs, codes, strict=True)
        if code != 0
    ]
    text = f"{len(kernels)} kernels by {count} processes in {time.monotonic() - began:.0f} s"
    return "; ".join([text, *failed])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument(
        "--target", type=int, help="a compute capability, times ten; the GPU's when left out"
    )
    parser.add_argument(
        "--schemes",
        nargs="+",
        help="of tests/zoo.py; all of them and those of fast.py when left out",
    )
    parser.add_argument("--kernels", nargs="+", default=[], help="all of them when left out")
    args = parser.parse_args()
    import torch

    # aot lets `meta` play an accelerator, and a driver that launches nothing stand in for the GPU's
    from benchmarks.accelerator import aot
    from benchmarks.gpu.common import SIZES
    from benchmarks.gpu.fast import PREDICTED, SCHEMES, cells

    from zoo import TALKING

    torch.set_num_threads(1)
    major, minor = divmod(args.target, 10) if args.target else torch.cuda.get_device_capability()

    def compiled(kernel: Any, programs: int, *values: Any, **constants: Any) -> None:
        """Compiles in the place of a launch."""
        if not args.kernels or kernel.__name__ in args.kernels:
            found = aot.compiled_for(kernel, 10 * major + minor, values, constants)
            print(f"compiled {kernel.__name__} {found.hash}", flush=True)

    of_laws = [(11,), (64, 31), (64,), (3, 64), (3,)]
    of_runs = [(129, 67), (129,), (31, 129)]
    cases = [
        (name, TALKING[name], shapes, replicas, torch.float32)
        for shapes, replicas in ((of_runs, 2), (SIZES["tiny"], 2), (of_laws, 3))
        for name in args.schemes or TALKING
    ]
    if not args.schemes:
        sizes = ("1.2B", "125M", "8M")
        cases += [
            (name, scheme, SIZES[size], 2, torch.float32)
            for name, scheme in SCHEMES.items()
            for size in sizes
        ]
        cases += [
            (name, PREDICTED[name](link=link), SIZES[sizes[0]], *sort)
            for name, link, *sort in cells()
        ]
    failed = 0
    for name, scheme, shapes, replicas, dtype in cases[args.share :: args.of]:
        try:
            with aot.instead_of_launches(compiled):
                aot.step(scheme, replicas, shapes, dtype)
        except Exception:
            failed += 1
            print(f"FAILED {name} of {replicas} replicas", flush=True)
            traceback.print_exc(file=sys.stdout)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
