"""Zero is zero: a coordinate without a signal does not move, whatever stands beside it in a message."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import detonation as dt
from covering import covered
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.codec.aggregate import MajorityVote, aggregate
from detonation.core.codec.precision import PRECISIONS
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.exchange.exchange import zeros_are_negative
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from zoo import TALKING, Padded, batch, built, values_of

CPU = torch.device("cpu")
SENDINGS = 60
ROWS, WIDTH = 16, 64  # every second row has no signal
EXACT = {"fp32", "bf16", "int8", "4bit"}  # precisions with a code for zero


@pytest.mark.parametrize("replicas", range(1, 9))
def test_law_11_signs_of_zeros_cancel_over_replicas_and_over_two_sendings(replicas):
    """Of an even number of replicas at once; or so that one sign has the majority, and takes turns."""
    pairs = []
    for sending in range(0, SENDINGS, 2):
        for options in ({}, {"cancel": False}):
            one, other = (
                [
                    1 - 2 * zeros_are_negative(at, each, replicas, **options)
                    for each in range(replicas)
                ]
                for at in (sending, sending + 1)
            )
            assert one == [-sign for sign in other]
            if replicas % 2:
                assert abs(sum(one)) == 1
            else:
                assert abs(sum(one)) == 2 * len(options)
        assert one[0] == 1 - 2 * zeros_are_negative(sending)
        pairs.append(one[0])
    assert abs(sum(pairs)) <= 2  # neither order within a pair is the usual one


def gradient_schemes(precision, error_feedback):
    common = {
        "precision": precision,
        "error_feedback": error_feedback,
        "decay": 0.9,
        "link": "all-gather",
    }
    return {
        "demo": dt.demo(topk=4, chunk=64, **common),
        "random": dt.schemes.random(rate=1 / 2, **common),
        "vote": dt.schemes.striding(rate=1 / 2, aggregate="majority_vote", **common),
        "senders": dt.schemes.striding(rate=1 / 2, aggregate="mean_nonzero", **common),
    }


def parameter_schemes(precision, error_feedback):
    made = {"sparseloco": dt.schemes.sparseloco(every=2, topk=8, chunk=64, precision=precision)}
    if error_feedback:
        return made | {"muloco": dt.muloco(every=4, precision=precision)}
    return {"diloco": dt.diloco(every=2, precision=precision)}


def play(scheme, replicas, sendings):
    """The updates of some sendings of each coordinate: of rows that have no signal, and of rows that have one.

    The signal is noise around a constant of either sign; the arithmetic is the channel's, without a network.
    """
    codec = scheme.codec
    layout = codec.layout({"w": (ROWS, WIDTH)})
    memories = [
        Memory(layout, scheme.feedback, CPU) if scheme.feedback else None for _ in range(replicas)
    ]
    engines = [ReferenceEngine(codec, layout, memory, Runtime(CPU)) for memory in memories]
    generator, updates = torch.Generator().manual_seed(0), []
    constant = torch.randint(2, (ROWS, WIDTH), generator=generator) - 0.5
    steps = range(sendings * scheme.round.every * max(1, codec.selection.period))
    for step in filter(scheme.round.sends, steps):
        messages, shared = [], None
        for replica, engine in enumerate(engines):
            signal = constant + torch.randn(ROWS, WIDTH, generator=generator)
            signal[1::2] = 0.0 if step % 3 else -0.0
            selected = engine.encode([signal], step)
            sending = step // (scheme.round.every * max(1, codec.selection.period))
            cancel = scheme.signal == "parameters" or isinstance(scheme.aggregation, MajorityVote)
            negative = zeros_are_negative(sending, replica, replicas, cancel)
            message = codec.encode(selected, negative_zeros=negative)
            if not engine.releases_at_once:
                engine.release(selected, values_of(codec, message, layout.rows))
            messages.append(message)
            shared = selected.indices if codec.selection.shared else None
        received = codec.received(messages, layout.rows, shared, scheme.aggregation)
        updates.append(
            layout.parts(
                codec.basis.inverse(
                    aggregate(received.whole(), scheme.aggregation, codec.selection.chunk)
                )
            )[0]
        )
    moved = torch.stack(updates)
    return moved[:, 1::2], moved[:, ::2], constant[::2]


def reach(updates):
    """The farthest that a coordinate ever was from its place."""
    return float(updates.cumsum(0).abs().max())


@pytest.mark.long_cases("2bit-False-3", "sign-False-4")
@covered("precision, error_feedback, replicas", PRECISIONS, [True, False], [2, 3, 4])
def test_law_11_a_coordinate_without_a_signal_stays_and_one_with_a_signal_moves(
    precision, error_feedback, replicas
):
    schemes = gradient_schemes(precision, error_feedback)
    for name, scheme in (schemes | parameter_schemes(precision, error_feedback)).items():
        if precision in EXACT:
            assert not play(scheme, replicas, 10)[0].any(), name
            continue
        silent, heard, constant = play(scheme, replicas, SENDINGS)
        # of SGD: an update of one sign would come to `SENDINGS` times its size
        assert reach(silent) <= math.sqrt(SENDINGS) * float(heard.abs().max()), name
        if name in schemes and name != "demo":  # of SignSGD, in lr
            ties = name == "vote" and replicas % 2 == 0 and not error_feedback
            assert reach(silent.sign()) <= (
                0 if ties else 4 * math.sqrt(SENDINGS) if error_feedback else 1
            ), name
        if name not in {"demo", "sparseloco"}:  # which say little of a row at once
            assert torch.equal(heard.sum(0).sign(), constant.sign()), name


@pytest.mark.parametrize("name, precision", PRECISIONS.items(), ids=PRECISIONS)
@given(
    count=st.integers(1, 700),
    seed=st.integers(0, 99),
    skew=st.sampled_from([0.0, 1.0]),
    negative=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_law_11_every_precision_is_odd(name, precision, count, seed, skew, negative):
    """What it makes of negated values is the negated result, so that noise around zero does not drift."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(count, 3, generator=generator) + skew) * torch.randint(
        2, (count, 1), generator=generator
    )
    values[:, 1] *= torch.tensor([1e-30, 1e-9, 1.0, -1.0])[
        torch.randint(4, (count,), generator=generator)
    ]
    read, mirrored = (
        precision.decode(precision.encode(sign * values, flag), count, 3)
        for sign, flag in ((1, negative), (-1, not negative))
    )
    assert torch.equal(read, -mirrored)
    if name in EXACT:
        assert not read[values == 0].any()


