"""The laws of DESIGN 3 that need no network, for every scheme, over generated layouts."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import detonation as dt
from detonation.core.codec import selection
from detonation.core.codec.aggregate import Coefficients, Mean, aggregate
from detonation.core.codec.selection import Rotation
from detonation.core.flat.layout import Layout
from detonation.core.memory import Feedback, Memory
from detonation.core.schemes import traffic
from zoo import GRADIENT, TALKING, decode, encode

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                (),
                (1,),
                (0,),
                (0, 63),
                (255,),
                (256,),
                (257,),
                (1009,),
                (3, 3, 2, 5),
                (17, 31),
                (64, 64),
                (65, 130),
            ]
        ),
        st.tuples(st.integers(0, 40), st.integers(1, 40)),
    ),
    max_size=6,
)
each_scheme = pytest.mark.parametrize("scheme", TALKING.values(), ids=TALKING)
each_gradient_scheme = pytest.mark.parametrize("scheme", GRADIENT.values(), ids=GRADIENT)
laws = settings(max_examples=25, deadline=None)


def layout_of(shapes: list[tuple[int, ...]], scheme: dt.schemes.Scheme) -> Layout:
    return scheme.codec.layout({f"p{i}": shape for i, shape in enumerate(shapes)})


def signals_of(layout: Layout, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator) for slot in layout.slots]


@given(shapes=SHAPES, chunk=st.integers(1, 300), tile=st.integers(0, 17))
@laws
def test_layout_holds_every_coordinate_once(shapes, chunk, tile):
    chunk = tile * tile or chunk
    layout = Layout.of({f"p{i}": shape for i, shape in enumerate(shapes)}, chunk, tile)
    signals = signals_of(layout, 0)
    flat = layout.flatten(signals, CPU)
    assert flat.shape == (layout.rows, chunk)
    assert all(
        torch.equal(part, signal) for part, signal in zip(layout.parts(flat), signals, strict=True)
    )
    assert layout.numel + len(layout.padding(CPU)) == flat.numel()
    assert not flat.view(-1)[layout.padding(CPU)].any()
    rows = [range(slot.row, slot.row + slot.rows) for slot in layout.slots]
    assert [row for each in rows for row in each] == list(
        range(layout.rows)
    )  # no chunk spans two parameters


@pytest.mark.parametrize("shape", [(64, 64), (255, 257), (67, 3, 5, 7), (128, 256), (64, 1009)])
def test_a_row_is_a_tile_of_the_matrix(shape):
    """Each by its definition: 64 lines of 64 coordinates, zeros where the matrix ends."""
    matrix = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape[0], -1)
    layout = Layout.of({"before": (5,), "w": shape}, 4096, tile=64)
    flat = layout.flatten([None, matrix.view(shape)], CPU)
    across = -(-matrix.shape[1] // 64)
    for row, tile in enumerate(flat[1:].view(-1, 64, 64)):
        top, left = 64 * (row // across), 64 * (row % across)
        plain = torch.zeros(64, 64)
        cut = matrix[top : top + 64, left : left + 64]
        plain[: cut.shape[0], : cut.shape[1]] = cut
        assert torch.equal(tile, plain)
    assert layout.rows == 1 + across * -(-shape[0] // 64) and not flat[0].any()


def test_what_fills_no_tile_lies_in_rows_of_its_own_order():
    shapes = {
        "scalar": (),
        "bias": (5000,),
        "narrow": (1009, 63),
        "flat": (63, 1009),
        "empty": (0, 64),
        "gone": (64, 0),
    }
    layout = Layout.of(shapes, 4096, tile=64)
    assert not layout.tiled and [slot.rows for slot in layout.slots] == [1, 2, 16, 16, 0, 0]


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 100])
def test_rows_are_scattered_in_parts_of_any_size(at_once):
    layout = Layout.of({"a": (3, 9), "empty": (0, 7), "scalar": (), "b": (41,), "c": (8,)}, chunk=8)
    flat = torch.arange(layout.rows * 8.0).view(-1, 8)
    targets = [torch.full(slot.shape, -1.0) for slot in layout.slots]
    layout.scatter(iter(flat.split(at_once)), targets)
    assert all(map(torch.equal, targets, layout.views(flat)))


def test_writing_leaves_alone_what_is_absent():
    layout = Layout.of({"a": (9, 9), "b": (8, 8), "c": (3,)}, 64, tile=8)
    flat = layout.flatten(signals_of(layout, 0), CPU)
    layout.write(flat, [None, torch.ones(8, 8), None])
    a, _, c = signals_of(layout, 0)
    assert all(
        torch.equal(*pair)
        for pair in zip(layout.parts(flat), [a, torch.ones(8, 8), c], strict=True)
    )


@each_scheme
@given(shapes=SHAPES, steps=st.integers(1, 6))
@laws
def test_law_1_nothing_is_lost(scheme, shapes, steps):
    layout = layout_of(shapes, scheme)
    memory = Memory(layout, Feedback(decay=1.0, alpha=1.0), CPU)
    sent = layout.zeros(CPU)
    put_in = [torch.zeros(slot.shape) for slot in layout.slots]
    for step in range(steps):
        signals = signals_of(layout, step)
        message = encode(scheme, memory.absorb(signals), step, seed=0)
        decoded = decode(scheme.codec, [message], layout.rows, step, seed=0, how="mean")
        memory.release([decoded])
        sent += decoded
        put_in = [total + signal for total, signal in zip(put_in, signals, strict=True)]
    for left, went, total in zip(
        layout.parts(memory.residual), layout.parts(sent), put_in, strict=True
    ):
        torch.testing.assert_close(left + went, total, atol=2e-5, rtol=1e-5)


@given(shapes=SHAPES, replicas=st.integers(1, 4))
@laws
def test_law_1_dropping_the_error_takes_out_the_coefficients_themselves(shapes, replicas):
    scheme = dt.schemes.random(rate=1 / 4, precision="sign", error_feedback=False)
    layout = layout_of(shapes, scheme)
    flat = layout.flatten(signals_of(layout, 0), CPU)
    selected = scheme.codec.select(flat, 0, seed=0)
    out = aggregate(
        Coefficients(selected.values[None], selected.indices), Mean(), scheme.codec.selection.chunk
    )
    left = flat - out
    assert not left.gather(1, selected.indices).any()
    assert torch.equal(left != 0, (flat != 0) & (out == 0))


@each_gradient_scheme
@given(shapes=SHAPES, alpha=st.floats(0, 1), decay=st.floats(0, 1))
@laws
def test_memory_is_the_stated_recurrence_and_its_padding_stays_zero(scheme, shapes, alpha, decay):
    layout = layout_of(shapes, scheme)
    memory = Memory(layout, Feedback(decay, alpha), CPU)
    before = signals_of(layout, 1)
    memory.absorb(before)
    signals = signals_of(layout, 2)
    sent = layout.flatten(signals_of(layout, 3), CPU) + 1  # also where the padding is
    memory.absorb(signals)
    memory.release([sent])
    for view, old, new, out in zip(
        layout.parts(memory.residual), before, signals, layout.parts(sent), strict=True
    ):
        torch.testing.assert_close(view, decay * old + new - alpha * out, atol=1e-5, rtol=1e-5)
    assert not memory.residual.view(-1)[layout.padding(CPU)].any()


@each_scheme
@given(shapes=SHAPES, replicas=st.integers(1, 5), step=st.integers(0, 10**6))
@laws
def test_law_2_the_same_messages_decode_to_the_same_bits(scheme, shapes, replicas, step):
    layout = layout_of(shapes, scheme)
    flats = [layout.flatten(signals_of(layout, replica), CPU) for replica in range(replicas)]

    def agreed() -> torch.Tensor:
        messages = [encode(scheme, flat.clone(), step, seed=5) for flat in flats]
        return decode(scheme.codec, messages, layout.rows, step, seed=5, how=scheme.aggregation)

    assert torch.equal(agreed(), agreed())


@pytest.mark.parametrize(
    "rate", [1, 1 / 2, 1 / 3, 0.3, 0.75, 1 / 4, 1 / 16, 1 / 32, 0.1, 1 / 49, 1 / 100, 0.011]
)
@pytest.mark.parametrize("make", [dt.schemes.random, dt.schemes.striding])
@given(shapes=SHAPES, seed=st.integers(0, 9), start=st.integers(0, 3))
@settings(max_examples=5, deadline=None)
def test_law_3_everyone_is_heard_once_in_a_cycle(make, rate, shapes, seed, start):
    scheme = make(rate=rate)
    layout, period = layout_of(shapes, scheme), scheme.codec.selection.period
    ones = layout.flatten([torch.ones(slot.shape) for slot in layout.slots], CPU)
    heard = layout.zeros(CPU)
    for step in range(start * period, (start + 1) * period):
        message = encode(scheme, ones, step, seed)
        heard += decode(scheme.codec, [message], layout.rows, step, seed, "mean")
    assert (
        period - 1 < 1 / rate + 1e-6
        and scheme.codec.selection.k <= rate * scheme.codec.selection.chunk + 1e-6
    )
    assert all((view == 1).all() for view in layout.parts(heard))


def test_random_subsets_are_fresh_in_every_cycle_and_differ_between_rows_and_seeds():
    subset = dt.schemes.random(rate=1 / 8).codec.selection
    flat = torch.zeros(50, subset.chunk)
    first, next_cycle = subset.indices(flat, 0, 0), subset.indices(flat, subset.period, 0)
    assert not torch.equal(first, next_cycle)
    assert not torch.equal(first, subset.indices(flat, 0, 1))
    assert len(first.sort(1).values.unique(dim=0)) > 20


@pytest.mark.long_cases("0.01")
@pytest.mark.parametrize("rate", [1, 1 / 2, 1 / 8, 0.3, 1 / 100])
def test_without_a_cycle_each_step_sends_a_subset_that_no_other_step_knows_of(rate):
    """As often as chance has it, a coordinate is sent again, soon or late; on the whole each is sent as often."""
    subset, rows, seed = dt.random_sign(rate=rate).codec.selection, 2000, 3
    steps = range(8 * subset.shares)
    flat = torch.zeros(rows, subset.chunk)
    sent = torch.stack([flat.scatter(1, subset.indices(flat, step, seed), 1.0) for step in steps])
    p = 1 / subset.shares
    assert subset.period == (subset.shares == 1) and (sent.sum(2) == subset.k).all()
    assert float(sent.mean((0, 1)).sub(p).abs().max()) <= 0.1 * p  # of each place in a row
    counts, wanted = sent.sum(0), torch.distributions.Binomial(len(steps), torch.tensor(p))
    assert abs(float(counts.var()) - float(wanted.variance)) <= 0.15 * float(wanted.variance) + 1e-9
    both = (
        sent.flatten(1) @ sent.flatten(1).T / sent[0].numel()
    )  # the share that is sent at two steps
    for after in range(1, subset.shares):
        again = float(both.diagonal(after).mean())
        assert abs(again - p * p) <= 0.2 * p * p + 1e-9, after
    half = subset.for_rows(1000, rows)
    assert torch.equal(half.indices(flat[1000:], 5, seed), subset.indices(flat, 5, seed)[1000:])


def splitmix64(state):
    """Vigna's reference, which begins with these words: the next state and its word."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return state, word ^ (word >> 31)


