"""Every engine, on every kind of processor, decodes few coefficients to the same bits.

`python tests/kernels/test_one_arithmetic.py [-march=...]` prints the digests of the torch engine here, or of C++.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import detonation as dt
from detonation.core.agreement import selftest
from detonation.core.codec.aggregate import Received
from detonation.core.codec.basis import dct_matrix
from detonation.core.codec.codec import Selected
from detonation.core.compute.scatter_sum import most_summed
from detonation.core.engine.choice import engine_for
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.flat.tensors import digest
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.engines.native_engine import NativeEngine
from detonation.kernels import native

CPU = torch.device("cpu")
SHAPES = {"matrix": (40, 16), "odd": (257,), "scalar": (), "empty": (0, 7), "last": (3, 3, 70)}
CASES = [
    (topk, chunk, replicas, precision)
    for topk, chunk, replicas in [(4, 64, 1), (4, 64, 2), (4, 64, 3), (2, 16, 3), (5, 64, 6), (16, 64, 2), (9, 128, 7)]
    for precision in ("fp32", "bf16", "2bit")
] + [(1, 256, 5, "sign"), (12, 32, 1, "4bit"), (3, 24, 2, "fp32"), (4, 256, 16, "fp32")]
OLDEST = "the oldest processor"
KINDS = {
    OLDEST: {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "another library": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX2, many threads": {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "3"},
}


def messages(topk: int, chunk: int, replicas: int, precision: str) -> Received:
    """What arrives: of many magnitudes, with ties, zeros of both signs, and numbers that are not finite."""
    scheme = dt.demo(topk=topk, chunk=chunk, precision=precision)
    layout, sent = scheme.codec.layout(SHAPES), []
    for replica in range(replicas):
        values = selftest._ramp(layout.rows * topk, CPU).view(layout.rows, topk) * (replica + 1)
        if precision == "fp32":
            values[1], values[2], values[3], values[4] = 1.0, 0.0, -0.0, 1e38
            values[5, 0], values[6, -1] = (float("nan"), float("-inf")) if replica else (0.5, float("inf"))
            values[7] = 1e-41
        elif precision != "bf16":
            values = (values * 1024).remainder(11).floor() - 5
        apart = chunk // topk
        begins = (torch.arange(layout.rows) + 3 * replica) % (chunk - (topk - 1) * apart)
        indices = begins.unsqueeze(1) + apart * torch.arange(topk)
        sent.append(scheme.codec.encode(Selected(values, indices)))
    return scheme.codec.received(sent, layout.rows, None, scheme.aggregation)


def decoded(case: tuple[int, int, int, str], engine: type[ReferenceEngine] | None, kernels: bool) -> list[torch.Tensor]:
    """The update of each parameter, by `engine`, or else by that of a step."""
    topk, chunk, _, precision = case
    scheme = dt.demo(topk=topk, chunk=chunk, precision=precision)
    layout = scheme.codec.layout(SHAPES)
    arguments = scheme.codec, layout, Memory(layout, scheme.feedback, CPU), Runtime(CPU, kernels=kernels)
    made = engine(*arguments) if engine else engine_for(*arguments)
    update = [torch.full(shape, 7.0) for shape in SHAPES.values()]
    made.write(messages(*case), update)
    return [part.nan_to_num(nan=123.0, posinf=456.0, neginf=789.0) for part in update]


def digests(engine: type[ReferenceEngine] | None = None, kernels: bool = False) -> list[str]:
    return [digest(decoded(case, engine, kernels))[:16] for case in CASES]


def in_a_process(*arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, __file__, *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DETONATION", "TRITON"))}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.split()


def test_the_engines_make_the_same_bits():
    assert digests(ReferenceEngine) == digests()  # blocked
    assert digests(kernels=True) == digests()
    scheme = dt.demo()
    layout = scheme.codec.layout(SHAPES)
    assert isinstance(
        engine_for(scheme.codec, layout, Memory(layout, scheme.feedback, CPU), Runtime(CPU)), NativeEngine
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, of numbers that overflow
def test_triton_makes_the_same_bits(monkeypatch):
    pytest.importorskip("triton")
    wanted = {case: decoded(case, ReferenceEngine, False) for case in CASES if case[1] <= 128}
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    for case, update in wanted.items():
        for mine, other in zip(decoded(case, None, True), update, strict=True):
            assert torch.equal(mine, other), case


@pytest.mark.parametrize(
    "kind", [OLDEST, *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != OLDEST)]
)
def test_plain_torch_makes_the_same_bits_on_any_kind_of_processor(kind):
    assert in_a_process(**KINDS[kind]) == digests()


@pytest.mark.parametrize("architecture", ["x86-64", pytest.param("x86-64-v3", marks=pytest.mark.long)])
def test_cpp_makes_the_same_bits_for_any_kind_of_processor(architecture):
    """Without fused multiply-add in the processor it is put together from fp64."""
    if architecture == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    assert in_a_process(f"-march={architecture}") == digests()


def test_a_sum_is_one_fused_multiply_add_after_the_other():
    from fused import fused  # not above: other processes run this file without the folder of tests

    waves = dct_matrix(64, CPU).T.numpy()
    received = messages(4, 64, 3, "fp32").whole()
    total = torch.zeros(received.values.shape[1], 64).numpy()
    for values, indices in zip(received.values, received.indices.unpacked, strict=True):
        for value, index in zip((values * (1 / 3)).T, indices.long().T, strict=True):
            total = fused(waves[index], value[:, None].numpy().repeat(64, 1), total)
    wanted = torch.from_numpy(total).view(-1)[:640]
    assert torch.equal(wanted.nan_to_num(nan=123.0, posinf=456.0, neginf=789.0),
                       decoded((4, 64, 3, "fp32"), ReferenceEngine, False)[0].view(-1))  # fmt: skip


def test_more_coefficients_than_that_are_a_product():
    assert [most_summed(chunk) for chunk in (1, 16, 64, 128, 1024)] == [0, 8, 32, 64, 64]


@pytest.mark.parametrize("size", [1, 2, 3, 48, 64, 100, 256])
def test_the_basis_is_the_closed_form(size):
    matrix, at = dct_matrix(size, CPU), torch.arange(size, dtype=torch.float64)
    closed = torch.cos(math.pi / size * torch.outer(at + 0.5, at)) * math.sqrt(2 / size)
    closed[:, 0] = math.sqrt(1 / size)
    assert (matrix - closed).abs().max() <= 2**-25 * (1 + 1e-6)  # half of the last bit of numbers below 1
    assert torch.equal(matrix.abs(), matrix.flip(0).abs())  # waves are even or odd to the last bit


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if sys.argv[1:]:
        native._FLAGS = tuple(sys.argv[1] if flag.startswith("-march") else flag for flag in native._FLAGS)
        assert native.load_library() is not None
    print(*digests(kernels=bool(sys.argv[1:])))
