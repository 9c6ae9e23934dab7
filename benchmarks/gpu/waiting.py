"""No waiting: ten steps of every scheme in which the host may not wait for the GPU, CUDA graphs of encode and decode,
and the profile of one step."""

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.common import SIZES, Job, no_waits, numel, stepper, synchronize

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.codec.aggregate import Divided
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.precision import Float, numbers
from detonation.core.codec.received import Sums
from detonation.core.engine.reference import engine_for
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime

TITLE = "The host waits for nothing"
PROFILED = {
    "demo": dt.demo(),
    "demo, sign": dt.demo(precision="sign", error_feedback=False),
    "random": dt.schemes.random(),
    "random_sign": dt.random_sign(),
    "full": dt.full(),
    "none": dt.none(),
}


def measure(job: Job) -> None:
    from zoo import KINDS, SCHEMES

    shapes = SIZES["tiny"]
    for name in KINDS if job.tiny else SCHEMES:
        called = f"ten steps of {name}"
        if job.has(called):
            continue
        if job.left_s() < 15 and not job.tiny:
            job.leave_out(called)
            continue
        job.attempt(called, partial(ten_steps, job, SCHEMES[name], shapes))
    for name in ("demo", "full"):
        job.once(
            f"ten steps of {name} that send during backward",
            partial(ten_overlapped, job, SCHEMES[name]),
        )
    for name in ("demo", "demo-sign", "random-sign", "random", "full"):
        job.once(f"graphs of {name}", partial(graphs, job, SCHEMES[name]))
    schemes = list(PROFILED.items())[: 1 if job.tiny else None]
    for name, scheme in schemes:
        for engine in ("torch", "triton") if job.on_gpu else ("torch",):
            called = f"profile of {name}, {engine}"
            job.once(called, partial(profiled, job, name, scheme, engine))
    good = job.findings.checks - len(job.findings.failures)
    job.headline(
        f"{good} of {job.findings.checks} schemes, graphs and profiles without a wait of the host"
    )


def ten_steps(job: Job, scheme: dt.schemes.Scheme, shapes: list[tuple[int, ...]]) -> None:
    """Ten steps after a first round, which may wait: it builds the levels."""
    made = stepper(shapes, job.device, scheme, "triton" if job.on_gpu else "torch") or stepper(
        shapes, job.device, scheme
    )
    assert made is not None
    for _ in range(scheme.round.every + scheme.round.delay + 1):
        made.step()
        made.renew()
    synchronize(job.device)
    with no_waits(job.device):
        for _ in range(10):
            made.step()
            made.renew()


def ten_overlapped(job: Job, scheme: dt.schemes.Scheme) -> None:
    """Ten steps whose gradients leave while backward still runs, on a stream of their own."""
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(job.device)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(2), scheme)
    examples = torch.randn(32, 256, device=job.device)

    def step() -> None:
        with optimizer.overlap():
            model(examples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    synchronize(job.device)
    with no_waits(job.device):
        for _ in range(10):
            step()


def graphs(job: Job, scheme: dt.schemes.Scheme) -> None:
    """Captures encode and decode in a CUDA graph each, plays both, and compares the bits with those of launches.

    A graph refuses to capture what allocates outside of its pool, or waits for the host. Where there is no GPU, plain
    calls are compared.
    """
    codec, shapes = scheme.codec, SIZES["tiny"]
    drawn = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=drawn).to(job.device) for shape in shapes]
    layout, found = codec.layout({str(i): shape for i, shape in enumerate(shapes)}), []
    for held in (False, True):
        memory = Memory(layout, scheme.feedback, job.device) if scheme.feedback else None
        engine = engine_for(codec, layout, memory, Runtime(job.device))
        octets = torch.empty(1, codec.nbytes(layout.rows), dtype=torch.uint8, device=job.device)
        run = MessageRows(codec, layout.rows, partial(torch.Tensor.view_as, octets, octets))
        targets = [torch.zeros_like(gradient) for gradient in gradients]
        encode = partial(engine.encode_into, run, gradients, 0)
        selected = encode()  # compiles, and copies tables to the device
        message = run.body[0]
        shared = selected.indices if codec.selection.shared else None
        received: Any = codec.received([message, message], layout.rows, shared, scheme.aggregation)
        received.shared = shared
        if (
            scheme.summable and isinstance(codec.precision, Float) and engine.reads_status
        ):  # the network adds in place
            values = numbers(run.parts[0], codec.precision.dtype).view(layout.rows, -1)
            received = Sums(
                [(0, values)], layout.rows, Divided(2), shared, torch.ones(1, device=job.device)
            )
        decode = partial(engine.write, received, targets)
        decode()
        acts = [played(act) if held and job.on_gpu else act for act in (encode, decode)]
        for _ in range(3):
            for target in targets:
                target.zero_()
            for act in acts:
                act()
        synchronize(job.device)
        found.append(
            [
                *targets,
                *([memory.residual] if memory else []),
                *([run.body] if engine.reads_status else []),
            ]
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), "a graph makes other bits than its launches"


def played(act: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of `act`, to be played in its place."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay


def profiled(job: Job, name: str, scheme: dt.schemes.Scheme, engine: str) -> None:
    """Adds a row: kernels launched, time of the host, time of the device, and the gaps between kernels; and a line of
    the longest kernels."""
    size = "tiny" if job.tiny else "125M"
    made = stepper(SIZES[size], job.device, scheme, engine)
    if made is None:
        job.note(f"{name}: the engine is not triton's")
        return
    for _ in range(3):
        made.step()
    synchronize(job.device)
    at = time.perf_counter()
    made.step()
    host_s = time.perf_counter() - at
    synchronize(job.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        made.step()
        synchronize(job.device)
    events = kernels(profile.events(), job.on_gpu)
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy = busy_us(spans) / 1e3
    whole = (max(end for _, end in spans) - spans[0][0]) / 1e3 if spans else 0.0
    job.row(
        step=name,
        engine=made.engine,
        parameters=numel(SIZES[size]),
        tensors=len(SIZES[size]),
        kernels=len(spans),
        host_ms=1e3 * host_s,
        device_busy_ms=busy,
        gaps_ms=max(0.0, whole - busy),
    )
    each = Counter[str]()
    for event in events:
        each[event.name] += event.time_range.end - event.time_range.start
    longest = ", ".join(f"{called[:60]} {us / 1e3:.3g}" for called, us in each.most_common(6))
    job.note(f"{name}, {made.engine}, ms: {longest}")


def busy_us(spans: list[tuple[float, float]]) -> float:
    """The time that `spans`, sorted, cover: kernels of two streams may run at once."""
    covered, until = 0.0, -math.inf
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def kernels(events: Any, on_gpu: bool) -> list[Any]:
    """The kernels and copies on the GPU; the operations of torch where there is none."""
    if on_gpu:
        on_device = [
            event for event in events if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return [
            event for event in on_device if not event.is_user_annotation
        ]  # which span kernels: torch's of a step
    return [event for event in events if event.name.startswith("aten::") and not event.cpu_children]