def test_random_subsets_are_integer_arithmetic_of_seed_cycle_and_row():
    """The same on each device and in each version of torch, unlike its generators."""
    assert splitmix64(0)[1] == 0xE220A8397B1DCDAF
    key = 0
    for part in (7, 3, 1):
        _, key = splitmix64(key + 0x9E3779B97F4A7C15 * part)
    words = []
    for _ in range(20000):  # more than one block of the tensor arithmetic
        key, word = splitmix64(key)
        words.append(word)
    assert [word % 2**64 for word in selection._random_words(20000, CPU, 7, 3, 1).tolist()] == words
    octets = b"".join(word.to_bytes(8, "little") for word in words)
    assert selection._choices(159999, 7, 3, CPU).tolist() == [octet & 63 for octet in octets[:-1]]
    for source in Path(selection.__file__).parents[1].rglob("*.py"):  # all of core
        assert not re.search(
            r"torch\.(rand\w*|Generator|bernoulli|multinomial)\(", source.read_text()
        ), source


def test_random_subsets_are_uniform():
    """Chi-squared over rows, pairs of neighbouring rows, and places in a permutation: each within 4 deviations."""

    def surprise(cells, counted):
        found = torch.bincount(cells.view(-1).long(), minlength=counted).double()
        mean = cells.numel() / counted
        return float((found - mean).square().sum() / mean - counted + 1) / (2 * counted - 2) ** 0.5

    choices = selection._choices(500_000, 0, 0, CPU).long()
    assert abs(surprise(choices, 64)) < 4
    assert abs(surprise(64 * choices[:-1] + choices[1:], 4096)) < 4
    assert abs(surprise(64 * choices + selection._choices(500_000, 0, 1, CPU).long(), 4096)) < 4
    tables = torch.cat(
        [selection._permutations.__wrapped__(48, 0, cycle, CPU) for cycle in range(100)]
    )
    assert torch.equal(tables.sort(1).values, torch.arange(48).expand(6400, -1))
    places = 48 * torch.arange(48) + tables
    assert abs(surprise(places, 48 * 48)) < 4
    before, after = tables[:, :-1], tables[:, 1:]
    assert (
        abs(surprise(47 * before + after - (after > before).long(), 48 * 47)) < 4
    )  # no index follows itself


