"""Every engine, on every kind of processor, decodes messages to the same bits, and takes steps to the same bits.

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
from detonation.core.agreement import self_tests as selftest
from detonation.core.agreement.clipping import Clip, norms_of
from detonation.core.codec.basis import dct_matrix
from detonation.core.codec.codec import Selected
from detonation.core.codec.precision import PRECISIONS
from detonation.core.codec.received import Received
from detonation.core.compute.scatter_sum import most_summed
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.flat.tensors import digest
from detonation.core.memory import Memory
from detonation.core.replicator.outer import OuterSGD
from detonation.core.runtime import Runtime
from detonation.core.schemes.scheme import Outer, Scheme
from detonation.engines.native_engine import NativeEngine
from detonation.engines.triton.coding import why_not_triton
from detonation.kernels import native

CPU = torch.device("cpu")
SHAPES = {"matrix": (40, 16), "odd": (257,), "scalar": (), "empty": (0, 7), "last": (3, 3, 70)}
FEW = [
    (dt.demo(topk=topk, chunk=chunk, precision=precision), replicas)
    for topk, chunk, replicas in [(4, 64, 1), (4, 64, 2), (4, 64, 3), (2, 16, 3), (5, 64, 6), (16, 64, 2), (9, 128, 7)]
    for precision in ("fp32", "bf16", "2bit")
] + [
    (dt.demo(topk=topk, chunk=chunk, precision=precision), replicas)
    for topk, chunk, replicas, precision in [
        (1, 256, 5, "sign"), (12, 32, 1, "4bit"), (3, 24, 2, "fp32"), (4, 256, 16, "fp32"),
    ]
]  # fmt: skip
"""Schemes, each with a number of replicas: an update is a sum of few basis vectors."""
MANY = [
    (dt.demo(topk=32), 2), (dt.demo(topk=32, chunk=256, precision="int8"), 4), (dt.demo(topk=8), 5),
    (dt.demo(topk=24, chunk=128, precision="bf16"), 3), (dt.demo(topk=5, chunk=10), 2), (dt.demo(topk=40), 1),
    (dt.demo(aggregate="mean_nonzero"), 3), (dt.demo(topk=9, chunk=16, aggregate="majority_vote"), 3),
    (dt.demo(topk=16, aggregate="clipped_mean"), 3), (dt.demo(topk=4, aggregate="rescaled_mean"), 3),
    (dt.demo(topk=6, chunk=8, tiles=True), 2), (dt.demo(topk=40, chunk=32, tiles=True, precision="2bit"), 3),
    (dt.schemes.random(rate=1 / 3, precision="4bit", aggregate="clipped_mean"), 3),
    (dt.schemes.random(rate=1 / 2, precision="int8", aggregate="majority_vote"), 4), (dt.full(), 3),
    (dt.muloco(2, 1.0, 0.0, "int8", aggregate="rescaled_mean"), 3),
    (dt.schemes.sparseloco(every=2, topk=8, chunk=256), 3),
    (dt.loco("4bit"), 1), (dt.loco("4bit"), 3), (dt.loco("2bit"), 3), (dt.loco("sign"), 5), (dt.loco("int8"), 3),
]  # fmt: skip
"""The same where it is anything else."""
CASES = FEW + MANY
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


def messages(scheme: Scheme, replicas: int, finite: bool = False) -> Received:
    """What arrives: of many magnitudes, with ties, zeros of both signs, and numbers that are not finite."""
    codec, sent = scheme.codec, []
    layout, topk, chunk = codec.layout(SHAPES), codec.selection.k, codec.selection.chunk
    for replica in range(replicas):
        values = selftest._ramp(layout.rows * topk, CPU).view(layout.rows, topk) * (replica + 1)
        if codec.precision == PRECISIONS["fp32"] and not finite:
            values[1], values[2], values[3], values[4] = 1.0, 0.0, -0.0, 1e38
            values[5, 0], values[6, -1] = (
                (float("nan"), float("-inf")) if replica else (0.5, float("inf"))
            )
            values[7] = 1e-41
        elif codec.precision.block > 1:
            values = (values * 1024).remainder(11).floor() - 5
        apart = chunk // topk
        begins = (torch.arange(layout.rows) + 3 * replica) % (chunk - (topk - 1) * apart)
        indices = begins.unsqueeze(1) + apart * torch.arange(topk)
        sent.append(codec.encode(Selected(values, None if codec.selection.shared else indices)))
    shared = codec.shared_indices(layout.rows, 1, 0, CPU)
    return codec.received(sent, layout.rows, shared, scheme.aggregation)


def decoded(
    case: tuple[Scheme, int], engine: type[ReferenceEngine] | None, kernels: bool
) -> list[torch.Tensor]:
    """The update of each parameter, by `engine`, or else by that of a step."""
    scheme, replicas = case
    layout = scheme.codec.layout(SHAPES)
    memory = Memory(layout, scheme.feedback, CPU) if scheme.feedback else None
    arguments = scheme.codec, layout, memory, Runtime(CPU, kernels=kernels)
    made = engine(*arguments) if engine else engine_for(*arguments)
    update = [torch.full(shape, 7.0) for shape in SHAPES.values()]
    made.write(messages(scheme, replicas, case in MANY), update)
    return [part.nan_to_num(nan=123.0, posinf=456.0, neginf=789.0) for part in update]


def after_steps(base: torch.optim.Optimizer, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weights after three steps of `base` on gradients of many magnitudes, clipped."""
    clip = Clip({str(number): weight for number, weight in enumerate(weights)}, base, 20.0)
    for step in range(3):
        for weight in weights:
            gradient = selftest._ramp(weight.numel() + 11 * step, CPU)[11 * step :]
            weight.grad = (gradient * (step + 0.7)).view(weight.shape)
        clip()
        base.step()
    return [weight.detach() for weight in weights]


