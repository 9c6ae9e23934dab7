"""Buffers of messages are used again, and never while a message is in them."""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from detonation.core.codec.message_rows import Workspace

TAKES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), max_size=20)


@given(depth=st.integers(0, 3), takes=TAKES)
def test_a_buffer_is_free_after_as_many_messages_as_may_be_in_flight(depth, takes):
    workspace = Workspace(depth)
    taken = {"a": [], "b": []}
    for name, size in takes:
        buffer = workspace.take(name, size, partial(torch.empty, 2, size))
        assert buffer.shape == (2, size)
        own = taken[name]
        in_flight = own[len(own) - depth + 1 :] if depth else own
        in_flight = [*in_flight, *taken["b" if name == "a" else "a"][-depth:]]
        assert all(buffer.data_ptr() != other.data_ptr() for other in in_flight)
        if depth and len(own) >= depth and own[-depth].shape == buffer.shape:
            assert buffer is own[-depth]
        own.append(buffer)