@given(
    signal=st.lists(st.floats(-1, 1, width=32), min_size=24, max_size=24), topk=st.integers(1, 8)
)
@laws
def test_top_k_tells_the_largest(signal, topk):
    flat = torch.tensor(signal).view(3, 8)
    indices = dt.demo(topk, 8).codec.selection.indices(flat, 0, 0)
    sent = flat.abs().gather(1, indices).sort(1, descending=True).values
    assert all(len(set(row)) == topk for row in indices.tolist())
    ties = {"rtol": 8 * 2.0**-23, "atol": 2.0**-145}  # `chunk` units in the last place
    torch.testing.assert_close(sent, flat.abs().sort(1, descending=True).values[:, :topk], **ties)


@each_scheme
@given(shapes=SHAPES, step=st.integers(0, 100))
@laws
def test_law_4_a_message_owns_its_memory_and_its_size_is_known(scheme, shapes, step):
    layout = layout_of(shapes, scheme)
    flat = layout.flatten(signals_of(layout, 0), CPU)
    message = encode(scheme, flat, step, seed=0)
    before = message.clone()
    flat.fill_(float("nan"))
    assert torch.equal(message, before)
    assert message.nbytes == scheme.codec.nbytes(layout.rows)


@pytest.mark.parametrize("replicas", [2, 3, 8, 32, 64])
@pytest.mark.parametrize("scheme", TALKING.values(), ids=TALKING)
def test_law_5_never_larger_than_dense(scheme, replicas):
    layout = scheme.codec.layout({"w": (640, 64), "b": (64,)})
    dense = traffic.dense_bytes(layout.numel, replicas)
    steps = range(scheme.round.every, 2 * scheme.round.every)
    per_step = (
        sum(traffic.bytes_sent(scheme, layout, replicas, step, bare=True) for step in steps)
        / scheme.round.every
    )
    if per_step <= dense:
        traffic.require_below_dense(scheme, layout, replicas)
    else:
        with pytest.raises(traffic.LargerThanDense, match=f"{per_step:,.0f} bytes.*{dense:,}"):
            traffic.require_below_dense(scheme, layout, replicas)


