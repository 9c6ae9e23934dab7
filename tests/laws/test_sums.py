"""Sums in a stated order: the same bits, however their numbers come."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from detonation.core.codec.aggregate import AGGREGATIONS, WeightedMean, message_norms
from detonation.core.compute.scatter_sum import LANES, SumOfSquares, added

COUNT = 3 * LANES + 17


def numbers(rows, count):
    generator = torch.Generator().manual_seed(count)
    each = torch.randn(rows, count, generator=generator)
    return each * 10.0 ** torch.randint(-3, 4, (rows, count), generator=generator)


def in_order(each):
    """Lane by lane in order, then by halves, as `SumOfSquares` says."""
    lanes = torch.zeros(len(each), LANES)
    for turn in torch.nn.functional.pad(each, (0, -each.shape[1] % LANES)).split(LANES, 1):
        lanes += turn.square()
    while lanes.shape[1] > 1:
        first, second = lanes.chunk(2, 1)
        lanes = first + second
    return lanes[:, 0]


@given(cuts=st.lists(st.integers(0, COUNT), max_size=6))
def test_squares_are_added_in_one_order_however_they_are_cut(cuts):
    each = numbers(2, COUNT)
    ends = [*sorted(cuts), COUNT]
    one = SumOfSquares(2, LANES, each.device)
    for first, end in zip([0, *ends], ends, strict=False):
        one.add(each[:, first:end])
    assert torch.equal(one.total(), in_order(each))


@given(count=st.integers(0, 70))
def test_every_number_is_added_once(count):
    each = torch.arange(3 * count, dtype=torch.float32).view(3, count)
    assert torch.equal(added(each), each.sum(1))


def test_a_clipped_mean_weighs_whole_messages_by_the_same_bits_however_they_are_cut():
    aggregation = AGGREGATIONS["clipped_mean"]
    rows = 130
    values = numbers(15, rows * 64).view(15, rows, 64)
    norms = message_norms(values.split([64, 64, 2], 1), rows)
    assert torch.equal(norms, message_norms([values], rows))
    weighed = WeightedMean(aggregation.weights(norms))
    assert torch.equal(aggregation(values, None, 64), weighed(values, None, 64))
