"""A regression test for each defect of the published code that changed conclusions or crashed, under its own name.

Where a law or a world test holds it already, the name here points to it by doing the smallest case.
"""

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation.core.flat.layout import Layout
from detonation.core.flat.tensors import local
from detonation.core.integrity.message import HEADER_BYTES
from detonation.core.memory import Feedback, Memory
from detonation.core.schemes import traffic
from zoo import GRADIENT, batch, decode, encode

pytestmark = pytest.mark.usefixtures("lasting_worlds")

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [96, 100, 4096, 6144])
@pytest.mark.parametrize("rate", [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 0.1])
def test_striding_reaches_every_coordinate(rate, size):
    """Published: the same rows for ever at power-of-two rates; 4 of 48 row groups at size 96."""
    scheme = dt.schemes.striding(rate=rate)
    layout = scheme.codec.layout({"w": (size,)})
    flat, sent = layout.flatten([torch.ones(size)], CPU), layout.zeros(CPU)
    for step in range(round(1 / rate)):
        sent += decode(scheme.codec, [encode(scheme, flat, step, 0)], layout.rows, step, 0, "mean")
    assert (layout.views(sent)[0] == 1).all()


def test_the_rotation_advances_by_step_not_by_tensor():
    """Published: the counter moved once a tensor, so what was sent depended on how many tensors a model has."""
    scheme = dt.schemes.striding(rate=1 / 4)
    one = scheme.codec.layout({"w": (64,)})
    many = scheme.codec.layout({f"p{i}": (64,) for i in range(7)})
    for step in range(5):
        indices = [
            scheme.codec.selection.indices(layout.zeros(CPU), step, 0) for layout in (one, many)
        ]
        assert torch.equal(indices[0].expand(7, -1), indices[1])


def local_steps(mesh, every):
    model = nn.Linear(16, 4)
    dt.same_weights(model, mesh["replicate"])
    base = dt.SignSGD(model.parameters(), lr=3e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.diloco(every=every))
    for step in range(2 * every):
        model(batch(mesh.get_rank(), step, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dt.fingerprint(model, mesh)[1]


def test_diloco_averages_parameters():
    """Published: replicate_every=n averaged only the n-th gradient; replicas drifted to an L2 distance of 13.7."""
    assert all(worlds.run(local_steps, 2, 1, 16))


@pytest.mark.parametrize("scheme", GRADIENT.values(), ids=GRADIENT)
def test_lr_is_applied_once(scheme):
    """Published: the momentum accumulates lr * g and SGD multiplies by lr again. Here no scheme knows lr at all."""
    assert not any("lr" in name for name in scheme.arguments)


def test_a_coefficient_that_one_of_four_sends_weighs_a_quarter():
    """Published: mean over the senders of a coefficient; here that is a choice."""
    codec = dt.demo(topk=1, chunk=4).codec
    identity = type(codec)(dt.full().codec.basis, codec.selection, codec.precision)
    flats = [torch.eye(4)[i : i + 1] * 8 for i in range(4)]
    messages = [identity.encode(identity.select(flat, 0, 0)) for flat in flats]
    assert decode(identity, messages, 1, 0, 0, "mean").tolist() == [[2, 2, 2, 2]]
    assert decode(identity, messages, 1, 0, 0, "mean_nonzero").tolist() == [[8, 8, 8, 8]]


def decayed(mesh):
    model = nn.Linear(8, 8, bias=False)
    dt.same_weights(model, mesh["replicate"])
    before = model.weight.detach().clone()
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters(), 0.1, weight_decay=0.5), model, mesh["replicate"], dt.demo()
    )
    optimizer.step()  # no gradient at all: published, an AttributeError, as for any weight decay but 0
    assert torch.equal(model.weight, before)
    model.weight.grad = torch.zeros_like(model.weight) if mesh.get_rank() else None
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.5))
    return True


