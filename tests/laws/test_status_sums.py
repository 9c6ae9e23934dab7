"""Sums of statuses: each replica is heard as it spoke, with any number of names."""

from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detonation.core.integrity.sums import SumGuard

REPLICAS = 3
NAMES = {count: [f"p{number}" for number in range(count)] for count in (1, 7, 300, 20_000, 70_000)}


def guards(count):
    return [
        SumGuard(NAMES[count], "schema", 1, replica, 0, Mock(skipped=0, refused=0))
        for replica in range(REPLICAS)
    ]


def summed(each, statuses, steps):
    """The digits of all replicas, as an all-reduce adds them: also in bf16 none is rounded."""
    digits = []
    for guard, status, step in zip(each, statuses, steps, strict=True):
        digits.append(torch.empty(3 * REPLICAS, dtype=torch.bfloat16))
        guard.seal_sum(digits[-1], status, step)
    return torch.stack(digits).sum(0)


@pytest.mark.parametrize("count", NAMES)
@given(
    shares=st.tuples(*[st.sampled_from([0, 0, 1e-9, 0.3, 0.99999])] * REPLICAS),
    step=st.integers(0, 600),
)
def test_every_status_is_heard_as_it_was_said(count, shares, step):
    statuses = [1 + int(share * count) if share else 0 for share in shares]
    each = guards(count)
    digits = summed(each, statuses, [step] * REPLICAS)
    skipped = [
        call(sender, each[0]._place, NAMES[count][status - 1], step)
        for sender, status in enumerate(statuses)
        if status
    ]
    for guard in each:
        assert guard.open_sum([torch.zeros(4)], digits, step) is True
        assert guard._counts.skip.mock_calls == skipped
        assert not guard._counts.misplace.called and not guard._counts.refuse.called


@pytest.mark.parametrize("count", NAMES)
@given(step=st.integers(0, 600), late=st.integers(1, 9))
def test_a_replica_at_another_step_is_found(count, step, late):
    each = guards(count)
    digits = summed(each, [0] * REPLICAS, [step, step + late, step])
    assert each[0].open_sum([torch.zeros(4)], digits, step) is False
    each[0]._counts.misplace.assert_called_once_with(1, step)


@pytest.mark.parametrize("count", NAMES)
def test_a_status_that_does_not_exist_is_refused(count):
    each = guards(count)
    none = each[0]._most_said * each[0].statuses  # the first that nobody says
    digits = summed(each, [0, none, 0], [5] * REPLICAS)
    each[0].open_sum([torch.zeros(4)], digits, 5)
    each[0]._counts.refuse.assert_called_once_with(1, "has a status that does not exist", 5)


@pytest.mark.parametrize("count", NAMES)
@given(step=st.integers(0, 600), share=st.sampled_from([0, 0.3, 0.99999]))
def test_what_a_replica_writes_is_exact_in_bf16(count, step, share):
    """All integers up to 256 are: more bits would be rounded before anybody adds them."""
    written = torch.empty(3 * REPLICAS, dtype=torch.float64)
    guards(count)[0].seal_sum(written, int(share * count), step)
    assert written[:3].tolist() == written[:3].bfloat16().tolist() and written.max() <= 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_heard_stays_where_the_message_is_written_anew(dtype):
    """Buffers of messages are used again before anybody asks which gradients were missing."""
    each = guards(7)
    digits = summed(each, [2 * each[0].statuses] * REPLICAS, [4] * REPLICAS).to(dtype)
    missing = Mock()
    each[0].hear_sum(missing, digits, 4, ())
    expected = missing.said()
    digits.fill_(9.0)
    assert missing.said() == expected == dict.fromkeys(range(REPLICAS), 2)