def test_zeros_balance_in_whatever_rhythm_a_coordinate_is_zero():
    for every in range(1, 17):
        for first in range(every):
            signs = torch.tensor(
                [1 - 2 * zeros_are_negative(first + every * i) for i in range(400)]
            )
            assert reach(signs) <= (1 if every == 1 else 40)
    for replicas in (2, 3, 4, 7, 8):
        for cancel in (True, False):
            votes = sum(
                1 - 2 * zeros_are_negative(0, replica, replicas, cancel)
                for replica in range(replicas)
            )
            assert votes == (replicas % 2 if cancel else 2 - replicas % 2)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_row_that_was_seen_once_comes_to_rest(kernels):
    """Rounding errors of the basis and denormal numbers stay in its memory for ever."""

    def act(communicator):
        model = nn.Embedding(16, 64)
        nn.init.zeros_(model.weight)
        scheme = dt.demo(topk=16, chunk=64, precision="sign", decay=0.7, error_feedback=False)
        optimizer = dt.replicate(
            dt.SignSGD(model.parameters(), lr=1.0), model, communicator, scheme, kernels=kernels
        )
        generator, positions = torch.Generator().manual_seed(communicator.replica), []
        for step in range(100):
            model.weight.grad = torch.randn(16, 64, generator=generator)
            if step:
                model.weight.grad[1::2] = 0.0
            optimizer.step()
            positions.append(model.weight.detach()[1::2].clone())
        residual = next(t for name, t in optimizer.local_state().items() if "residual" in name)[
            1::2
        ]
        return torch.stack(positions), float(residual.abs().max())

    positions, residual = simulate_replicas(act, 2)[0]
    assert positions[20].any() and residual > 0
    assert float((positions[50:] - positions[50]).abs().max()) <= 2


OPTIMIZERS = {
    "SignSGD": lambda parameters: dt.SignSGD(parameters, lr=1.0),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.0),
}


