"""Time of an optimizer step against the floor that memory bandwidth sets, on one device without a network.

    python -m benchmarks.step.floor [--device cuda] [--millions 8 128]

The floor is the bytes that any step with a momentum must move, at the rate at which the device copies: the gradient is
read, momentum and weights are read and written, 20 bytes per parameter (28 for AdamW). There are two replicas; a
loopback returns this replica's messages as those of the other. Five steps are measured together, so that a wait for the
accelerator between them counts; the subjects take turns, and the median counts. Memory is the accelerator's peak above
its level between two steps.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.runtime import decides_on_device

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
    args = parser.parse_args()
    torch.set_num_threads(1)
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
