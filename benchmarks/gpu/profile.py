"""Profile: device time of each kernel of a step, each gap between two launches, and host time.

A step begins with a cold cache. The exchange of a simulated peer is named and not counted.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu.common import (
    SIZES,
    Job,
    Stepper,
    cold_cache,
    copy_bandwidth,
    instead_of_launches,
    numel,
    seconds_of,
    stepper,
    synchronize,
)

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator

TITLE = "Each kernel and each gap of a step"
SIGN = partial(dt.demo, precision="sign", error_feedback=False)
SUBJECTS: list[tuple[str, str, dt.schemes.Scheme]] = [
    ("125M", "demo 4/64, sign", SIGN()),
    ("1.2B", "demo 4/64, sign", SIGN()),
    ("1.2B", "demo 1/64, sign", SIGN(topk=1)),
    ("1.2B", "demo 4/64", dt.demo()),
    ("125M", "demo 4/64", dt.demo()),
    ("8M", "demo 4/64, sign", SIGN()),
    ("1.2B", "random_sign 1/8", dt.random_sign()),
    ("1.2B", "demo 32/64", dt.demo(topk=32)),
]
"""What is measured, in the order of what it tells."""
TINY_SHAPES = [(64, 64), (3,)]
"""Shapes that Triton's interpreter finishes in seconds."""
EXCHANGE = "exchange, simulated"
"""The name of what the simulated peers do on the device between two kernels."""
QUEUED_S = 0.03
"""Seconds for which the device is kept busy while the host launches a whole step."""
LARGE_SHARE = 0.1
FAR_FROM_FLOOR = 1.2
"""Occupancy tries the kernels above this share of a step and this multiple of their floor."""


@dataclass
class Span:
    """What ran on the device, between two times in seconds."""

    name: str
    start: float
    end: float


@dataclass
class Moved:
    """A launch of a step: its kernel, and the bytes that it must move."""

    name: str
    nbytes: float

    @property
    def kernel(self) -> str:
        return self.name.split(" ")[0] + "_kernel"


def measure(job: Job) -> None:
    if find_spec("triton") is None:
        job.check("triton can be imported", not job.on_gpu, "there are no kernels to profile")
        job.headline("no triton: no kernel was profiled")
        return
    times = 2 if job.tiny else 7
    bandwidth = copy_bandwidth(job.device, 2**20 if job.tiny else 2**30)
    with played_by_cpu(job):
        for size, name, scheme in SUBJECTS[: 2 if job.tiny else None]:
            called = f"{size}, {name}"
            if job.has(called):
                continue
            if job.left_s() < 12:
                job.leave_out(called)
                continue
            job.attempt(called, partial(subject, job, size, name, scheme, bandwidth, times))
            if job.on_gpu:
                torch.cuda.empty_cache()


def played_by_cpu(job: Job) -> AbstractContextManager[Any]:
    """Without a GPU the interpreter of Triton runs the kernels."""
    if job.on_gpu:
        return nullcontext()
    return patch.dict(os.environ, {"DETONATION_KERNELS": "triton", "TRITON_INTERPRET": "1"})


class TimedLoopback(LoopbackCommunicator):
    """A loopback that knows for how long it kept the host."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.host_s = 0.0

    def all_gather(self, mine: torch.Tensor) -> Callable[[], torch.Tensor]:
        arrived = super().all_gather(mine)

        def timed() -> torch.Tensor:
            began = time.perf_counter()
            found = arrived()
            self.host_s += time.perf_counter() - began
            return found

        return timed


def subject(
    job: Job, size: str, name: str, scheme: dt.schemes.Scheme, bandwidth: float, times: int
) -> None:
    """Measures one step, and adds a row for each kernel and one for the step."""
    shapes = TINY_SHAPES if job.tiny else SIZES[size]
    network = TimedLoopback(2)
    made = stepper(shapes, job.device, scheme, "triton", communicator=network)
    assert made is not None, "the engine is not triton's"
    for _ in range(3):
        made.step()
    launches = launches_of(made, numel(shapes))
    seen = [spans_of(made, launches, job) for _ in range(times)]
    host_s = host_seconds(made, network, job, times)
    queued_s = [queued_seconds(made, job) for _ in range(times)]
    device_s, gaps_s = add_rows(job, size, name, launches, seen, bandwidth)
    job.row(
        parameters=size,
        step=name,
        kernel="the step",
        ms=1e3 * device_s,
        gap_before_ms=1e3 * gaps_s,
        bytes_per_parameter=sum(each.nbytes for each in launches) / numel(shapes),
        times_floor=device_s * bandwidth / sum(each.nbytes for each in launches),
    )
    queued = statistics.median(queued_s)
    job.note(
        f"{size}, {name}: host {1e3 * host_s:.3g} ms; with all launches queued before"
        f" the first one starts {1e3 * queued:.3g} ms, which includes the {EXCHANGE}"
    )
    limit = "host" if host_s > device_s else "device"
    job.headline(f"{size}, {name}: device {1e3 * device_s:.3g} ms; the {limit} is the limit")


def launches_of(made: Stepper, parameters: int) -> list[Moved]:
    """The launches of a step, in their order."""
    found: list[Moved] = []

    def kept(name: str, launch: Callable[..., Any], nbytes: float) -> None:
        found.append(Moved(name, nbytes))
        launch()

    with instead_of_launches(kept, parameters):
        made.step()
    return found


def spans_of(made: Stepper, launches: list[Moved], job: Job) -> list[Span]:
    """What one step runs on the device, from a cold cache, in the order of its start."""
    cold_cache(job.device)()
    synchronize(job.device)
    if not job.on_gpu:
        return spans_by_clock(made)
    found = named(spans_by_profiler(made, job.device), launches)
    if [span.name for span in found if span.name != EXCHANGE] != [each.name for each in launches]:
        found = spans_by_events(made, job.device)
    return found


def spans_by_clock(made: Stepper) -> list[Span]:
    """The launches of a step by the host's clock; a CPU has ended a launch when it returns."""
    found: list[Span] = []

    def timed(name: str, launch: Callable[..., Any], nbytes: float) -> None:
        began = time.perf_counter()
        launch()
        found.append(Span(name, began, time.perf_counter()))

    with instead_of_launches(timed, 1):
        made.step()
    return with_exchange(found)