@pytest.mark.parametrize("scheme", TALKING.values(), ids=TALKING)
def test_law_5_an_owner_answers_with_no_more_coefficients_than_came(scheme):
    """Nor with fewer than each replica sent."""
    sent = scheme.codec.selection
    for replicas in (2, 3, 8, 32):
        answered = scheme.reply_codec(replicas).selection
        assert answered.chunk == sent.chunk
        assert sent.k <= answered.k <= min(sent.chunk, sent.k * replicas)


def test_law_5_refuses_what_grows_with_the_replicas():
    layout = Layout.of({"w": (640, 64)}, 64)
    traffic.require_below_dense(dt.demo(topk=4, chunk=64), layout, 16)
    traffic.require_below_dense(dt.demo(topk=4, chunk=64), layout, 65)  # through owners
    with pytest.raises(traffic.LargerThanDense, match="778,240 bytes per step over 65 replicas"):
        traffic.require_below_dense(dt.demo(topk=4, chunk=64, link="all-gather"), layout, 65)


@each_scheme
@given(shapes=SHAPES, scale=st.sampled_from([2.0**-10, 2.0, 2.0**7]))
@laws
def test_law_7_the_update_is_linear_in_the_signal(scheme, shapes, scale):
    layout = layout_of(shapes, scheme)
    flat = layout.flatten(signals_of(layout, 0), CPU)

    def update(signal: torch.Tensor) -> torch.Tensor:
        message = encode(scheme, signal, 0, seed=0)
        return decode(scheme.codec, [message], layout.rows, 0, seed=0, how=scheme.aggregation)

    assert torch.equal(
        update(flat * scale), update(flat) * scale
    )  # powers of two scale without rounding


