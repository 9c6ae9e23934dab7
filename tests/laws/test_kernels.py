"""The fast engines, compiled and in blocks, against plain torch, under the same laws.

The compiled ones need g++, as the project's tests do.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import detonation as dt
from detonation.core.codec.aggregate import Agreed
from detonation.core.codec.indices import numbers
from detonation.core.engine import reference
from detonation.core.engine.blocked import Blocked
from detonation.core.engine.native import Native, engine_for
from detonation.core.engine.reference import Plain
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory
from detonation.kernels import native

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.one_of(
        st.sampled_from([(), (0,), (0, 63), (255,), (256,), (257,), (1009,), (3, 3, 2, 5), (64, 64)]),
        st.tuples(st.integers(0, 40), st.integers(1, 40)),
    ),
    max_size=6,
)
laws = settings(max_examples=15, deadline=None)


def engines(scheme, shapes, fast=Native):
    """A plain and a `fast` engine on equal, non-zero memories."""
    layout = scheme.codec.layout({f"p{i}": shape for i, shape in enumerate(shapes)})
    memories = [Memory(layout, scheme.feedback, CPU) for _ in range(2)]
    for memory in memories:
        memory.absorb(signals(layout, 99))
    made = engine_for(scheme.codec, layout, memories[1], CPU, 0, kernels=fast is Native)
    assert type(made) is fast
    return layout, Plain(scheme.codec, layout, memories[0], CPU, 0), made


def signals(layout, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator) for slot in layout.slots]


each_engine = pytest.mark.parametrize("fast", [Native, Blocked])


@pytest.mark.parametrize(
    ("fast", "chunk"), [*((Native, c) for c in native.CHUNKS), (Blocked, 2), (Blocked, 64), (Blocked, 256)]
)
@pytest.mark.parametrize(("precision", "error"), [("fp32", "keep"), ("sign", "drop"), ("2bit", "keep")])
@given(shapes=SHAPES, topk=st.sampled_from([1, 2, 3, 4, 8, 11, 13, 32, 50, 150]), alpha=st.sampled_from([1.0, 0.2]))
@laws
def test_a_step_is_the_one_of_plain_torch(fast, chunk, precision, error, shapes, topk, alpha):
    """Which of two equal coefficients is told may differ; what is told and what is kept may not."""
    topk = min(topk, chunk)
    scheme = dt.demo(topk=topk, chunk=chunk, decay=0.9, alpha=alpha, precision=precision, error=error)
    layout, reference, fast = engines(scheme, shapes, fast)
    given_signals = [None if i == 2 else s for i, s in enumerate(signals(layout, 1))]  # one has no gradient
    coefficients = scheme.codec.basis.forward(reference.memory.absorb(given_signals))
    selected = fast.select(given_signals, 0)
    columns = numbers(selected.columns)
    close(selected.values, coefficients.gather(1, columns))
    largest = coefficients.abs().topk(topk, dim=1).values
    close(selected.values.abs().sort(1, descending=True).values, largest)
    assert all(len(set(row)) == topk for row in columns.tolist())
    read = scheme.codec.read(scheme.codec.encode(selected), layout.rows)
    reference.release(selected, read)
    fast.release(selected, read)
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
    put_in, told = fast.memory.residual.clone(), layout.zeros(CPU)
    for step in range(steps):
        put_in += layout.flatten(signals(layout, step), CPU)
        selected = fast.select(signals(layout, step), step)
        read = scheme.codec.read(scheme.codec.encode(selected), layout.rows)
        fast.release(selected, read)
        told += fast.update(Agreed.one(read, selected.columns))
    for kept, sent, total in zip(*[layout.views(f) for f in (fast.memory.residual, told, put_in)], strict=True):
        torch.testing.assert_close(kept + sent, total, atol=5e-5, rtol=1e-5)


@each_engine
@pytest.mark.parametrize("combine", ["replicas", "senders", "majority", "clipped"])
@given(shapes=SHAPES, replicas=st.integers(1, 5))
@laws
def test_messages_are_combined_as_in_plain_torch(fast, combine, shapes, replicas):
    scheme = dt.demo(topk=3, chunk=32, combine=combine)
    layout, reference, fast = engines(scheme, shapes, fast)
    told = [reference.codec.select(layout.flatten(signals(layout, r), CPU), 0, 0) for r in range(replicas)]
    agreed = Agreed([t.values for t in told], [t.columns for t in told], combine)
    for mine, plain in zip(*[layout.views(engine.update(agreed)) for engine in (fast, reference)], strict=True):
        torch.testing.assert_close(mine, plain, atol=2e-5, rtol=1e-5)
    assert torch.equal(fast.update(agreed), fast.update(agreed))
    targets = [torch.full(slot.shape, float("nan")) for slot in layout.slots]
    fast.write(agreed, targets)
    assert all(torch.equal(t, view) for t, view in zip(targets, layout.views(fast.update(agreed)), strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_sign_step_is_bitwise_that_of_torch(weight_decay):
    generator = torch.Generator().manual_seed(0)
    weights, directions = (torch.randn(100, 70, generator=generator) for _ in range(2))
    directions[::3] = 0
    fast = weights.clone().requires_grad_()
    fast.grad = directions.clone()
    dt.SignSGD([fast], lr=3e-3, weight_decay=weight_decay).step()
    parts = [p.detach().clone().requires_grad_() for p in weights.split(10)]  # too small for the kernel
    for part, direction in zip(parts, directions.split(10), strict=True):
        part.grad = direction.clone()
    dt.SignSGD(parts, lr=3e-3, weight_decay=weight_decay).step()
    assert torch.equal(fast.detach(), torch.cat([part.detach() for part in parts]))


@each_engine
@pytest.mark.parametrize(("topk", "combine"), [(4, "replicas"), (32, "replicas"), (3, "senders")])
@given(shapes=SHAPES, replicas=st.integers(1, 4))
@laws
def test_weights_that_follow_messages_end_where_the_update_takes_them(fast, topk, combine, shapes, replicas):
    scheme = dt.demo(topk=topk, chunk=64, combine=combine)
    layout, _, fast = engines(scheme, shapes, fast)
    told = [fast.select(signals(layout, r), 0) for r in range(replicas)]
    agreed = Agreed([t.values for t in told], [t.columns for t in told], combine)
    paces = [(1 - 0.01 * i, 1e-3 * i) for i, _ in enumerate(layout.slots)]
    weights, updates = signals(layout, 50), signals(layout, 51)
    fast.write(agreed, updates)
    expected = [shrink * w - lr * u.sign() for w, u, (shrink, lr) in zip(weights, updates, paces, strict=True)]
    assert fast.can_follow(agreed, weights)
    fast.follow(agreed, weights, paces)
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))


@pytest.mark.parametrize("topk", [4, 9])
def test_blocks_end_anywhere_in_a_parameter(topk, monkeypatch):
    scheme, shapes = dt.demo(topk=topk, chunk=64), [(257,), (40, 64), (), (0, 3), (1009,), (64, 64)]
    layout, _, whole = engines(scheme, shapes, Blocked)
    monkeypatch.setattr(reference, "BLOCK", 16 * 64)
    _, _, cut = engines(scheme, shapes, Blocked)
    told = []
    for engine in (whole, cut):
        selected = engine.select(signals(layout, 1), 0)
        updates = [torch.full(slot.shape, float("nan")) for slot in layout.slots]
        agreed = Agreed([selected.values] * 2, [selected.columns] * 2, "replicas")
        engine.write(agreed, updates)
        weights = [torch.ones(slot.shape) for slot in layout.slots]
        engine.follow(agreed, weights, [(0.5, 0.25 * i) for i, _ in enumerate(layout.slots)])
        assert all(
            torch.equal(w, 0.5 - 0.25 * i * u.sign()) for i, (w, u) in enumerate(zip(weights, updates, strict=True))
        )
        told.append((selected, updates, engine.memory.residual))
    (one, updates, residual), (other, their_updates, their_residual) = told
    assert torch.equal(numbers(one.columns), numbers(other.columns))
    close(other.values, one.values)
    close(their_residual, residual)
    for mine, theirs in zip(updates, their_updates, strict=True):
        close(theirs, mine)


def test_sign_sgd_does_what_was_deferred_once_and_steps_on_the_rest():
    first, second = (torch.zeros(3, requires_grad=True) for _ in range(2))
    optimizer = dt.SignSGD([{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": [second], "lr": 0.25}])
    first.grad = second.grad = torch.ones(3)
    seen = []
    optimizer.defer([first], seen.append)
    optimizer.step()
    assert seen == [[(0.95, 0.5)]] and first.tolist() == [0, 0, 0] and second.tolist() == [-0.25] * 3
    optimizer.step()
    assert len(seen) == 1 and first.tolist() == [-0.5] * 3
    assert optimizer.plain
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not optimizer.plain


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_a_single_bad_number_is_found(bad, place):
    library = native.load()
    tensors = [torch.full((5000,), 3e38), torch.zeros(0), torch.randn(10_000)]
    assert library.beyond(tensors, 3e38) == -1
    tensors[2][place] = bad
    assert library.beyond(tensors, 3e38) == 2


def test_a_bitmap_gets_its_columns_in_order():
    layout, _, fast = engines(dt.demo(topk=9, chunk=16), [(40, 40)])
    columns = numbers(fast.select(signals(layout, 0), 0).columns)
    assert torch.equal(columns, columns.sort(1).values)


def test_without_a_compiler_ordinary_torch_does_it(monkeypatch):
    native.load.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    scheme = dt.demo()
    layout = Layout.of({"w": (9, 9)}, 64)
    assert type(engine_for(scheme.codec, layout, Memory(layout, scheme.feedback, CPU), CPU, 0, True)) is Blocked
    native.load.cache_clear()