def spans_by_profiler(made: Stepper, device: torch.device) -> list[Span]:
    """The kernels and copies of a step as the profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        made.step()
        synchronize(device)
    cuda = torch.autograd.DeviceType.CUDA
    events: list[Any] = [each for each in profile.events() if each.device_type == cuda]
    spans = [
        Span(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6)
        for each in events
        if not each.is_user_annotation
    ]
    return sorted(spans, key=lambda span: span.start)


def spans_by_events(made: Stepper, device: torch.device) -> list[Span]:
    """The launches of a step between two events each, if the profiler cannot see kernels."""
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()
    events: list[tuple[str, Any, Any]] = []

    def timed(name: str, launch: Callable[..., Any], nbytes: float) -> None:
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        launch()
        last.record()
        events.append((name, first, last))

    with instead_of_launches(timed, 1):
        made.step()
    synchronize(device)
    found = [
        Span(name, begin.elapsed_time(first) / 1e3, begin.elapsed_time(last) / 1e3)
        for name, first, last in events
    ]
    return with_exchange(found)


def with_exchange(spans: list[Span]) -> list[Span]:
    """The spans with the exchange, which ends before messages are inspected."""
    found: list[Span] = []
    for span in spans:
        if span.name.startswith("inspect") and found:
            found.append(Span(EXCHANGE, found[-1].end, span.start))
        found.append(span)
    return found


def named(spans: list[Span], launches: list[Moved]) -> list[Span]:
    """The spans with the names of the launches; anything else on the device is the exchange's."""
    waiting = list(launches)
    found: list[Span] = []
    for span in spans:
        if waiting and span.name.startswith(waiting[0].kernel):
            name = waiting.pop(0).name
        else:
            name = EXCHANGE
        found.append(Span(name, span.start, span.end))
    return found


def gaps_of(spans: list[Span]) -> list[float]:
    """The idle seconds before each span: 0 for the first, and next to the exchange."""
    gaps = []
    ended = None
    after_exchange = False
    for span in spans:
        is_exchange = span.name == EXCHANGE
        idle = 0.0
        if ended is not None and not is_exchange and not after_exchange:
            idle = max(0.0, span.start - ended)
        gaps.append(idle)
        ended = max(span.end, ended or span.end)
        after_exchange = is_exchange
    return gaps


def host_seconds(made: Stepper, network: TimedLoopback, job: Job, times: int) -> float:
    """The median time in which the host starts a step, without the time of the loopback."""
    found = []
    for _ in range(times):
        synchronize(job.device)
        network.host_s = 0.0
        began = time.perf_counter()
        made.step()
        found.append(time.perf_counter() - began - network.host_s)
    return statistics.median(found)


def queued_seconds(made: Stepper, job: Job) -> float:
    """The device time of a step whose launches all wait in the queue, so that no gap is the
    host's.
    """
    cold_cache(job.device)()
    synchronize(job.device)
    if job.on_gpu:
        torch.cuda._sleep(int(QUEUED_S * 2e9))  # cycles: clocks reach about 2 GHz
    return seconds_of(made.step, job.device)


def add_rows(
    job: Job,
    size: str,
    step: str,
    launches: list[Moved],
    seen: list[list[Span]],
    bandwidth: float,
) -> tuple[float, float]:
    """Adds a row for each kernel; returns the device seconds of all, and of all gaps."""
    times: list[list[float]] = [[] for _ in launches]
    gaps: list[list[float]] = [[] for _ in launches]
    for spans in seen:
        pairs = zip(spans, gaps_of(spans), strict=True)
        ours = [(span, gap) for span, gap in pairs if span.name != EXCHANGE]
        for number, (span, gap) in enumerate(ours):
            times[number].append(span.end - span.start)
            gaps[number].append(gap)
    medians = [statistics.median(each) for each in times]
    idle = [statistics.median(each) for each in gaps]
    parameters = numel(TINY_SHAPES if job.tiny else SIZES[size])
    for launch, seconds, gap in zip(launches, medians, idle, strict=True):
        floor = ""
        if launch.nbytes:
            ratio = seconds * bandwidth / launch.nbytes
            floor = f"{ratio:.3g}"
            if ratio > FAR_FROM_FLOOR and seconds > LARGE_SHARE * sum(medians):
                job.name_kernel(launch.name)
        job.row(
            parameters=size,
            step=step,
            kernel=launch.name,
            ms=1e3 * seconds,
            gap_before_ms=1e3 * gap,
            bytes_per_parameter=launch.nbytes / parameters,
            times_floor=floor,
        )
    return sum(medians), sum(idle)
