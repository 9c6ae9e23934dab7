"""Some rows of received messages are read as those rows of all, for every scheme."""

from itertools import pairwise

import pytest
import torch

from zoo import TALKING


@pytest.mark.parametrize("name", TALKING)
def test_some_rows_of_messages_are_read_as_those_rows_of_all(name):
    scheme = TALKING[name]
    codec = scheme.codec
    rows = 3 * codec.unit + 5
    device = torch.device("cpu")
    flats = torch.randn(2, rows, codec.selection.chunk, generator=torch.Generator().manual_seed(1))
    messages = [codec.encode(codec.select(flat, 0, 3)) for flat in flats]
    shared = codec.shared_indices(rows, 0, 3, device)
    ends = [0, codec.unit, 3 * codec.unit, rows]

    def read(first, end):  # each time of messages that nobody has read
        received = codec.received(messages, rows, shared, scheme.aggregation)
        return received.read(first, end)

    whole = read(0, rows)
    for first, end in pairwise(ends):
        some = read(first, end)
        assert torch.equal(some.values, whole.values[:, first:end])
        if isinstance(whole.indices, torch.Tensor):
            assert torch.equal(some.indices, whole.indices[..., first:end, :])