def test_weight_decay_works_and_a_gradient_that_one_replica_lacks_is_zero():
    assert all(worlds.run(decayed, 2, 1))


@pytest.mark.parametrize("size", [1, 3, 1009, 7919, 3027, 50257])
def test_awkward_lengths_keep_their_compression(size):
    """Published: the chunk shrank to a divisor of the length, to 1 for primes, and it sent more than dense."""
    scheme = dt.demo(topk=4, chunk=64)
    layout = Layout.of({"w": (size,)}, 64)
    assert layout.chunk == 64 and layout.rows == -(-size // 64)
    assert scheme.codec.nbytes(layout.rows) <= 20 * (size / 64 + 1)


@pytest.mark.parametrize("shape", [(), (0,), (0, 63), (1,), (4, 3, 3), (8, 4, 3, 3)])
@pytest.mark.parametrize("make", [dt.demo, dt.schemes.random, dt.schemes.striding])
def test_scalars_empty_shards_and_kernels_are_parameters_too(make, shape):
    """Published: IndexError for a scalar, RuntimeError for an empty shard, EinopsError for a kernel."""
    scheme = make()
    layout = scheme.codec.layout({"p": shape})
    memory = Memory(layout, Feedback(0.999), CPU)
    flat = memory.absorb([torch.ones(shape)])
    memory.release([decode(scheme.codec, [encode(scheme, flat, 0, 0)], layout.rows, 0, 0, "mean")])
    assert layout.parts(memory.residual)[0].isfinite().all()


def test_a_step_is_a_pure_function_of_seed_and_step():
    """Published: a hidden counter and a generator, both missing from state_dict. Here there is nothing to save."""
    for scheme in (dt.schemes.random(), dt.schemes.striding()):
        flat = torch.randn(
            20, scheme.codec.selection.chunk, generator=torch.Generator().manual_seed(0)
        )
        straight = [encode(scheme, flat, step, 3) for step in range(40)]
        assert torch.equal(encode(scheme, flat, 37, 3), straight[37])


def test_the_meter_counts_what_goes_to_every_peer():
    """Published: its own payload once, whatever the number of peers and the collective."""
    layout = Layout.of({"w": (640, 64)}, 64)
    message = 640 * 4 * (32 + 6) // 8 + HEADER_BYTES
    gathered = [
        traffic.bytes_sent(dt.demo(link="all-gather"), layout, replicas, 0)
        for replicas in (1, 2, 8)
    ]
    assert gathered == [0, message, 7 * message]
    dense = 4 * layout.numel
    assert [traffic.dense_bytes(layout.numel, replicas) for replicas in (1, 2, 8)] == [
        0,
        dense,
        dense * 14 // 8,
    ]


def test_fp32_memory_decays_where_bf16_would_not():
    """bf16 * 0.999 changes nothing: after 1,000 steps a bf16 momentum is still 1."""
    memory = Memory(Layout.of({"w": (64,)}, 64), Feedback(0.999), CPU)
    memory.absorb([torch.ones(64, dtype=torch.bfloat16)])
    for _ in range(1000):
        memory.absorb([None])
    assert memory.residual.dtype == torch.float32
    torch.testing.assert_close(memory.residual, torch.full((1, 64), 0.999**1000), rtol=1e-3, atol=0)


def chained(mesh):
    """Published: in a list of replicators each overwrites what the one before it agreed on."""
    model = nn.Linear(8, 8, bias=False)
    for axis in (mesh["shard"], mesh["replicate"]):
        dt.same_weights(model, axis)
    before = local(model.weight).detach().clone()
    levels = [(mesh["replicate"], dt.full()), (mesh["shard"], dt.schemes.random(rate=1, decay=0))]
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=1.0), model, levels=levels)
    model.weight.grad = torch.full((8, 8), float(2 ** mesh.get_rank()))
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - (1 + 2 + 4 + 8) / 4)
    return True


def test_levels_chain():
    assert all(worlds.run(chained, 2, 2))
