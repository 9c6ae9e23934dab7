"""A training step of OLMo2's shapes in bf16: forward, backward and our step, and the share of the step in it."""

from functools import partial

import torch
from benchmarks.gpu.common import Job, median_s
from benchmarks.gpu.olmo2 import SHAPES, OLMo2
from benchmarks.gpu.peaks import peak_flops

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator

TITLE = "A whole training step"
SCHEME = dt.demo(precision="sign", error_feedback=False)


def measure(job: Job) -> None:
    sizes = ["tiny"] if job.tiny else ["125M", "1.2B"]
    shares = []
    for size in sizes:
        for compiled in (False,) if job.tiny else (False, True):
            if job.left_s() < (30 if compiled else 10):
                job.leave_out(f"{size}{', compiled' * compiled}")
                continue
            found = job.attempt(
                f"{size}{', compiled' * compiled}", partial(trained, job, size, compiled)
            )
            if found is not None:
                shares.append(f"{size}{' compiled' * compiled} {100 * found:.1f} %")
    job.headline("share of a training step that is the optimizer's: " + ", ".join(shares))


def trained(job: Job, size: str, compiled: bool) -> float:
    """Adds a row; returns the share of our step."""
    torch.manual_seed(0)
    length = 16 if job.tiny else 1024
    shape, device = SHAPES[size], job.device
    with device:
        model = OLMo2(shape, length).to(torch.bfloat16)
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters(), lr=1e-4), model, LoopbackCommunicator(2), SCHEME
    )
    batch = 2 if job.tiny else batch_for(job, model, length)
    tokens = torch.randint(shape.tokens, (batch, length + 1), device=device)
    loss_of = torch.compile(model) if compiled else model

    def backward() -> None:
        model.zero_grad()
        loss_of(tokens).backward()

    def step() -> None:
        backward()
        optimizer.step()

    times = 5 if job.tiny else 10
    step()
    whole_s = median_s(step, device, times)
    backward_s = median_s(backward, device, times)
    ours_s = max(0.0, whole_s - backward_s)  # below it where other work disturbs a small one
    numel = sum(parameter.numel() for parameter in model.parameters())
    attention = 12 * shape.layers * shape.width * length / 2  # causal: half of the products
    flops = (6 * (numel - shape.tokens * shape.width) + attention) * batch * length
    peak = peak_flops(device)
    job.row(
        model=size,
        compiled=compiled,
        parameters=numel,
        batch=f"{batch} x {length}",
        ms=1e3 * whole_s,
        optimizer_ms=1e3 * ours_s,
        share=f"{100 * ours_s / whole_s:.1f} %",
        tokens_per_s=round(batch * length / whole_s),
        MFU="" if peak is None else f"{100 * flops / whole_s / peak:.0f} %",
    )
    return ours_s / whole_s


def batch_for(job: Job, model: OLMo2, length: int) -> int:
    """Sequences that fill half of the memory, by the peak of a backward pass of one and of two."""
    if not job.on_gpu:
        return 2
    peaks = []
    for batch in (1, 2):
        tokens = torch.zeros(batch, length + 1, dtype=torch.int64, device=job.device)
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats(job.device)
        model(tokens).backward()
        peaks.append(torch.cuda.max_memory_allocated(job.device))
    each = max(1, peaks[1] - peaks[0])
    most = torch.cuda.get_device_properties(job.device).total_memory // 2
    return int(min(64, max(1, 1 + (most - peaks[0]) // each)))