@pytest.mark.long_cases("3-SignSGD", "3-AdamW")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_law_11_rows_that_no_replica_uses_stay_where_they_are(optimizer, replicas):
    """The whole way, from the gradient to the weight, where drift was seen: 40 times lr in 40 steps."""
    schemes = [
        dt.demo(topk=1, precision="sign", error_feedback=False, decay=0.95),
        dt.random_sign(rate=1 / 2, cycle=True),
        dt.random_sign(rate=1 / 2, cycle=True, link="owner"),
        dt.full("sign"),
        dt.full("4bit"),
        dt.diloco(every=2, precision="4bit"),
    ]
    if replicas == 2:
        schemes.append(
            dt.random_sign(rate=1 / 2)
        )  # an odd number of votes without a cycle walks at random: see below

    def act(communicator):
        found = []
        for scheme in schemes:
            model = nn.Embedding(16, 64)
            nn.init.zeros_(model.weight)
            wrapped = dt.replicate(
                OPTIMIZERS[optimizer](model.parameters()), model, communicator, scheme
            )
            generator = torch.Generator().manual_seed(communicator.replica)
            for _ in range(40):
                model.weight.grad = torch.randn(16, 64, generator=generator)
                model.weight.grad[1::2] = 0.0
                wrapped.step()
            found.append(float(model.weight.detach()[1::2].abs().max()))
        return found

    assert max(simulate_replicas(act, replicas)[0]) <= 6


@pytest.mark.long_cases("3")
@pytest.mark.parametrize("replicas", [2, 3])
def test_law_11_without_a_cycle_a_coordinate_without_a_signal_walks_at_random(replicas):
    """Nobody counts how often it was sent: signs of zeros differ, but do not alternate. Even votes still cancel."""
    silent, heard, constant = play(
        dt.random_sign(rate=1 / 8, link="all-gather"), replicas, 8 * SENDINGS
    )
    farthest = reach(silent.sign())
    assert farthest == 0 if replicas == 2 else 1 < farthest <= 5 * math.sqrt(SENDINGS)
    assert torch.equal(heard.sum(0).sign(), constant.sign())


def test_a_signal_that_is_not_finite_leaves_every_bit_of_the_memory():
    layout = dt.demo().codec.layout({"a": (70,), "b": (64,)})
    memory = Memory(layout, dt.demo().feedback, CPU)
    memory.residual.copy_(torch.randn(memory.residual.shape)).view(-1)[::2] = -0.0
    before = memory.residual.clone()
    for dtype in (torch.float32, torch.bfloat16):
        signals = [torch.full((70,), math.nan, dtype=dtype), None]
        kept = memory.absorb(signals, torch.tensor(True)).view(torch.int32)
        assert torch.equal(kept, before.view(torch.int32)), dtype


def padding_after(scheme, replicas, tied=False):
    """The padding row of each replica's embedding after nine steps, and how far the row beside it has come."""

    def act(communicator):
        model = built(Padded)
        if tied:
            model.output = nn.Linear(32, 33, bias=False)
            model.output.weight = model.words.weight
        base = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        optimizer = dt.replicate(base, model, communicator, scheme)
        for step in range(9):
            loss = model(batch(communicator.replica, step, 32)).mean()
            (loss + model.output.weight.sum() if tied else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return model.words.weight.detach()

    start = built(Padded).words.weight.detach()
    found = simulate_replicas(act, replicas)
    return [
        (weight[Padded.padding], weight[Padded.padding - 1] - start[Padded.padding - 1])
        for weight in found
    ]


@covered("name, replicas", [*TALKING, "diloco-owner"], [2, 3])
def test_the_padding_row_of_an_embedding_stays_exactly_where_it_is(name, replicas):
    """Though chunks cross rows, and one bit has no zero."""
    more = {"diloco-owner": dt.muloco(every=2, link="owner")}
    for padding, beside in padding_after((TALKING | more)[name], replicas):
        assert torch.equal(padding, torch.arange(32) / 10) and beside.any()


def test_a_padding_row_that_an_output_layer_uses_too_moves_as_its_gradient_says():
    assert all(
        (padding - torch.arange(32) / 10).any()
        for padding, _ in padding_after(dt.demo(), 2, tied=True)
    )
