"""The fast engines, compiled and in blocks, against plain torch, under the same laws.

The compiled ones need g++, as the project's tests do.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import detonation as dt
from detonation.core.codec.aggregate import AGGREGATIONS
from detonation.core.codec.indices import narrow
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.selection import TopK
from detonation.core.compute import kernel_library
from detonation.core.compute.scatter_sum import product_in_order
from detonation.core.engine import reference
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory
from detonation.core.optim.signsgd import Deferred
from detonation.core.runtime import Runtime
from detonation.engines.native_engine import NativeEngine
from detonation.kernels import native
from zoo import TALKING, values_of

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.one_of(
        st.sampled_from(
            [(), (0,), (0, 63), (255,), (256,), (257,), (1009,), (3, 3, 2, 5), (64, 64)]
        ),
        st.tuples(st.integers(0, 40), st.integers(1, 40)),
    ),
    max_size=6,
)
laws = settings(max_examples=15, deadline=None)


def engines(scheme, shapes, fast=NativeEngine):
    """A plain and a `fast` engine on equal, non-zero memories."""
    layout = scheme.codec.layout({f"p{i}": shape for i, shape in enumerate(shapes)})
    memories = [Memory(layout, scheme.feedback, CPU) for _ in range(2)]
    for memory in memories:
        memory.absorb(signals(layout, 99))
    made = engine_for(
        scheme.codec, layout, memories[1], Runtime(CPU, 0, kernels=fast is NativeEngine)
    )
    assert type(made) is fast
    return layout, ReferenceEngine(scheme.codec, layout, memories[0], Runtime(CPU)), made


def indices_of(selected):
    return narrow(selected.indices).long()


def received(codec, sent, aggregation=AGGREGATIONS["mean"]):
    """What replicas that sent these selections receive."""
    messages = [codec.encode(each) for each in sent]
    return codec.received(messages, len(sent[0].values), None, aggregation)


def release(engine, selected, read):
    if not engine.releases_at_once:
        engine.release(selected, read if engine.needs_own_values else None)


def signals(layout, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator) for slot in layout.slots]


@pytest.mark.parametrize("chunk", [16, 64, 256])
@pytest.mark.parametrize("negative_zeros", [False, True])
@given(shapes=SHAPES, topk=st.sampled_from([1, 3, 4, 12, 13, 32]), error_feedback=st.booleans())
@laws
def test_signs_are_written_and_read_as_by_plain_torch(
    chunk, negative_zeros, shapes, topk, error_feedback
):
    scheme = dt.demo(min(topk, chunk // 2), chunk, precision="sign", error_feedback=error_feedback)
    layout, plain, fast = engines(scheme, shapes)
    codec, signal = scheme.codec, [torch.zeros(slot.shape) for slot in layout.slots]
    runs = [
        MessageRows(
            codec, layout.rows, partial(new, codec, layout.rows), 0, 3, None, negative_zeros
        )
        for _ in "12"
    ]
    codec.write(NativeEngine.encode(engines(scheme, shapes)[2], signal, 0), runs[0])
    fast.encode_into(runs[1], signal, 0)
    (codes, magnitudes, indices), (own_codes, own_magnitudes, own_indices) = (
        run.parts for run in runs
    )
    assert torch.equal(indices, own_indices) and torch.equal(codes, own_codes)
    one, other = (
        octets[0].clone().view(torch.bfloat16).float() for octets in (magnitudes, own_magnitudes)
    )
    torch.testing.assert_close(
        one, other, rtol=2**-7, atol=0
    )  # the order of a sum is the sender's own
    sent = codec.received([runs[1].body[0]] * 3, layout.rows, None, AGGREGATIONS["mean"])
    found = [[torch.full(slot.shape, torch.nan) for slot in layout.slots] for _ in range(2)]
    for engine, targets in zip((plain, fast), found, strict=True):
        engine.write(sent, targets)
    assert all(map(torch.equal, *found))


def new(codec, rows):
    return torch.zeros(1, 3 + codec.nbytes(rows), dtype=torch.uint8)


each_engine = pytest.mark.parametrize("fast", [NativeEngine])


@pytest.mark.parametrize(
    ("fast", "chunk"),
    [(NativeEngine, chunk) for chunk in native.KERNEL_CHUNKS],
)
@pytest.mark.parametrize(
    ("precision", "error_feedback"), [("fp32", True), ("sign", False), ("2bit", True)]
)
@given(
    shapes=SHAPES,
    topk=st.sampled_from([1, 2, 3, 4, 8, 11, 13, 32, 50, 150]),
    alpha=st.sampled_from([1.0, 0.2]),
)
@laws
def test_a_step_is_the_one_of_plain_torch(
    fast, chunk, precision, error_feedback, shapes, topk, alpha
):
    """Which of two equal coefficients is told may differ; what is told and what is kept may not."""
    topk = min(topk, chunk)
    scheme = dt.demo(
        topk=topk,
        chunk=chunk,
        decay=0.9,
        alpha=alpha,
        precision=precision,
        error_feedback=error_feedback,
    )
    layout, reference, fast = engines(scheme, shapes, fast)
    given_signals = [
        None if i == 2 else s for i, s in enumerate(signals(layout, 1))
    ]  # one has no gradient
    coefficients = scheme.codec.basis.forward(reference.memory.absorb(given_signals))
    selected = fast.encode(given_signals, 0)
    indices = indices_of(selected)
    close(selected.values, coefficients.gather(1, indices))
    largest = coefficients.abs().topk(topk, dim=1).values
    close(selected.values.abs().sort(1, descending=True).values, largest)
    assert all(len(set(row)) == topk for row in indices.tolist())
    read = values_of(scheme.codec, scheme.codec.encode(selected), layout.rows)
    reference.release(selected, read)
    release(fast, selected, read)
    close(reference.memory.residual, fast.memory.residual)
    assert not fast.memory.residual.view(-1)[layout.padding(CPU)].any()


def close(mine, reference):
    torch.testing.assert_close(mine, reference, atol=5e-5, rtol=1e-4)


@each_engine
@given(shapes=SHAPES, steps=st.integers(1, 5), precision=st.sampled_from(["fp32", "2bit", "sign"]))
@laws
def test_law_1_nothing_is_lost(fast, shapes, steps, precision):
    scheme = dt.demo(topk=4, chunk=64, decay=1.0, precision=precision)
    layout, _, fast = engines(scheme, shapes, fast)
    put_in, sent = fast.memory.residual.clone(), layout.zeros(CPU)
    for step in range(steps):
        put_in += layout.flatten(signals(layout, step), CPU)
        selected = fast.encode(signals(layout, step), step)
        read = values_of(scheme.codec, scheme.codec.encode(selected), layout.rows)
        release(fast, selected, read)
        sent += fast.decode(received(scheme.codec, [selected]))
    for left, went, total in zip(
        *[layout.views(f) for f in (fast.memory.residual, sent, put_in)], strict=True
    ):
        torch.testing.assert_close(left + went, total, atol=5e-5, rtol=1e-5)


@each_engine
@pytest.mark.parametrize("aggregate", ["mean", "mean_nonzero", "majority_vote", "clipped_mean"])
@given(shapes=SHAPES, replicas=st.integers(1, 5))
@laws
def test_messages_are_combined_as_in_plain_torch(fast, aggregate, shapes, replicas):
    scheme = dt.demo(topk=3, chunk=32, aggregate=aggregate)
    layout, reference, fast = engines(scheme, shapes, fast)
    sent = [
        reference.codec.select(layout.flatten(signals(layout, r), CPU), 0, 0)
        for r in range(replicas)
    ]
    agreed = received(scheme.codec, sent, AGGREGATIONS[aggregate])
    for mine, plain in zip(
        *[layout.views(engine.decode(agreed)) for engine in (fast, reference)], strict=True
    ):
        torch.testing.assert_close(mine, plain, atol=2e-5, rtol=1e-5)
    assert torch.equal(fast.decode(agreed), fast.decode(agreed))
    targets = [torch.full(slot.shape, float("nan")) for slot in layout.slots]
    fast.write(agreed, targets)
    assert all(
        torch.equal(t, view)
        for t, view in zip(targets, layout.views(fast.decode(agreed)), strict=True)
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_sign_step_is_bitwise_that_of_torch(weight_decay):
    generator = torch.Generator().manual_seed(0)
    weights, directions = (torch.randn(100, 70, generator=generator) for _ in range(2))
    directions[::3] = 0
    fast = weights.clone().requires_grad_()
    fast.grad = directions.clone()
    dt.SignSGD([fast], lr=3e-3, weight_decay=weight_decay).step()
    parts = [
        p.detach().clone().requires_grad_() for p in weights.split(10)
    ]  # too small for the kernel
    for part, direction in zip(parts, directions.split(10), strict=True):
        part.grad = direction.clone()
    dt.SignSGD(parts, lr=3e-3, weight_decay=weight_decay).step()
    assert torch.equal(fast.detach(), torch.cat([part.detach() for part in parts]))


@each_engine
@pytest.mark.parametrize(("topk", "aggregate"), [(4, "mean"), (32, "mean"), (3, "mean_nonzero")])
@given(shapes=SHAPES, replicas=st.integers(1, 4))
@laws
def test_weights_that_follow_messages_end_where_the_update_takes_them(
    fast, topk, aggregate, shapes, replicas
):
    scheme = dt.demo(topk=topk, chunk=64, aggregate=aggregate)
    layout, _, fast = engines(scheme, shapes, fast)
    sent = [fast.encode(signals(layout, r), 0) for r in range(replicas)]
    agreed = received(scheme.codec, sent, AGGREGATIONS[aggregate])
    paces = [(1 - 0.01 * i, 1e-3 * i) for i, _ in enumerate(layout.slots)]
    weights, updates = signals(layout, 50), signals(layout, 51)
    fast.write(agreed, updates)
    expected = [
        shrink * w - lr * u.sign()
        for w, u, (shrink, lr) in zip(weights, updates, paces, strict=True)
    ]
    fast.sign_mover(agreed, weights)(paces)
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in TALKING if TALKING[name].signal == "gradients"])
def test_signs_move_weights_as_the_update_does_and_leave_the_messages(name):
    codec, aggregation = TALKING[name].codec, TALKING[name].aggregation
    layout = codec.layout({"a": (70, 65), "b": (130,), "c": ()})
    engine = ReferenceEngine(codec, layout, None, Runtime(CPU, kernels=False))
    selected = [engine.encode(signals(layout, r), 0) for r in range(2)]
    shared = selected[0].indices if codec.selection.shared else None
    for count in (1, 2):
        agreed = codec.received(
            [codec.encode(each) for each in selected[:count]], layout.rows, shared, aggregation
        )
        updates, again, weights = (signals(layout, 50) for _ in range(3))
        engine.write(agreed, updates)
        rates = [(1 - 0.01 * i, 1e-3 * i) for i, _ in enumerate(layout.slots)]
        expected = [
            shrink * w - lr * u.sign()
            for w, u, (shrink, lr) in zip(weights, updates, rates, strict=True)
        ]
        engine.sign_mover(agreed, weights)(rates)
        engine.write(agreed, again)
        assert all(map(torch.equal, [*weights, *again], [*expected, *updates]))


@pytest.mark.parametrize("topk", [4, 9])
def test_blocks_end_anywhere_in_a_parameter(topk, monkeypatch):
    scheme, shapes = dt.demo(topk=topk, chunk=64), [(257,), (40, 64), (), (0, 3), (1009,), (64, 64)]
    layout, _, whole = engines(scheme, shapes, ReferenceEngine)
    monkeypatch.setattr(reference, "CACHE_BLOCK", 16 * 64)
    _, _, cut = engines(scheme, shapes, ReferenceEngine)
    sent = []
    for engine in (whole, cut):
        selected = engine.encode(signals(layout, 1), 0)
        updates = [torch.full(slot.shape, float("nan")) for slot in layout.slots]
        agreed = received(scheme.codec, [selected] * 2)
        engine.write(agreed, updates)
        weights = [torch.ones(slot.shape) for slot in layout.slots]
        rates = [(0.5, 0.25 * i) for i, _ in enumerate(layout.slots)]
        engine.sign_mover(agreed, weights)(rates)
        assert all(
            torch.equal(w, 0.5 - 0.25 * i * u.sign())
            for i, (w, u) in enumerate(zip(weights, updates, strict=True))
        )
        sent.append((selected, updates, engine.memory.residual))
    (one, updates, residual), (other, their_updates, their_residual) = sent
    assert torch.equal(indices_of(one), indices_of(other))
    close(other.values, one.values)
    close(their_residual, residual)
    for mine, theirs in zip(updates, their_updates, strict=True):
        close(theirs, mine)


def test_sign_sgd_applies_an_update_that_it_took_once_and_steps_on_the_rest():
    first, second = (torch.zeros(3, requires_grad=True) for _ in range(2))
    optimizer = dt.SignSGD(
        [{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": [second], "lr": 0.25}]
    )
    first.grad = second.grad = torch.ones(3)
    seen = []
    optimizer.deferred[0] = Deferred([first], seen.append, None)
    optimizer.step()
    assert (
        seen == [[(0.95, 0.5)]] and first.tolist() == [0, 0, 0] and second.tolist() == [-0.25] * 3
    )
    optimizer.step()
    assert len(seen) == 1 and first.tolist() == [-0.5] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_a_single_bad_number_is_found(bad, place):
    library = native.load_library()
    tensors = [torch.full((5000,), 3e38), torch.zeros(0), torch.randn(10_000)]
    assert library.beyond(tensors, 3e38) == -1
    tensors[2][place] = bad
    assert library.beyond(tensors, 3e38) == 2


def test_a_bitmap_gets_its_columns_in_order():
    layout, _, fast = engines(dt.demo(topk=9, chunk=16), [(40, 40)])
    indices = indices_of(fast.encode(signals(layout, 0), 0))
    assert torch.equal(indices, indices.sort(1).values)


def test_without_a_compiler_ordinary_torch_does_it(monkeypatch):
    native.load_library.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    scheme = dt.demo()
    layout = Layout.of({"w": (9, 9)}, 64)
    assert (
        type(engine_for(scheme.codec, layout, Memory(layout, scheme.feedback, CPU), Runtime(CPU)))
        is ReferenceEngine
    )
    native.load_library.cache_clear()


@pytest.mark.parametrize("chunk", native.KERNEL_CHUNKS)
@pytest.mark.parametrize("rows", [0, 1, 7, 130])
def test_the_compiled_product_in_order_has_the_bits_of_the_plain_one(chunk, rows, monkeypatch):
    generator = torch.Generator().manual_seed(chunk + rows)
    weights, vectors = (torch.randn(n, chunk, generator=generator) for n in (rows, chunk))
    compiled = product_in_order(weights, vectors)
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert native.load_library() is not None and torch.equal(
        compiled, product_in_order(weights, vectors)
    )


@pytest.mark.parametrize(
    ("topk", "chunk"),
    [(1, 16), (3, 16), (16, 16), (4, 64), (12, 64), (13, 64), (9, 128), (200, 256)],
)
@pytest.mark.parametrize("rows", [1, 17, 100])
def test_kernels_and_plain_torch_choose_the_same_coefficients(topk, chunk, rows, monkeypatch):
    """Of equal magnitudes, too, and beside infinity and NaN."""
    selection, numbers = (
        TopK(topk, chunk),
        torch.randn(rows, chunk, generator=torch.Generator().manual_seed(topk)),
    )
    numbers[:, ::3] = numbers[:, ::3].round()
    numbers[-1, ::2] = 0.0
    numbers[0, 3], numbers[0, 5] = torch.nan, -torch.inf
    found = selection.indices(numbers, 0, 0)
    assert torch.equal(found, selection.indices(numbers.t().contiguous().t(), 0, 0))
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert torch.equal(found, selection.indices(numbers, 0, 0))
    keys = (numbers.view(torch.int32) & (0x7FFFFFFF & -chunk)) + torch.arange(
        chunk - 1, -1, -1, dtype=torch.int32
    )
    assert torch.equal(found, keys.argsort(1, descending=True)[:, :topk].sort(1).values)


def test_two_threads_of_plain_torch_select_at_once(monkeypatch):
    """A sorting network keeps its numbers, so no two threads may share one."""
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    selection = TopK(20, 64)
    generator = torch.Generator().manual_seed(0)
    signals_of_threads = [torch.randn(5000, 64, generator=generator) for _ in range(4)]
    alone = [selection.indices(numbers, 0, 0) for numbers in signals_of_threads]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            select = partial(selection.indices, step=0, seed=0)
            together = list(threads.map(select, signals_of_threads))
            assert all(map(torch.equal, alone, together))
