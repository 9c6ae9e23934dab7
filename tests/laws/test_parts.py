"""Some rows of received messages are read as those rows of all, for every scheme."""

from itertools import pairwise

import pytest
import torch

from detonation.core.codec.message_rows import MessageRows, joined
from detonation.core.integrity.message import HEADER_BYTES
from zoo import TALKING, values_of


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


@pytest.mark.parametrize("name", TALKING)
@pytest.mark.parametrize(("room", "tail"), [(0, 0), (24, 40)])
def test_law_4_rows_are_the_bytes_of_their_message_wherever_they_begin(name, room, tail):
    """After a header and before what follows, as a whole, as a copy, and as rows that are joined."""
    codec = TALKING[name].codec
    rows = 2 * codec.unit + 5
    flat = torch.randn(rows, codec.selection.chunk, generator=torch.Generator().manual_seed(1))
    selected = codec.select(flat, 0, 3)
    message = codec.encode(selected)
    assert len(message) == codec.nbytes(rows)
    memory = torch.full((1, room + len(message) + tail), 255, dtype=torch.uint8)
    run = MessageRows(codec, rows, lambda: memory, room=room)
    codec.write(selected, run)
    assert torch.equal(run.body[0], message)
    assert torch.equal(run.copy().octets[0], message)
    assert torch.equal(torch.cat([*run.parts], 1)[0], message)
    assert torch.equal(codec.written(run), values_of(codec, message, rows))
    assert memory[:, :room].eq(255).all() and memory[:, room + len(message) :].eq(255).all()
    cuts = [run.of_rows(0, codec.unit), run.of_rows(codec.unit, rows - codec.unit)]
    header = torch.arange(room, dtype=torch.uint8).view(1, room)
    (whole,) = joined([each.parts for each in cuts], room, header)
    assert torch.equal(whole[:room], header[0])
    assert torch.equal(whole[room : room + len(message)], message)
    assert not whole[room + len(message) :].any()


@pytest.mark.parametrize("name", TALKING)
def test_law_4_what_follows_the_last_row_on_an_accelerator_is_padding(name):
    """As many bytes as the checksum line has beyond the message, and of the last rows alone."""
    codec = TALKING[name].codec
    rows = 2 * codec.unit + 5
    room = HEADER_BYTES
    width = codec.width(rows, room)
    memory = torch.empty(1, width, dtype=torch.uint8, device="meta")
    run = MessageRows(codec, rows, lambda: memory, room=room)
    assert run.padding.shape == (1, width - room - codec.nbytes(rows))
    last = run.of_rows(codec.unit, rows - codec.unit)
    assert last.padding.shape == run.padding.shape
    assert run.of_rows(0, codec.unit).padding is None
