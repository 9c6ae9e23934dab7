"""Checks and measures the package on a GPU: `make gpu`, or

    PYTHONPATH=src python -m benchmarks.gpu [PART ...] [--device cuda] [--out DIR]

from the root of the repository. It needs Python with torch >= 2.10, triton and pytest: no install, no network. The
parts, in this order: first, right, waiting, fast, occupancy, memory, training, twin, world. Each runs in a process of
its own: the failure of one does not cost the others; all of them take about fifteen minutes. The
part law, of nine minutes, runs only where it is named. Without a GPU it says so and ends with exit
code 2. `--device cpu --tiny` proves the script itself.

`--minutes 9` is for a GPU that is lent for a short time. Kernels are compiled before the clock
starts. Then come the parts that decide most: profile, right, waiting, memory and occupancy, and the
others while time is left. What a report of the same build in `--out` has is not measured again.

The directory gets report.html and report.md, and the findings of each part as JSON. The exit code is 1 where a check
failed or a part broke.
"""

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
from benchmarks.gpu.children import LAST_WORDS_S, environment, how_it_ended, ran, stacks_at_the_end
from benchmarks.gpu.clock import LEAST_S, Clock, build_of, continued, parts_by_worth
from benchmarks.gpu.common import Findings, Job, read_findings
from benchmarks.gpu.compiling import compile_all
from benchmarks.gpu.report import clocks, summary, write_report

PARTS = {
    "first": 60, "right": 200, "waiting": 50, "fast": 120, "occupancy": 90, "memory": 30, "training": 90, "twin": 100,
    "world": 90,
}  # fmt: skip
"""Seconds that each part may take; it leaves out its last cases where they would take longer."""
ON_REQUEST = {"law": 540, "profile": 120}
"""Parts that run where they are named, or `profile` under `--minutes`, and their seconds."""
EVERY = PARTS | ON_REQUEST
COMPILED = ("profile", "right", "waiting", "fast")
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
    parser.add_argument(
        "--minutes", type=float, help="the time of all parts together, without compiling"
    )
    parser.add_argument("--ends-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--build", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for part in args.parts:
        if part not in EVERY:
            parser.error(f"no part is called {part!r}; there are {', '.join(EVERY)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees none, so nothing is measured (--device cpu tries the script)"
        )
        return 2
    if args.minutes is not None and not 0 < args.minutes < 1000:
        parser.error(f"--minutes is {args.minutes:g}: it has to be above 0 and below 1000")
    if args.ends_at is not None:
        return work(args.parts[0], args.device, args.tiny, args.out, args.ends_at, args.build)
    args.out.mkdir(parents=True, exist_ok=True)
    return run_parts(args)


def run_parts(args: argparse.Namespace) -> int:
    """Runs the wanted parts, each in a process of its own, and writes the report."""
    out = args.out.resolve()
    parts = [part for part in EVERY if part in (args.parts or PARTS)]
    build = ""
    if args.minutes is not None:
        parts = parts_by_worth(args.parts or ["profile", *PARTS])
        build = build_of(args.device, args.tiny)
    compiled = ""
    if args.device == "cuda" and any(part in COMPILED for part in parts):
        compiled = compile_all(out)
        print(f"\ncompiled before the clock: {compiled}", flush=True)
    began = time.monotonic()
    clock = None if args.minutes is None else Clock.of(args.minutes)
    seen: list[str] = []
    for number, part in enumerate(parts):
        if not starts(part, out, build, clock):
            continue
        ends_at = time.monotonic() + seconds_of_part(part, args.device)
        if clock is not None:
            ends_at = clock.end_of(part, parts[number + 1 :])
        run_apart(part, args.device, args.tiny, out, ends_at, build, clock)
        seen.append(clocks())
        write_report(
            args.out, all_findings(out), args.device, seen, time.monotonic() - began, compiled
        )
    there = all_findings(out)
    write_report(args.out, there, args.device, seen, time.monotonic() - began, compiled)
    print("\n" + summary(there, time.monotonic() - began, args.out))
    tried = [found for part, found in there.items() if part in parts]
    return int(any(found.failures or not found.done for found in tried))


def all_findings(out: Path) -> dict[str, Findings]:
    """The findings of each part that ever ran into this directory."""
    found = {part: read_findings(out / f"{part}.json") for part in EVERY}
    return {part: each for part, each in found.items() if each is not None}


def starts(part: str, out: Path, build: str, clock: Clock | None) -> bool:
    """True if a part has time, and an earlier report of the same build lacks some of it."""
    if clock is None:
        return True
    if clock.left_s() < LEAST_S:
        print(f"\n{part} was left out: the time was up", flush=True)
        return False
    found = read_findings(out / f"{part}.json")
    if found is not None and found.build == build and found.complete:
        print(f"\n{part} is in an earlier report of this build", flush=True)
        return False
    return True


def seconds_of_part(part: str, device: str) -> int:
    """Seconds that a part may take without `--minutes`."""
    return EVERY[part] * (1 if device == "cuda" else ON_CPU)


def run_apart(
    part: str,
    device: str,
    tiny: bool,
    out: Path,
    ends_at: float,
    build: str = "",
    clock: Clock | None = None,
) -> None:
    """Runs one part in a process of its own, which is ended after its time; notes how it ended."""
    path, log = out / f"{part}.json", out / f"{part}.output.txt"
    continued(path, part, build).save()
    most_s = ends_at - time.monotonic() + GRACE_S
    if clock is not None:
        most_s = min(most_s, max(1.0, clock.left_s() - LAST_WORDS_S))
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--device", device]
    command += ["--out", str(out), "--ends-at", str(ends_at), "--build", build]
    print(f"\n{part}", flush=True)
    code = ran([*command, *["--tiny"] * tiny], environment(device), log, most_s, shown=True)
    found = read_findings(path)
    if found is not None and code != 0:
        found.failures.append(
            f"the part {how_it_ended(code, most_s)}" + f", in {found.began!r}" * bool(found.began)
        )
    if found is not None:
        if log.name not in found.files:
            found.files.append(log.name)
        found.save()


def work(part: str, device: str, tiny: bool, out: Path, ends_at: float, build: str) -> int:
    """Runs one part in this process."""
    stacks_at_the_end()
    torch.set_num_threads(1)
    index = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    module = import_module(f"benchmarks.gpu.{part}")
    findings = continued(out / f"{part}.json", module.TITLE, build)
    findings.title = module.TITLE
    module.measure(Job(index, tiny, findings, ends_at))
    findings.done = True
    findings.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
