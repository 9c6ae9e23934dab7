"""What a CUDA graph of a step relies on, on the device `meta`: from the third step on, each step starts the same
kernels on the same memory, waits for nothing and allocates nothing. Numbers of a step are named."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from benchmarks.accelerator import launches, memory

import detonation as dt
from detonation.core import runtime

SCHEMES = {
    "signs": dt.demo(precision="sign", error_feedback=False),
    "coefficients": dt.demo(link="all-gather"),
    "owners": dt.demo(link="owner"),
    "sum": dt.full(),
    "shared": dt.random_sign(),
}
OF_STEP = {
    "encode_kernel": {"negative_zeros"},
    "seal_kernel": {"step", "received"},
    "inspect_kernel": {"step"},
    "seal_sum_kernel": {"added"},
    "rotation_kernel": {"words", "choices", "share", "deal"},
}
"""The arguments of each kernel that are numbers of a step: a graph would have to read them from device memory."""
AGREEING = {"owners": {"full", "amax"}}
"""Operations with which ranks agree on messages that owners refused, which not all of them receive."""
STEPS = 4


@dataclass
class Step:
    """A step as a graph would hold it: kernels with the memory that they name, torch's operations, and readbacks."""

    kernels: list[SimpleNamespace]
    operations: list[str]
    readbacks: int


def place(argument):
    """The memory of a tensor, or its type for a number that only this step has."""
    if isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()._cdata
        return storage, argument.storage_offset(), tuple(argument.shape), argument.stride()
    return argument


def steps_of(scheme, monkeypatch):
    """The steps from the third one on."""
    from detonation.kernels.gpu import inspection, launching
    from detonation.kernels.gpu import launches as of_codecs

    started = []

    def launch(kernel, programs, *arguments, warps=8, **constants):
        names = kernel.arg_names[: len(arguments)]
        given = dict(zip(names, map(place, arguments), strict=True))
        fixed = {"programs": programs, "warps": warps, **constants}
        started.append(SimpleNamespace(name=kernel.__name__, given=given, fixed=fixed))
        launching.launch(kernel, programs, *arguments, warps=warps, **constants)

    for module in (inspection, of_codecs):
        monkeypatch.setattr(module, "launch", launch)
    model = torch.nn.ParameterList([torch.zeros(64, 64, device="meta") for _ in range(3)])
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, launches.Recycling(2), scheme, kernels=True)
    readbacks, found = [], []
    # undone first: `accelerator` has an own one, and gives the real one back
    with memory.accelerator(), monkeypatch.context() as patched:
        optimizer.build()
        patched.setattr(runtime, "Readback", counting(readbacks))
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2 + STEPS):
            started.clear()
            readbacks.clear()
            with memory.Watch() as watch:
                optimizer.step()
            found.append(Step([*started], [*watch.names], len(readbacks)))
    return found[2:]


def counting(made):
    class Counted(memory.Nothing):
        def __init__(self, numbers):
            super().__init__(numbers)
            made.append(1)

    return Counted


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    yield
    memory.selection._permutations.cache_clear()
    memory.selection._choices.cache_clear()


@pytest.mark.parametrize("name", SCHEMES)
def test_each_step_starts_the_same_kernels_on_the_same_memory(name, kernels, monkeypatch):
    first, *others = steps_of(SCHEMES[name], monkeypatch)
    assert [kernel.name for kernel in first.kernels]
    for other in others:
        for one, again in zip(first.kernels, other.kernels, strict=True):
            assert (one.name, one.fixed) == (again.name, again.fixed)
            differing = {key for key in one.given if one.given[key] != again.given[key]}
            assert differing <= OF_STEP.get(one.name, set()), one.name


@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_waits_for_nothing_and_allocates_nothing(name, kernels, monkeypatch):
    for step in steps_of(SCHEMES[name], monkeypatch):
        assert set(step.operations) - launches.VIEWS == AGREEING.get(name, set())
        assert step.readbacks == (3 if name in AGREEING else 1)
