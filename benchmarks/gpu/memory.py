"""Memory: peak bytes per parameter of a step of each scheme, against AdamW's."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.accelerator.memory import Watch
from benchmarks.gpu.common import SIZES, Job, Stepper, numel, stepper

import detonation as dt

TITLE = "Memory of a step"
SCHEMES: dict[str, dt.schemes.Scheme | None] = {
    "AdamW": None,
    "full": dt.full(),
    "demo 4/64": dt.demo(),
    "demo 4/64, sign": dt.demo(precision="sign", error_feedback=False),
    "demo 4/64, owner": dt.demo(link="owner"),
    "demo 32/64": dt.demo(topk=32),
    "random_sign 1/8": dt.random_sign(),
    "diloco": dt.diloco(every=2),
    "muloco": dt.muloco(every=2),
}
ADAMW = {"AdamW", "full", "diloco"}


def measure(job: Job) -> None:
    size = "tiny" if job.tiny else "125M"
    peaks: dict[str, float] = {}
    for name, scheme in list(SCHEMES.items())[: 4 if job.tiny else None]:
        for engine in ("torch", "triton") if job.on_gpu and scheme is not None else ("torch",):
            called = f"{name}, {engine}"
            if job.has(called) and name != "AdamW":
                continue
            if job.left_s() < 4 and not job.tiny:
                job.leave_out(called)
                continue
            found = job.attempt(called, partial(peak, job, size, name, scheme, engine))
            if found is not None:
                kept, most = found
                peaks[f"{name}, {engine}"] = most
                job.row(
                    step=name,
                    engine=engine,
                    kept=kept,
                    peak=most,
                    times_AdamW=most / peaks.get("AdamW, torch", most),
                )
    job.note(
        "Bytes per fp32 parameter of 2 replicas: kept with weights and gradients, and at the peak of a step."
    )
    ours = {
        name: most for name, most in peaks.items() if name.startswith(("demo 4", "random_sign"))
    }
    if ours and "AdamW, torch" in peaks:
        name, most = min(ours.items(), key=lambda item: item[1])
        job.headline(
            f"{name}: {most:.1f} bytes per parameter at the peak, AdamW {peaks['AdamW, torch']:.1f}"
        )


def peak(
    job: Job, size: str, name: str, scheme: dt.schemes.Scheme | None, engine: str
) -> tuple[float, float] | None:
    """Bytes per parameter that stay between two steps, and at the peak of a step; None where `engine` is another."""
    base: Callable[[Any], torch.optim.Optimizer] = partial(dt.SignSGD, lr=1e-4)
    if name in ADAMW:
        base = partial(torch.optim.AdamW, lr=1e-4, fused=job.on_gpu or None)
    elif name == "muloco":
        base = partial(dt.Muon, lr=1e-4)
    count, steps = numel(SIZES[size]), 2 * (scheme.round.every if scheme else 1) + 1
    make = partial(stepper, SIZES[size], job.device, scheme, engine, base=base)
    if job.on_gpu:
        gc.collect()  # what was measured before goes now, and not in the midst
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(job.device)
        made = make()
        if made is None:
            return None
        made.gradients.clear()
        _steps(made, steps)
        torch.cuda.synchronize(job.device)
        torch.cuda.reset_peak_memory_stats(job.device)
        _steps(made, steps)
        torch.cuda.synchronize(job.device)
        now, most = (
            torch.cuda.memory_allocated(job.device),
            torch.cuda.max_memory_allocated(job.device),
        )
        return (now - before) / count, (most - before) / count
    with Watch() as watch:  # counts the storages that torch makes
        made = make()
        if made is None:
            return None
        made.gradients.clear()
        _steps(made, steps)
        watch.peak = watch.now
        _steps(made, steps)
        return watch.now / count, watch.peak / count


def _steps(made: Stepper, steps: int) -> None:
    for _ in range(steps):
        made.step()
