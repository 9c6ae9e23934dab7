"""A twin run: two simulated replicas of a small OLMo2 on bytes of text, by AdamW, Muon and a scheme: loss and time."""

import time
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.children import ROOT
from benchmarks.gpu.common import Job, synchronize
from benchmarks.gpu.olmo2 import SHAPES, OLMo2
from torch import Tensor

import detonation as dt
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas

TITLE = "A twin run"
STEPS, BATCH, LENGTH = 2000, 16, 256
CASES: dict[str, tuple[dt.schemes.Scheme, Any]] = {
    "AdamW, full": (dt.full(), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)),
    "demo 1/64, sign": (
        dt.demo(topk=1, decay=0.95, precision="sign", error_feedback=False),
        partial(dt.SignSGD, lr=1e-3),
    ),
    "Muon, full": (dt.full(), partial(dt.Muon, lr=5e-3)),
}
"""docs/findings.md recommends the second."""


def measure(job: Job) -> None:
    text = torch.frombuffer(corpus(), dtype=torch.uint8)
    steps = 2 if job.tiny else STEPS
    losses = []
    for number, (name, (scheme, base)) in enumerate(CASES.items()):
        budget_s = job.left_s() / (len(CASES) - number)
        found = job.attempt(name, partial(trained, job, text, scheme, base, steps, budget_s))
        if found is not None:
            taken, loss, seconds, sent, numel = found
            losses.append(f"{name} {loss:.3f}")
            job.row(
                run=name,
                parameters=numel,
                steps=taken,
                loss=f"{loss:.4f}",
                ms_per_step=1e3 * seconds / taken,
                bytes_per_parameter_and_step=sent / taken / numel,
            )
            if taken < steps:
                job.note(f"{name} ended after {taken} of {steps} steps: the time was up")
    job.note(
        f"Bytes of this repository's Markdown and Python ({len(text):,}); the last tenth of them judges."
    )
    job.headline("loss: " + ", ".join(losses))


def corpus() -> bytearray:
    """The repository's own text: it is here without a network."""
    files = sorted(
        [
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "src").rglob("*.py"),
            *(ROOT / "tests").rglob("*.py"),
        ]
    )
    return bytearray(b"".join(file.read_bytes() for file in files))


def trained(
    job: Job, text: Tensor, scheme: dt.schemes.Scheme, base: Any, steps: int, budget_s: float
) -> tuple[int, float, float, int, int]:
    """Steps taken, validation loss, seconds, bytes that a replica sent, and parameters."""
    length = 16 if job.tiny else LENGTH
    cut = len(text) * 9 // 10
    parts = {"train": text[:cut].to(job.device), "judge": text[cut:].to(job.device)}

    def batch(of: str, seed: int) -> Tensor:
        source = parts[of]
        size = 2 if job.tiny else BATCH
        starts = torch.randint(
            len(source) - length - 1, (size,), generator=torch.Generator().manual_seed(seed)
        )
        at = starts[:, None] + torch.arange(length + 1)
        return source[at.to(job.device)].long()

    ends_at = time.monotonic() + 0.9 * budget_s
    taken = [steps]  # decided by the first replica, which comes first in each step

    def act(communicator: SimulatedCommunicator) -> tuple[float, float, int, int]:
        torch.manual_seed(0)
        with job.device:
            model = OLMo2(SHAPES["tiny" if job.tiny else "30M"], length)
        optimizer = dt.replicate(base(model.parameters()), model, communicator, scheme)
        began = time.monotonic()
        for step in range(steps):
            if communicator.replica == 0 and time.monotonic() > ends_at:
                taken[0] = min(taken[0], step)
            if step >= taken[0]:
                break
            warm = min(1.0, (step + 1) / 100)
            rate = warm * (1 - 0.9 * step / steps)
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first_lr", group["lr"]) * rate
            with torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.on_gpu):
                loss = model(batch("train", 10 * step + communicator.replica))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize(job.device)
        seconds = time.monotonic() - began
        with torch.no_grad():
            judged = torch.stack([model(batch("judge", -1 - number)) for number in range(8)]).mean()
        return (
            float(judged),
            seconds,
            optimizer.stats.bytes_sent,
            sum(p.numel() for p in model.parameters()),
        )

    loss, seconds, sent, numel = simulate_replicas(act, 2)[0]
    return taken[0], loss, seconds, sent, numel
