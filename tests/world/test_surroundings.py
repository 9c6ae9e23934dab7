"""The surroundings of a step change nothing in it: autocast, torch's default dtype, torch's default device."""

import ast
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import detonation as dt
from covering import some
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.runtime import Runtime
from zoo import KINDS, TALKING

SCHEMES = TALKING | {"chunk-48": dt.demo(topk=24, chunk=48)}
OF_A_THREAD = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),  # as `torch.set_default_device`
}
SOURCES = [
    p for name in ("core", "kernels") for p in (Path(dt.__file__).parent / name).rglob("*.py")
]
CREATION = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
            "tensor", "zeros"}  # fmt: skip


def run(scheme, kernels, surroundings):
    """Weights, bytes and refused messages after four steps of two replicas in each of `surroundings`."""

    def act(communicator):
        found = []
        for name in surroundings:
            generator = torch.Generator().manual_seed(communicator.replica)
            model = nn.Linear(128, 64, bias=False, dtype=torch.float32)
            with torch.no_grad():
                model.weight.copy_(
                    torch.linspace(-1, 1, 128 * 64, dtype=torch.float32).view(64, 128)
                )
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            with OF_A_THREAD[name]():
                optimizer = dt.replicate(base, model, communicator, scheme, kernels=kernels)
            for _ in range(4):
                model.weight.grad = torch.randn(64, 128, generator=generator, dtype=torch.float32)
                with OF_A_THREAD[name]():
                    optimizer.step()
            with OF_A_THREAD[name]():
                optimizer.synchronize()
            found.append(
                (model.weight.detach(), optimizer.stats.bytes_sent, optimizer.stats.refused)
            )
        return found

    return simulate_replicas(act, 2)[0]


@some(
    "name, kernels",
    product(SCHEMES, [True, False]),
    keep=[
        (name, bool(at % 2)) for at, name in enumerate([*KINDS, "chunk-48", "demo", "random-sign"])
    ],
)
def test_autocast_and_the_defaults_of_torch_do_not_reach_into_a_step(name, kernels):
    expected, *others = run(SCHEMES[name], kernels, OF_A_THREAD)
    for dtype in (torch.bfloat16, torch.float64):  # of the process, so for both replicas at once
        torch.set_default_dtype(dtype)
        try:
            others += run(SCHEMES[name], kernels, ["none"])
        finally:
            torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision(
        "medium"
    )  # products in bf16 on a CPU that has them, in TF32 on a GPU
    try:
        others += run(SCHEMES[name], kernels, ["none"])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    for weights, *counts in others:
        assert torch.equal(weights, expected[0]) and counts == [*expected[1:]] and not expected[2]


PRODUCTS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@pytest.fixture
def products():
    """Puts back how products round."""
    yield
    torch.set_float32_matmul_precision("highest")
    for each in PRODUCTS:
        each.fp32_precision = "none"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("legacy, new", [
    ("high", ("tf32", "tf32")), ("medium", ("tf32", "bf16")), ("high", ("tf32", "ieee")), (None, ("tf32", "bf16")),
])  # fmt: skip
def test_a_step_that_reads_how_products_round_in_the_legacy_way_may(kind, legacy, new, products):
    torch.set_float32_matmul_precision(legacy or "highest")
    for each, precision in zip(PRODUCTS, new, strict=True):
        each.fp32_precision = precision
    with Runtime(torch.device(kind)).exact_arithmetic():
        assert PRODUCTS[kind == "cpu"].fp32_precision == "ieee"
        if legacy:
            read = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
            assert read == (False, "highest") or (kind, new[1]) == (
                "cpu",
                "ieee",
            )  # whose products are exact already
    assert tuple(each.fp32_precision for each in PRODUCTS) == new
    if legacy:
        assert (
            torch.get_float32_matmul_precision() == legacy and torch.backends.cuda.matmul.allow_tf32
        )


def creations(source):
    """The line and the names of the arguments of each call of torch that makes a tensor from numbers."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in CREATION
            and ast.unparse(call.func.value) == "torch"
        ):
            yield call.lineno, {keyword.arg for keyword in call.keywords}


def test_core_states_dtype_and_device_of_each_tensor_that_it_makes():
    assert list(creations("x = torch.zeros(3, device=d)")) == [(1, {"device"})]
    silent = {f"{path}:{line}" for path in SOURCES for line, said in creations(path.read_text())
              if not said >= {"dtype", "device"}}  # fmt: skip
    assert len(SOURCES) > 50 and not silent