@each_scheme
def test_law_10_absent_is_zero(scheme):
    shapes = {"a": (33,), "gone": (5, 5), "empty": (0, 4), "scalar": ()}
    layout = scheme.codec.layout(shapes)
    signals = signals_of(layout, 0)
    zeroed = [signals[0], torch.zeros(5, 5), signals[2], signals[3]]
    absent = [signals[0], None, signals[2], signals[3]]
    assert torch.equal(layout.flatten(zeroed, CPU), layout.flatten(absent, CPU))
    memories = [Memory(layout, Feedback(0.9), CPU) for _ in range(2)]
    assert torch.equal(memories[0].absorb(zeroed), memories[1].absorb(absent))


@pytest.mark.parametrize("side", [1, 3, 8, 64])
def test_the_dct_of_a_tile_is_the_one_along_both_sides(side):
    scheme = dt.demo(1, side, tiles=True)
    tiles = torch.randn(2, side, side)
    along = dt.demo(1, side).codec.basis
    both = torch.stack([along.forward(along.forward(tile).T).T for tile in tiles])
    coefficients = scheme.codec.basis.forward(tiles.view(2, -1))
    torch.testing.assert_close(coefficients.view_as(tiles), both, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        scheme.codec.basis.inverse(coefficients).view_as(tiles), tiles, atol=1e-5, rtol=1e-5
    )


def test_indices_of_a_tile_take_twelve_bits():
    codec = dt.demo(topk=32, chunk=64, tiles=True, precision="sign").codec
    assert (
        codec.index_coding.width == 12 and codec.nbytes(10) == 10 * 32 * 12 // 8 + 10 * 32 // 8 + 2
    )
    with pytest.raises(
        ValueError, match=r"topk is 4097, must be from 1 to chunk \* chunk \(4096\)"
    ):
        dt.demo(topk=4097, chunk=64, tiles=True)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64, 1009])
def test_dct_is_orthonormal_and_the_one_of_the_textbook(size):
    basis = dt.demo(1, size).codec.basis
    eye = torch.eye(size)
    torch.testing.assert_close(basis.inverse(basis.forward(eye)), eye, atol=1e-5, rtol=0)
    x = torch.randn(1, size, dtype=torch.float64)
    n = torch.arange(size, dtype=torch.float64)
    plain = torch.stack(
        [
            (x * torch.cos(torch.pi * (n + 0.5) * k / size)).sum() * (2 / size) ** 0.5
            for k in range(size)
        ]
    )
    plain[0] /= 2**0.5
    torch.testing.assert_close(basis.forward(x.float())[0], plain.float(), atol=1e-4, rtol=1e-4)


def test_every_rotation_declares_equal_messages():
    for make in (dt.schemes.random, dt.schemes.striding):
        for rate in (1.0, 0.7, 0.5, 1 / 3, 1 / 64, 1 / 100):
            selection = make(rate).codec.selection
            assert (
                isinstance(selection, Rotation)
                and selection.k * selection.period == selection.chunk
            )
