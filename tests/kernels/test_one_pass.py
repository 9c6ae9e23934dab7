"""Encode looks for bad values in its own pass where a run stops at one, and moves few bytes."""

import os
from pathlib import Path

import pytest
import torch
from benchmarks.accelerator import kernel_bytes

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.compute.nonfinite import SIGNAL_LIMIT

SHAPES = [(70, 64), (3,), (200, 64)]
SCHEMES = {
    "signs": dt.demo(precision="sign", error_feedback=False),
    "owner": dt.demo(link="owner"),
}


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")


def started(scheme, policy):
    drawn = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList([torch.randn(shape, generator=drawn) for shape in SHAPES])
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    safety = dt.Safety(non_finite=policy)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(2), scheme, safety=safety)
    channel = optimizer.build()[0].channel
    assert channel.engine.name == "triton"
    return model, optimizer, channel


def steps(model, optimizer, count):
    drawn = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
        optimizer.step()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, in the interpreter
@pytest.mark.long_cases("owner")
@pytest.mark.parametrize("name", SCHEMES)
def test_one_pass_makes_the_bits_of_two(name):
    found = []
    for policy in ("stop", "skip"):
        model, optimizer, channel = started(SCHEMES[name], policy)
        steps(model, optimizer, 3)
        memory = channel.engine.memory.residual.clone()
        found.append([*(parameter.detach().clone() for parameter in model), memory])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "which, place, bad",
    [(0, 0, float("nan")), (1, 2, -float("inf")), (2, 199 * 64 + 63, 2 * SIGNAL_LIMIT)],
)
def test_a_bad_value_is_found_in_the_pass_and_enters_no_memory(which, place, bad):
    model, optimizer, channel = started(SCHEMES["signs"], "stop")
    steps(model, optimizer, 2)
    engine = channel.engine
    before = engine.memory.residual.clone()
    gradients = [torch.zeros(shape) for shape in SHAPES]
    gradients[which].view(-1)[place] = bad
    verdict = engine.found_later
    engine.encode(gradients, 2, verdict.bad)
    status = verdict.status[verdict.status > 0]
    assert status.min() == 1 + which
    row = engine.layout.slots[which].row + place // engine.layout.chunk
    assert engine.memory.residual.isfinite().all()
    assert torch.equal(engine.memory.residual[row], before[row])
    engine.encode([torch.zeros(shape) for shape in SHAPES], 3, verdict.bad)
    assert not verdict.status.any()


@pytest.mark.skipif(
    os.environ.get("TEST_DEVICE", "cpu") != "cpu", reason="the interpreter counts the bytes"
)
def test_the_page_has_the_bytes_that_the_kernels_move():
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    lines = kernel_bytes.table(replicas=2)
    assert "\n".join(lines) in page
    *_, total = lines
    for cell in total.strip("| ").split("|")[1:]:
        read, written = map(float, cell.split("/"))
        assert kernel_bytes.FLOOR <= read + written <= 24