def outer_step(outer: Outer) -> torch.Tensor:
    """An anchor after three outer steps."""
    anchor = selftest._ramp(4099, CPU).flip(0).view(1, -1).clone()
    moved = OuterSGD(anchor, outer)
    for step in range(3):
        moved.step(slice(0, 1), selftest._ramp(4099, CPU).view(1, -1) * (step + 0.7))
    return anchor


def digests(engine: type[ReferenceEngine] | None = None, kernels: bool = False) -> list[str]:
    """Of the updates of all cases; and of what all replicas compute alike besides."""
    many = [
        torch.nn.Parameter(selftest._ramp(count, CPU).flip(0)) for count in (1, 17, 300, 70_001)
    ]
    outer = [
        outer_step(Outer(lr=0.7, momentum=0.9, nesterov=nesterov)) for nesterov in (False, True)
    ]
    rest = [norms_of([selftest._ramp(3_000_000, CPU) * 1.1, None, many[2]], CPU), *outer]
    rest += after_steps(dt.SignSGD(many, lr=3e-4, momentum=0.9, weight_decay=0.1), many)
    return [digest(decoded(case, engine, kernels))[:16] for case in CASES] + [
        digest([each])[:16] for each in rest
    ]


def in_a_process(*arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, __file__, *arguments]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DETONATION", "TRITON"))
    }
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.split()


def test_the_engines_make_the_same_bits():
    assert digests(kernels=True) == digests()
    scheme = dt.demo()
    layout = scheme.codec.layout(SHAPES)
    assert isinstance(
        engine_for(scheme.codec, layout, Memory(layout, scheme.feedback, CPU), Runtime(CPU)),
        NativeEngine,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, of numbers that overflow
def test_triton_makes_the_same_bits(monkeypatch):
    pytest.importorskip("triton")
    wanted = [
        (case, decoded(case, ReferenceEngine, False))
        for case in CASES
        if not why_not_triton(case[0].codec)
    ]
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    for case, update in wanted:
        for mine, other in zip(decoded(case, None, True), update, strict=True):
            assert torch.equal(mine, other), case


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize(
    "kind",
    [OLDEST, *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != OLDEST)],
)
def test_plain_torch_makes_the_same_bits_on_any_kind_of_processor(kind):
    assert in_a_process(**KINDS[kind]) == digests()


@pytest.mark.parametrize(
    "architecture", ["x86-64", pytest.param("x86-64-v3", marks=pytest.mark.long)]
)
def test_cpp_makes_the_same_bits_for_any_kind_of_processor(architecture):
    """Without fused multiply-add in the processor it is put together from fp64."""
    if architecture == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    assert in_a_process(f"-march={architecture}") == digests()


def test_a_sum_is_one_fused_multiply_add_after_the_other():
    from fused import fused  # not above: other processes run this file without the folder of tests

    waves = dct_matrix(64, CPU).T.numpy()
    received = messages(dt.demo(), 3).whole()
    total = torch.zeros(received.values.shape[1], 64).numpy()
    for values, indices in zip(received.values, received.indices.unpacked, strict=True):
        for value, index in zip((values * (1 / 3)).T, indices.long().T, strict=True):
            total = fused(waves[index], value[:, None].numpy().repeat(64, 1), total)
    wanted = torch.from_numpy(total).view(-1)[:640]
    assert torch.equal(wanted.nan_to_num(nan=123.0, posinf=456.0, neginf=789.0),
                       decoded((dt.demo(), 3), ReferenceEngine, False)[0].view(-1))  # fmt: skip


def test_more_coefficients_than_that_are_a_product():
    assert [most_summed(chunk) for chunk in (1, 16, 64, 128, 1024)] == [0, 8, 32, 64, 64]


@pytest.mark.parametrize("size", [1, 2, 3, 48, 64, 100, 256])
def test_the_basis_is_the_closed_form(size):
    matrix, at = dct_matrix(size, CPU), torch.arange(size, dtype=torch.float64)
    closed = torch.cos(math.pi / size * torch.outer(at + 0.5, at)) * math.sqrt(2 / size)
    closed[:, 0] = math.sqrt(1 / size)
    assert (matrix - closed).abs().max() <= 2**-25 * (
        1 + 1e-6
    )  # half of the last bit of numbers below 1
    assert torch.equal(matrix.abs(), matrix.flip(0).abs())  # waves are even or odd to the last bit


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if sys.argv[1:]:
        native._FLAGS = tuple(
            sys.argv[1] if flag.startswith("-march") else flag for flag in native._FLAGS
        )
        assert native.load_library() is not None
    print(*digests(kernels=bool(sys.argv[1:])))
