"""Checks and measures the package on a GPU: `make gpu`, or

    PYTHONPATH=src python -m benchmarks.gpu [PART ...] [--device cuda] [--out DIR]

from the root of the repository. It needs Python with torch >= 2.10, triton and pytest: no install, no network. The
parts, in this order: first, right, waiting, fast, occupancy, memory, training, twin, world. Each runs in a process of
its own: the failure of one does not cost the others; all of them take about fifteen minutes. The
part law, of nine minutes, runs only where it is named. Without a GPU it says so and ends with exit
code 2. `--device cpu --tiny` proves the script itself.

The directory gets report.html and report.md, and the findings of each part as JSON. The exit code is 1 where a check
failed or a part broke.
"""

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
from benchmarks.gpu.children import environment, how_it_ended, ran, stacks_at_the_end
from benchmarks.gpu.common import Findings, Job
from benchmarks.gpu.compiling import compile_all
from benchmarks.gpu.report import clocks, read_findings, summary, write_report

PARTS = {
    "first": 60, "right": 200, "waiting": 50, "fast": 120, "occupancy": 90, "memory": 30, "training": 90, "twin": 100,
    "world": 90,
}  # fmt: skip
"""Seconds that each part may take; it leaves out its last cases where they would take longer."""
ON_REQUEST = {"law": 540}
"""Parts that run where they are named alone, and their seconds."""
EVERY = PARTS | ON_REQUEST
COMPILED = ("right", "waiting", "fast")
"""Parts of many kernels: all of their kernels are compiled before the first of them, outside of its time."""
GRACE_S = 45
"""Seconds after which a part that does not end is ended."""
ON_CPU = 2
"""A CPU proves the script, often beside other work: each part may take so many times as long."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"of {', '.join(PARTS)}; all when left out; and {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that prove the script, not the package"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-report"), help="directory of the report"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for part in args.parts:
        if part not in EVERY:
            parser.error(f"no part is called {part!r}; there are {', '.join(EVERY)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees none, so nothing is measured (--device cpu tries the script)"
        )
        return 2
    if args.inside:
        return work(args.parts[0], args.device, args.tiny, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    began, seen = time.monotonic(), []
    parts = [part for part in EVERY if part in (args.parts or PARTS)]
    compiled = ""
    for part in parts:
        if args.device == "cuda" and part in COMPILED and not compiled:
            compiled = compile_all(args.out.resolve())
            print(f"\ncompiled before the clock: {compiled}", flush=True)
        run_apart(part, args.device, args.tiny, args.out.resolve())
        seen.append(clocks())
    findings = {part: read_findings(args.out / f"{part}.json") for part in EVERY}
    there = {part: found for part, found in findings.items() if found is not None}
    write_report(args.out, there, args.device, seen, time.monotonic() - began, compiled)
    print("\n" + summary(there, time.monotonic() - began, args.out))
    return int(
        any(found.failures or not found.done for part, found in there.items() if part in parts)
    )


def run_apart(part: str, device: str, tiny: bool, out: Path) -> None:
    """Runs one part in a process of its own, which is ended after its time; notes how it ended."""
    path, log = out / f"{part}.json", out / f"{part}.output.txt"
    Findings(path, title=part).save()
    most_s = EVERY[part] * (1 if device == "cuda" else ON_CPU) + GRACE_S
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        part,
        "--device",
        device,
        "--out",
        str(out),
        "--inside",
    ]
    print(f"\n{part}", flush=True)
    code = ran([*command, *["--tiny"] * tiny], environment(device), log, most_s, shown=True)
    found = read_findings(path)
    if found is not None and code != 0:
        found.failures.append(
            f"the part {how_it_ended(code, most_s)}" + f", in {found.began!r}" * bool(found.began)
        )
    if found is not None:
        found.files.append(log.name)
        found.save()


def work(part: str, device: str, tiny: bool, out: Path) -> int:
    """Runs one part in this process."""
    stacks_at_the_end()
    torch.set_num_threads(1)
    index = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    module = import_module(f"benchmarks.gpu.{part}")
    findings = Findings(out / f"{part}.json", title=module.TITLE)
    seconds = EVERY[part] * (1 if device == "cuda" else ON_CPU)
    module.measure(Job(index, tiny, findings, time.monotonic() + seconds))
    findings.done = True
    findings.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
