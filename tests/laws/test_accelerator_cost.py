"""What a step costs an accelerator, on the device `meta`: launches to which neither replicas nor tensors add, and
memory of a block beside messages and state. `benchmarks/launches.py` and `memory.py` print the figures."""

import sys
from pathlib import Path

import pytest
import torch

import detonation as dt
from detonation.core.codec.precision import Float
from detonation.core.exchange.two_stage import TwoStage
from zoo import GRADIENT

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import launches
import memory

MOST, THROUGH_OWNERS, OF_SIGNS = 240, 350, 420
"""Operations of a step with overlap; through owners, which inspect, encode and decode twice; and where they send signs
without error feedback. Owners of up to a quarter of the rows, as among four and more, answer in one block."""
MOST_OF_EIGHT = 300
"""Operations among eight replicas, whatever the number of buckets and owners."""
BLOCK = 1 / 4
"""The rows that are worked on at once, as a share of the flat; less where the network adds up."""
CODED = 14
"""Bytes for each coefficient in few bits, while a block of them is decoded."""
STEPS = GRADIENT | {"look-ahead": dt.random(delay=1), "distro": dt.distro(chunk=64)}
SHAPES = [(1024, 1024)] * 4 + [(1000,)] * 4


@pytest.fixture(autouse=True)
def nothing_left_over():
    yield
    memory.selection._permutations.cache_clear()
    memory.selection._choices.cache_clear()


def is_coded(codec):
    return not isinstance(codec.precision, Float)


@pytest.mark.parametrize("name", launches.SCHEMES)
def test_a_step_is_a_few_hundred_launches_whatever_the_replicas(name):
    scheme = launches.SCHEMES[name]
    through_owners = OF_SIGNS if name.endswith("sign") and scheme.link == "owner" else THROUGH_OWNERS
    for replicas in (2, 4, 8):
        channel, names, _ = launches.operations(scheme, replicas, overlap=True)
        assert len(names) <= (through_owners if isinstance(channel.exchange, TwoStage) else MOST), replicas
        assert replicas < 8 or len(names) <= MOST_OF_EIGHT or through_owners == OF_SIGNS
        _, plain, _ = launches.operations(scheme, replicas, overlap=False)
        assert len(plain) <= len(names), replicas


EARLY = 6
"""The launches that leave early costs: a scan and an encoding of each of three more buckets."""


@pytest.mark.parametrize("name", ["demo", "demo, all-gather", "demo, owner", "random_sign"])
def test_with_kernels_a_step_is_a_dozen_launches_and_allocates_nothing(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    scheme = launches.SCHEMES[name]
    for replicas in (2, 4, 8):
        channel, names, allocated = launches.operations(scheme, replicas, overlap=False, kernels=True)
        through_owners = isinstance(channel.exchange, TwoStage)
        most = (8 if through_owners else 5) + scheme.codec.selection.shared  # whose rotation is a launch
        assert len(names) <= most, replicas
        _, overlapped, early = launches.operations(scheme, replicas, overlap=True, kernels=True)
        assert len(overlapped) <= most + EARLY <= 12 + replicas * through_owners, replicas
        # nothing but launches: no read, copy or allocation in what a CUDA graph is to hold
        assert all(each.endswith("_kernel") for each in [*names, *overlapped]), overlapped
        assert allocated == early == 0, replicas


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_step_holds_state_gradients_messages_and_temporaries_of_a_block(name, replicas):
    scheme = STEPS[name]
    found = memory.measured(scheme, memory.signs, torch.float32, SHAPES, replicas)
    block = found.numel * BLOCK
    decoded = [(scheme.codec, replicas)] + [(scheme.reply_codec(replicas), 1)] * (scheme.link == "owner")
    coded = CODED * max(is_coded(codec) * count * codec.selection.k / codec.selection.chunk for codec, count in decoded)
    if scheme.lookahead:  # weights, memory, the weights to which it goes back, and what was sent last
        assert found.kept <= 1.1 * (3 * 4 * found.numel + found.messages)
    # messages are put together once more, and inspected there
    assert found.over <= found.messages + block * (4 * 4.5 + coded)
