"""The laws of a shard wire without a process group: its codec, and its collectives between simulated nodes."""

import pytest
import torch

from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.written import WrittenWeights
from detonation.core.link.link import Link
from detonation.wire.collectives import (
    WEIGHT_MOVES,
    BlockIntegers,
    DifferenceGather,
    ErrorFeedbackReduce,
)
from quantized import quantized_bytes

CODECS = {
    "4bit": (BlockIntegers(4), 0.14),
    "8bit": (BlockIntegers(8), 0.008),
}
"""Each codec, and the largest relative error (L2) that it may make on a Gaussian."""

codecs = pytest.mark.parametrize("name", CODECS)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@codecs
@pytest.mark.parametrize("count", [1, 127, 128, 1000])
def test_a_message_is_as_large_as_it_says_and_about_right(name, count):
    codec, error = CODECS[name]
    sent = values(3, count)
    encoded = codec.encode(sent)
    assert encoded.dtype == torch.uint8 and encoded.shape == (
        3,
        quantized_bytes(count, codec.width),
    )
    read = codec.decode(encoded, count)
    assert read.shape == sent.shape
    assert (read - sent).norm() <= error * sent.norm()
    alone = [codec.decode(codec.encode(line), count) for line in sent]
    assert torch.equal(read, torch.stack(alone))


@codecs
def test_a_codec_is_odd_and_zero_is_zero(name):
    codec, _ = CODECS[name]
    sent = values(2, 300)
    assert torch.equal(
        codec.decode(codec.encode(-sent), 300), -codec.decode(codec.encode(sent), 300)
    )
    assert not codec.decode(codec.encode(torch.zeros(2, 300)), 300).any()


@codecs
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_arrives_as_one(name, odd):
    codec, _ = CODECS[name]
    sent = values(300)
    sent[7] = odd
    read = codec.decode(codec.encode(sent), 300)
    assert not read[7].isfinite() and read[128:].isfinite().all()


@pytest.mark.parametrize("name", ["4bit", "8bit"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_law_1_differences_of_weights_are_never_lost(name, nodes):
    """The error of a reference is that of the last difference alone, and it vanishes where the weights rest."""
    codec, _ = CODECS[name]
    count = 200

    def act(communicator):
        gather = DifferenceGather(
            Link(communicator), None, codec, 0, lambda: True, WrittenWeights()
        )
        mine, outputs, errors = values(count, seed=communicator.replica), [], []
        moved = torch.zeros(count)
        for step in range(40):
            output = torch.empty(nodes * count)
            gather(output, mine + moved, None)
            outputs.append(output)
            errors.append(
                (output.view(nodes, count)[communicator.replica] - mine - moved).abs().max()
            )
            moved += 0.01 * values(count, seed=step) * (step < 20)
            communicator.all_reduce(
                torch.zeros(1)
            )()  # nobody counts a step before all have gathered
            WEIGHT_MOVES()
        return outputs, errors

    results = simulate_replicas(act, nodes)
    for outputs, errors in results:
        assert all(torch.equal(a, b) for a, b in zip(outputs, results[0][0], strict=True))
        # a difference is at most the largest move of a step and the error before it, of which a bin is 1 / largest
        assert errors[0] == 0 and max(errors[:21]) <= 0.05 / codec.largest
        assert errors[-1] <= 1e-6


@codecs
@pytest.mark.parametrize("nodes", [2, 3])
def test_law_1_gradients_are_never_lost(name, nodes):
    """All that was received, and the residuals, add up to all that there was."""
    codec, _ = CODECS[name]
    count, steps = 150, 12

    def act(communicator):
        reduce = ErrorFeedbackReduce(Link(communicator), None, codec, lambda: {"weight": count})
        received = torch.zeros(count)
        for step in range(steps):
            output = torch.empty(count)
            reduce(output, values(nodes * count, seed=100 * step + communicator.replica), None, SUM)
            received += output
        return received, reduce.residual

    results = simulate_replicas(act, nodes)
    there = sum(
        values(nodes * count, seed=100 * s + n) for s in range(steps) for n in range(nodes)
    ).view(nodes, count)
    for owner in range(nodes):
        unsent = sum(results[n][1][owner - (owner > n)] for n in range(nodes) if n != owner)
        assert unsent.abs().max() > 0
        assert torch.allclose(results[owner][0] + unsent, there[owner], atol=1e-4)


def test_a_gradient_that_is_not_finite_reaches_its_owner_and_no_residual():
    def act(communicator):
        reduce = ErrorFeedbackReduce(
            Link(communicator), None, BlockIntegers(4), lambda: {"weight": 64}
        )
        output = torch.empty(64)
        reduce(output, values(128, seed=communicator.replica), None, SUM)
        before = reduce.residual.clone()
        sent = values(128, seed=7)
        if communicator.replica == 0:
            sent[64 + 3] = float("nan")  # for node 1
        reduce(output, sent, None, SUM)
        return (
            output.isfinite().all(),
            torch.equal(before, reduce.residual),
            reduce.residual.isfinite().all(),
        )

    (ok0, same0, finite0), (ok1, same1, finite1) = simulate_replicas(act, 2)
    assert (ok0, same0, finite0) == (True, True, True)
    assert (ok1, same1, finite1) == (False, False, True)


def test_a_residual_follows_its_parameter_when_others_are_frozen():
    def act(communicator):
        sizes = {"a": 10, "b": 20}
        reduce = ErrorFeedbackReduce(Link(communicator), None, BlockIntegers(4), lambda: sizes)
        reduce(torch.empty(30), values(60, seed=communicator.replica), None, SUM)
        before = reduce.by_parameter()
        del sizes["a"]
        reduce(torch.empty(20), torch.zeros(40), None, SUM)
        first = reduce.by_parameter()
        return before["b"], first

    for before, after in simulate_replicas(act, 2):
        assert [*after] == ["b"]
        # nothing new came: what was unsent is sent now, but for a smaller error
        assert 0 < after["b"].norm() < 0.2 * before.norm()


SUM = torch.distributed.ReduceOp.SUM
