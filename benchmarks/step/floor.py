"""Time of an optimizer step against the floor that memory bandwidth sets, on one device without a network.

    python -m benchmarks.step.floor [--device cuda] [--millions 8 128]
    python -m benchmarks.step.floor --codes [--millions 2 50]

The floor is the bytes that any step with a momentum must move, at the rate at which the device copies: the gradient is
read, momentum and weights are read and written, 20 bytes per parameter (28 for AdamW). There are two replicas; a
loopback returns this replica's messages as those of the other. Five steps are measured together, so that a wait for the
accelerator between them counts; the subjects take turns, and the median counts. Memory is the accelerator's peak above
its level between two steps.

`--codes` measures schemes that send every coordinate in few bits, on a CPU: nanoseconds of processor time per parameter
beyond those of AdamW's own step, in plain torch and with compiled kernels; what of it the loopback takes, which plays
the network; and the peak of resident memory in bytes per parameter, gradients and AdamW included. Each subject has a
process of its own, in which its steps and AdamW's take turns; the median counts.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.runtime import decides_on_device

CODES: dict[str, Callable[[], dt.schemes.Scheme]] = {
    "loco, 4 bits": dt.loco,
    "loco, 2 bits": lambda: dt.loco("2bit"),
    "muloco, 4 bits": lambda: dt.muloco(every=1),
    "streaming_diloco, 4 bits": lambda: dt.schemes.streaming_diloco(every=1, fragments=1, delay=0),
}
STEPS = 5
SUBJECTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "demo, compiled": (True, {}),
    "demo": (False, {}),
    "demo, sign": (False, {"precision": "sign", "error_feedback": False}),
}
"""By name: with compiled kernels (on CPUs only) or without, and how values are sent."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--millions",
        nargs="+",
        type=int,
        help="of parameters (default: 8, or 128 on an accelerator)",
    )
    parser.add_argument("--topk", nargs="+", type=int, default=[4, 32], help="of chunk 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--codes", action="store_true", help="dense codes of few bits, on a CPU")
    parser.add_argument("--subject", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.subject:
        print(json.dumps(subject_of_codes(**json.loads(args.subject))))
        return
    if args.codes:
        codes(args.millions or [2, 50], args.rounds)
        return
    print(
        "| parameters | copied, GB/s | step | ms | floor, ms | step / floor | peak, bytes per parameter |"
    )
    print("|---|---|---|---|---|---|---|")
    for millions in args.millions or ([128] if decides_on_device(args.device) else [8]):
        table(millions * 2**20, args.device, args.topk, args.rounds)


def table(numel: int, device: torch.device, topks: list[int], rounds: int) -> None:
    gradient = torch.randn(numel, device=device)
    subjects = {"copy": copying(gradient), "AdamW, alone": stepping(gradient)}
    for topk in topks:
        for name, (kernels, sent) in SUBJECTS.items():
            if not (kernels and decides_on_device(device)):
                scheme = dt.demo(topk=topk, chunk=64, **sent)
                subjects[f"{name}, topk {topk}"] = stepping(gradient, scheme, kernels)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    peaks: dict[str, int | None] = dict.fromkeys(subjects)
    for turn in range(rounds + 1):
        for name, step in subjects.items():
            seconds, peaks[name] = measured(step, device)
            if turn:  # the first turn warms up
                times[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    rate = 8 * numel / medians.pop("copy")
    for name, seconds in medians.items():
        floor = (28 if name.startswith("AdamW") else 20) * numel / rate
        cells = [
            f"{numel / 2**20:.0f} Mi",
            f"{rate / 1e9:.1f}",
            name,
            f"{seconds * 1e3:.2f}",
            f"{floor * 1e3:.2f}",
        ]
        peak = peaks[name]
        print(
            "| "
            + " | ".join(
                [*cells, f"{seconds / floor:.1f}", "" if peak is None else f"{peak / numel:.1f}"]
            )
            + " |",
            flush=True,
        )


def codes(sizes: list[int], rounds: int) -> None:
    print(
        "| scheme | engine | parameters | ns beyond AdamW | of them the loopback | AdamW, ns"
        " | peak, bytes per parameter |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in CODES:
        for kernels in (False, True):
            for millions in sizes:
                task = json.dumps(
                    {"name": name, "kernels": kernels, "millions": millions, "rounds": rounds}
                )
                command = [sys.executable, "-m", "benchmarks.step.floor", "--subject", task]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                cells = [name, "kernels" if kernels else "plain torch", f"{millions} M"]
                cells += [f"{found[key]:.2f}" for key in ("beyond", "loopback", "adamw")]
                print("| " + " | ".join([*cells, f"{found['peak']:.1f}"]) + " |", flush=True)


class TimedLoopback(LoopbackCommunicator):
    """A loopback that adds up the processor time of its gathers."""

    spent = 0.0

    def all_gather(self, mine: torch.Tensor) -> Callable[[], torch.Tensor]:
        gather = super().all_gather(mine)

        def wait() -> torch.Tensor:
            began = time.process_time()
            found = gather()
            self.spent += time.process_time() - began
            return found

        return wait


def subject_of_codes(name: str, kernels: bool, millions: int, rounds: int) -> dict[str, float]:
    if not kernels:
        from detonation.core.compute import kernel_library

        kernel_library.load_library = lambda: None
    loopback = TimedLoopback(2)
    warm, _, take = matrices(1, CODES[name](), TimedLoopback(2))  # libraries load, and kernels
    take()
    # as in training, the process has freed a large tensor: only then malloc keeps freed memory
    large = torch.zeros(7 * 2**20)
    del warm, take, large
    gc.collect()
    before = resident("VmRSS")
    model, gradients, step = matrices(millions, CODES[name](), loopback)
    numel = sum(parameter.numel() for parameter in model)
    peaks = []
    for _ in range(3):
        refill(model, gradients)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        step()
        peaks.append(resident("VmHWM") - before)
    # `gradients`, from which those of a step are copied, are no part of a step
    found = {"peak": max(peaks[1:]) / numel - 4}
    alone, _, adamw = matrices(millions, None, loopback)
    times: dict[str, list[float]] = {"adamw": [], "all": [], "loopback": []}
    for _ in range(rounds):
        for key, each, take in (("all", model, step), ("adamw", alone, adamw)):
            refill(each, gradients)
            loopback.spent = 0.0
            began = time.process_time()
            take()
            times[key].append(time.process_time() - began)
            if key == "all":
                times["loopback"].append(loopback.spent)
    found |= {key: statistics.median(each) * 1e9 / numel for key, each in times.items()}
    return found | {"beyond": found["all"] - found["adamw"]}


def matrices(
    millions: int, scheme: dt.schemes.Scheme | None, loopback: LoopbackCommunicator
) -> tuple[torch.nn.ParameterList, list[torch.Tensor], Callable[[], Any]]:
    """Makes 16 square matrices, their gradients, and a step of AdamW, with the scheme if there is one."""
    side = int((millions * 1e6 / 16) ** 0.5) // 8 * 8
    drawn = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList([torch.zeros(side, side) for _ in range(16)])
    gradients = [] if scheme is None else [torch.randn(side, side, generator=drawn) for _ in model]
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    refill(model, gradients or [torch.zeros_like(each) for each in model])
    if scheme is None:
        return model, gradients, base.step
    return model, gradients, dt.replicate(base, model, loopback, scheme).step


def refill(model: torch.nn.ParameterList, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(gradient)
        parameter.grad.copy_(gradient)


def resident(key: str) -> int:
    """Bytes of resident memory of this process: now (VmRSS), or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith(key))
    return int(line.split()[1]) * 1024


def copying(gradient: torch.Tensor) -> Callable[[], Any]:
    other = torch.empty_like(gradient)
    return lambda: other.copy_(gradient)


def stepping(
    gradient: torch.Tensor, scheme: dt.schemes.Scheme | None = None, kernels: bool = False
) -> Callable[[], Any]:
    """Makes a step of `scheme` for one parameter of the gradient's shape; without a scheme, a step of AdamW alone."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros_like(gradient))
    model.weight.grad = gradient.clone()
    if scheme is None:
        return torch.optim.AdamW([model.weight]).step
    return dt.replicate(
        dt.SignSGD([model.weight], lr=1e-3), model, LoopbackCommunicator(2), scheme, kernels=kernels
    ).step


def measured(step: Callable[[], Any], device: torch.device) -> tuple[float, int | None]:
    """Measures seconds per step and, on an accelerator, the peak of memory above the level before."""
    module: Any = torch.get_device_module(device) if decides_on_device(device) else None
    if module:
        module.synchronize(device)
        module.reset_peak_memory_stats(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if not module:
        return (time.perf_counter() - began) / STEPS, None
    held = module.memory_allocated(device)
    module.synchronize(device)
    return (time.perf_counter() - began) / STEPS, module.max_memory_allocated(device) - held


if __name__ == "__main__":
    main()
