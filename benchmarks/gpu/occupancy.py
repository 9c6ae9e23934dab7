"""Occupancy: the long kernels of a step with other numbers of warps and registers.

More warps hide more of the time for which memory and barriers make a warp wait.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.common import (
    SIZES,
    Job,
    cold_cache,
    copy_bandwidth,
    instead_of_launches,
    median_s,
    numel,
    read_findings,
    stepper,
)  # fmt: skip

import detonation as dt

TITLE = "Warps and registers of the kernels"
SCHEMES = {
    "demo 4/64": dt.demo(),
    "demo 4/64, sign": dt.demo(precision="sign", error_feedback=False),
    "random_sign 1/8": dt.random_sign(),
}
WARPS, REGISTERS = (8, 4, 16), (None, 128, 96, 64)
"""As they are first, then others; None leaves the registers to the compiler."""
LONG = ("scan", "encode", "decode")
"""Beginnings of the names of kernels that read or write all parameters."""
TIMES = 5


def measure(job: Job) -> None:
    size, best = "tiny" if job.tiny else "1.2B", list[str]()
    wanted = kernels_of_profile(job) or LONG
    bandwidth = copy_bandwidth(job.device, 2**20 if job.tiny else 2**30)
    for name, scheme in list(SCHEMES.items())[: 1 if job.tiny else None]:
        made = job.attempt(
            f"{name} is built", partial(stepper, SIZES[size], job.device, scheme, "triton")
        )
        if made is None:
            job.note(f"{name}: the engine is not triton's")
            continue
        for kernel, (launch, moved) in started(made.step, numel(SIZES[size])).items():
            if kernel.startswith(wanted):
                best += variants(job, f"{name}: {kernel}", launch, moved / bandwidth)
    job.headline("; ".join(best) or "no kernel is faster with others")


def kernels_of_profile(job: Job) -> tuple[str, ...]:
    """The kernels that a profile of this build names; none without one."""
    found = read_findings(job.findings.path.with_name("profile.json"))
    if found is None or found.build != job.findings.build:
        return ()
    return tuple(found.kernels)


def started(step: Callable[[], Any], numel: int) -> dict[str, tuple[Callable[..., Any], float]]:
    """The launches of a step after the first, by the label of the kernel: each to be done again, and its bytes."""
    found: dict[str, tuple[Callable[..., Any], float]] = {}

    def kept(name: str, launch: Callable[..., Any], moved: float) -> None:
        found[name] = launch, moved
        launch()

    step()
    with instead_of_launches(kept, numel):
        step()
    return found


def variants(job: Job, name: str, launch: Callable[..., Any], floor_s: float) -> list[str]:
    """Adds a row for each variant of a kernel; returns a line where one takes less than 95 % of the kernel as it is."""
    cold, seconds = cold_cache(job.device), dict[str, float]()
    for warps in WARPS:
        for registers in REGISTERS:
            called = f"{warps} warps" + f", {registers} registers" * (registers is not None)
            if job.has(f"{name}, {called}"):
                continue
            if job.left_s() < 5 and not job.tiny:
                job.leave_out(f"{name}, {called}")
                continue
            act = partial(
                launch, warps=warps, **({} if registers is None else {"maxnreg": registers})
            )
            took = job.attempt(
                f"{name}, {called}", partial(median_s, act, job.device, TIMES, warm=1, before=cold)
            )
            if took is not None:
                seconds[called] = took
                job.row(kernel=name, variant=called, ms=1e3 * took, times_floor=took / floor_s)
    fastest = min(seconds, key=lambda each: seconds[each], default="")
    as_it_is = seconds.get(f"{WARPS[0]} warps", 0.0)
    faster = fastest and seconds[fastest] < 0.95 * as_it_is
    return [f"{name} with {fastest} takes {seconds[fastest] / as_it_is:.2f}"] if faster else []
