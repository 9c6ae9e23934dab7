"""A tensor that is not the same on all replicas: who differs, and what all have after a repair."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.agreement.desync import Difference, differences, repaired
from detonation.core.link.link import Link

CPU = torch.device("cpu")
KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def found_and_mended(communicator, held, kind):
    """What this replica finds where each holds other numbers, and its tensor once it is repaired."""
    link = Link(communicator)
    mine = torch.full((2, 3), held[communicator.replica]).to(kind)
    same = torch.ones(4)
    found = differences(link, {"same": same, "weight": mine}, CPU)
    return found, [repaired(link, each, mine, CPU) for each in found]


@given(held=st.lists(st.integers(0, 2), min_size=2, max_size=6))
def test_law_2_a_majority_is_right_and_else_the_first_replica(held):
    """All find the same, and all have the same bits after a repair."""
    ends = simulate_replicas(lambda c: found_and_mended(c, held, torch.float32), len(held))
    most, count = Counter(held).most_common(1)[0]
    right = most if 2 * count > len(held) else held[0]
    odd = tuple(replica for replica, value in enumerate(held) if value != right)
    for found, mended in ends:
        if not odd:
            assert found == []
            continue
        assert found == [Difference("weight", odd, held.index(right))]
        assert torch.equal(mended[0], torch.full((2, 3), float(right)))


@pytest.mark.parametrize("kind", KINDS)
def test_law_2_a_tensor_of_any_type_is_repaired_bit_for_bit(kind):
    for found, mended in simulate_replicas(lambda c: found_and_mended(c, [1, 0, 0], kind), 3):
        assert found == [Difference("weight", (0,), 1)]
        assert mended[0].dtype == kind and torch.equal(mended[0], torch.zeros(2, 3, dtype=kind))
