"""What a step costs an accelerator, on the device `meta`: launches to which neither replicas nor tensors add, and
memory of a block beside messages and state. `benchmarks/accelerator/launches.py` and `memory.py` print the figures."""

from collections import Counter
from functools import partial

import pytest
import torch
from benchmarks.accelerator import host_calls, launches, memory
from torch.distributed.tensor import DTensor, Shard

import worlds
from covering import some
from detonation.core.engine import rows_at_once
from detonation.core.exchange.two_stage import TwoStage

MOST, THROUGH_OWNERS, OF_SIGNS = 300, 360, 420
"""Operations of a step with overlap; through owners, which inspect, encode and decode twice; and where they send signs
without error feedback. Owners of up to a quarter of the rows, as among four and more, answer in one block."""
MOST_OF_EIGHT = 300
"""Operations among eight replicas, whatever the number of buckets and owners."""
BUCKET = 1 / 4
"""The largest bucket, as a share of the flat."""
SPARE = 1.05
"""What small things may take beside a bucket."""
SHAPES = [(4096, 4096)] * 16
"""Those of `benchmarks/accelerator/memory.py`: a large flat without padding.

Blocks end where messages can be cut.
"""


@pytest.fixture(autouse=True)
def nothing_left_over():
    yield
    memory.selection._permutations.cache_clear()
    memory.selection._choices.cache_clear()


SUMMED = [name for name in memory.CASES if name.startswith(("random 1", "strid", "slic", "full"))]


@pytest.mark.long_cases("demo", "demo, owner", "random", "random_sign")
@pytest.mark.parametrize("name", launches.SCHEMES)
def test_a_step_is_a_few_hundred_launches_whatever_the_replicas(name):
    scheme = launches.SCHEMES[name]
    through_owners = (
        OF_SIGNS if name.endswith("sign") and scheme.link == "owner" else THROUGH_OWNERS
    )
    for replicas in (2, 4, 8):
        channel, names, _ = launches.operations(scheme, replicas, overlap=True)
        assert len(names) <= (through_owners if isinstance(channel.exchange, TwoStage) else MOST), (
            replicas
        )
        assert replicas < 8 or len(names) <= MOST_OF_EIGHT or through_owners == OF_SIGNS
        _, plain, _ = launches.operations(scheme, replicas, overlap=False)
        assert len(plain) <= len(names), replicas


EARLY = 6
"""The launches that leave early costs: a scan and an encoding of each of three more buckets."""


@pytest.mark.parametrize("name", launches.SCHEMES)
def test_with_kernels_a_step_is_a_dozen_launches_and_allocates_nothing(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    scheme = launches.SCHEMES[name]
    for replicas in (2, 4, 8):
        channel, names, allocated = launches.operations(
            scheme, replicas, overlap=False, kernels=True
        )
        through_owners = isinstance(channel.exchange, TwoStage)
        rotates = (
            scheme.codec.selection.shared and scheme.codec.selection.period != 1
        )  # which is a launch
        most = (8 if through_owners else 5) + rotates
        assert len(names) <= most, replicas
        _, overlapped, early = launches.operations(scheme, replicas, overlap=True, kernels=True)
        assert len(overlapped) <= most + EARLY <= 12 + replicas * through_owners, replicas
        # nothing but launches: no read, copy or allocation in what a CUDA graph is to hold
        assert all(each.endswith("_kernel") for each in [*names, *overlapped]), overlapped
        assert allocated == early == 0, replicas


CALLS = {"this library": 54, "in all": 69}
"""Python calls of a step at most: 65, and four names of kernels, which are calls in Triton's interpreter."""


def test_more_tensors_cost_the_host_no_call_of_python(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    few, many = (host_calls.calls_of_a_step(tensors) for tensors in (1, 113))
    assert few == many
    owners = Counter(host_calls.owner_of(code) for _, code in many)
    assert owners["this library"] <= CALLS["this library"], owners
    assert len(many) <= CALLS["in all"], owners


def calls_of_shards(mesh, tensors):
    """The Python calls of a step of a model that is sharded as by FSDP2, which keeps the placement of a gradient."""

    def shard(spec=None):
        local = torch.zeros(640, device="meta")
        if spec:
            return DTensor(local, spec, requires_grad=False)
        return DTensor.from_local(local, mesh["shard"], [Shard(0)], run_check=False)

    model = torch.nn.ParameterList([shard() for _ in range(tensors)])
    return len(host_calls.calls_of(model, lambda parameter: shard(parameter._spec)))


def test_nor_do_more_shards(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    few, many = (worlds.run_alone(calls_of_shards, 1, 1, tensors)[0] for tensors in (1, 9))
    assert few == many


CASES = [(name, 8) for name in memory.CASES]
CASES += [
    (name, 2) for name, (scheme, _, _) in memory.CASES.items() if scheme.signal == "gradients"
]
WITH_KERNELS = [
    "demo 4/64 + SignSGD",
    "random 1/16 + SignSGD",
    "muloco 4bit + AdamW",
    "sparta 1/200 + AdamW",
]


ONCE = [case for number, case in enumerate(CASES[: len(memory.CASES)]) if number % 3]
ONCE += [(name, 2) for name, replicas in CASES if (name, 8) not in ONCE and (name, 2) in CASES]


@pytest.mark.long_cases("demo 32/64 + SignSGD-8", "diloco int8 + AdamW-8")
@some("name, replicas", CASES, keep=ONCE)
def test_temporaries_of_a_step_take_no_more_than_a_bucket(name, replicas):
    found = memory.measured(*memory.CASES[name], SHAPES, replicas)
    assert found.over <= found.numel * 4 * BUCKET * SPARE


@pytest.mark.parametrize("name", ["demo 4/64 + SignSGD", "random_sign 1/8 + SignSGD"])
def test_of_a_flat_that_is_not_large_they_take_up_to_two(name):
    shapes = [(2048, 2048)] * 4
    found = memory.measured(*memory.CASES[name], shapes, 8)
    assert found.numel < rows_at_once.LARGE
    assert found.over <= found.numel * 4 * BUCKET * 2


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_with_kernels_temporaries_take_no_more_either(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    found = memory.measured(*memory.CASES[name], SHAPES, 8, kernels=True)
    assert found.over <= found.numel * 4 * BUCKET * SPARE


@pytest.mark.parametrize("name", SUMMED)
def test_with_kernels_a_sum_keeps_its_message_and_needs_no_other_memory(name, monkeypatch):
    pytest.importorskip("triton")
    measure = partial(memory.measured, *memory.CASES[name], SHAPES, 2)
    plain = measure()
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    found = measure(kernels=True)
    assert found.over <= 0 and found.kept <= plain.kept + 1.01 * found.messages
