"""Fast: device time of a step, and of each of its kernels, beside the bytes that must move at the speed of a copy.

Each repetition, and each kernel, begins with a cold cache.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from benchmarks.gpu.common import (
    ENGINES,
    SIZES,
    Job,
    Stepper,
    cold_cache,
    copy_bandwidth,
    instead_of_launches,
    median_s,
    numel,
    seconds_of,
    stepper,
)

import detonation as dt

TITLE = "A step beside the speed of the memory"
SCHEMES: dict[str, dt.schemes.Scheme] = {
    "demo 4/64, sign": dt.demo(precision="sign", error_feedback=False),
    "demo 4/64": dt.demo(),
    "demo 1/64, sign": dt.demo(topk=1, precision="sign", error_feedback=False),
    "demo 32/64": dt.demo(topk=32),
    "random_sign 1/8": dt.random_sign(),
    "random 1/8": dt.schemes.random(rate=1 / 8),
}
PREDICTED: dict[str, Callable[..., dt.schemes.Scheme]] = {
    "demo 1/64": partial(dt.demo, topk=1),
    "demo 4/64": dt.demo,
    "demo 4/64 sign": partial(dt.demo, precision="sign", error_feedback=False),
    "random_sign 1/8": dt.random_sign,
    "loco": dt.loco,
}
"""The rows of the table of docs/gpu.md."""
FLOOR_BYTES = {"AdamW": 28, "loco": 16}
"""Bytes per fp32 parameter, 20 where none are named: the gradient is read; weight and momentum (two for AdamW) are read
and written, but not the weights by `loco`, whose optimizer is another."""


def measure(job: Job) -> None:
    names = ["tiny"] if job.tiny else ["1.2B", "125M", "8M"]
    best: dict[str, float] = {}
    for size in names:
        shapes = SIZES[size]
        count = numel(shapes)
        if job.on_gpu and 40 * count > torch.cuda.mem_get_info(job.device)[0]:
            job.note(f"{size} was left out: its state does not fit")
            continue
        bandwidth = copy_bandwidth(job.device, min(4 * count, 2**30))
        job.note(f"{size}: a copy moves {bandwidth / 1e9:,.0f} GB/s")
        adamw_s = _subject(job, size, "AdamW, fused", "torch", _adamw(job, shapes), bandwidth, None)
        if size == names[0]:
            _predicted(job, size, bandwidth)
        for engine in ENGINES:
            for name, scheme in SCHEMES.items():
                if job.left_s() < 8:
                    job.leave_out(f"{size}: {engine}, {name}")
                    continue
                if job.tiny and "sign" not in name:
                    continue
                act = _ours(job, shapes, scheme, engine)
                if act is not None:
                    seconds = _subject(job, size, name, engine, act, bandwidth, adamw_s)
                    if seconds is not None and size == names[0] and adamw_s:
                        best[f"{name}, {engine}"] = seconds / adamw_s
    if best:
        name, ratio = min(best.items(), key=lambda item: item[1])
        job.headline(f"{names[0]}: {name} takes {ratio:.2f} times as long as AdamW(fused)")


def cells() -> list[tuple[str, str, int, torch.dtype]]:
    """The cells of the table of docs/gpu.md, and one in bf16: scheme, link, replicas, type of the parameters."""
    links = [("all-gather", 2), ("all-gather", 8), ("owner", 8), ("all-gather", 1)]
    found = [(name, *link, torch.float32) for link in links for name in PREDICTED]
    return [*found, ("demo 4/64 sign", "all-gather", 2, torch.bfloat16)]


def _predicted(job: Job, size: str, bandwidth: float) -> None:
    """Measures what docs/gpu.md predicts: by replicas, through an all-gather and through owners; and one in bf16."""
    engine = "torch" if job.tiny else "triton"  # on a CPU kernels are interpreted
    for name, link, replicas, dtype in cells():
        called = f"{name}, R={replicas}, {link}" + ", bf16" * (dtype == torch.bfloat16)
        if job.left_s() < 8:
            job.leave_out(f"{size}: {called}")
            continue
        make = partial(
            stepper,
            SIZES[size],
            job.device,
            PREDICTED[name](link=link),
            engine,
            dtype,
            replicas=replicas,
        )
        made = job.attempt(f"{called} is built", make)
        _subject(job, size, called, engine, made.step if made else None, bandwidth, None)
        if made and replicas == 2 and dtype == torch.float32 and engine == "triton":
            job.attempt(
                f"the kernels of {called}", partial(kernels, job, size, called, made, bandwidth)
            )


def kernels(job: Job, size: str, step: str, made: Stepper, bandwidth: float) -> None:
    """Adds a row for each kernel of a step: its time, and that of a copy of the bytes that it must move."""
    seconds, moved = defaultdict[str, list[float]](list), defaultdict[str, float](float)
    cold = cold_cache(job.device)

    def timed(name: str, launch: Callable[..., Any], nbytes: float) -> None:
        cold()
        seconds[name].append(seconds_of(launch, job.device))
        moved[name] += nbytes

    times = 2 if job.tiny else 10
    with instead_of_launches(timed, numel(SIZES[size])):
        for _ in range(times):
            made.step()
    for name, each in seconds.items():
        nbytes, of_step = moved[name] / times, len(each) / times
        _row(job, size, f"{step}: {name}", "triton", median(each) * of_step, nbytes, bandwidth)


def _adamw(job: Job, shapes: list[tuple[int, ...]]) -> Callable[[], Any] | None:
    fused = job.on_gpu or None
    made = stepper(
        shapes,
        job.device,
        None,
        base=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=fused),
    )
    return made.step if made else None


def _ours(
    job: Job, shapes: list[tuple[int, ...]], scheme: dt.schemes.Scheme, engine: str
) -> Callable[[], Any] | None:
    made = job.attempt(f"{engine} is built", lambda: stepper(shapes, job.device, scheme, engine))
    return made.step if made else None


def _subject(
    job: Job,
    size: str,
    name: str,
    engine: str,
    act: Callable[[], Any] | None,
    bandwidth: float,
    adamw_s: float | None,
) -> float | None:
    """Adds the row of one subject; returns its seconds per step, or None where it failed."""
    if act is None:
        return None
    measured = partial(
        median_s, act, job.device, 5 if job.tiny else 50, most_s=1.5, before=cold_cache(job.device)
    )
    seconds: float | None = job.attempt(f"{size} {name}, {engine}", measured)
    if seconds is not None:
        nbytes = FLOOR_BYTES.get(name.partition(",")[0], 20) * numel(SIZES[size])
        _row(job, size, name, engine, seconds, nbytes, bandwidth, adamw_s)
    return seconds


def _row(
    job: Job, size: str, name: str, engine: str, seconds: float, nbytes: float, bandwidth: float,
    adamw_s: float | None = None,
) -> None:  # fmt: skip
    """A line of the table. nbytes: What must move; the floor is the time of a copy that moves as many."""
    job.row(
        parameters=size,
        step=name,
        engine=engine,
        ms=1e3 * seconds,
        ms_per_1e9=1e12 * seconds / numel(SIZES[size]),
        GB_per_s=nbytes / seconds / 1e9,
        floor_ms=1e3 * nbytes / bandwidth,
        times_floor=seconds * bandwidth / nbytes if nbytes else "",
        times_AdamW="" if adamw_s is None else seconds / adamw_s,
    )
