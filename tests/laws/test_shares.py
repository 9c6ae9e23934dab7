"""The law of a constant batch: whoever takes part, a step has the same examples, each once."""

import copy
from collections import Counter, defaultdict
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

import detonation as dt
from detonation.cluster.shares import micro_batches
from detonation.cluster.survive.agreement import ReplicaLeft, next_axis_store
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.train.loop import examples as drawing
from detonation.train.recipe.schema import TrainConfig
from steps import replicas, together
from zoo import Plain, built

MODEL = built(Plain)  # the threads share a random generator
TOKEN = b"0123456789abcdef"
SIZES = st.integers(1, 40)


@given(SIZES, st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
@example(examples=7, largest=4, replicas=2, shards=1)
@example(examples=2, largest=2, replicas=5, shards=2)
def test_all_ranks_have_each_example_once_and_the_mean_over_ranks_is_that_over_examples(
    examples, largest, replicas, shards
):
    ranks = replicas * shards
    shares = [micro_batches(examples, largest, rank, ranks, shards) for rank in range(ranks)]
    real = [[micro for micro in share if micro.weight] for share in shares]
    assert [e for share in real for m in share for e in m.examples] == [*range(examples)]
    counts = [sum(len(micro.examples) for micro in share) for share in real]
    assert max(counts) - min(counts) <= 1
    for rank, share in enumerate(shares):
        assert len(share) == len(shares[rank // shards * shards]) >= 1  # FSDP2 waits in each pass
        for micro in share:
            assert 1 <= len(micro.examples) <= largest
            assert micro.examples.start // largest == (micro.examples.stop - 1) // largest
    for micro in (micro for share in real for micro in share):  # over the ranks, of a mean loss
        weight = Fraction(micro.weight).limit_denominator(1000) / ranks / len(micro.examples)
        assert weight == Fraction(1, examples)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_the_ranks_of_the_start_have_their_own_batches(size, accumulate, ranks):
    """Whole micro-batches, so that a run without a loss keeps its bits."""
    for rank in range(ranks):
        first = rank * accumulate * size
        share = micro_batches(ranks * accumulate * size, size, rank, ranks)
        starts = range(first, first + accumulate * size, size)
        assert [micro.examples for micro in share] == [range(s, s + size) for s in starts]


class Numbers:
    """Examples that are their own numbers; of some nothing is predicted, as of padding."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, indices):
        labels = indices[:, None] % 4 - torch.arange(1, 4)  # predictions: up to three of an example
        return {"input_ids": indices, "labels": labels.where(labels >= 0, -100)}


def session_of(rank, ranks, size, accumulate, parts, count):
    share = partial(micro_batches, parts * accumulate * size, size, rank, ranks)
    return SimpleNamespace(
        config=SimpleNamespace(train=TrainConfig(size, steps=1, accumulate=accumulate), seed=5),
        data=SimpleNamespace(train=Numbers(count), kind="translation"),
        world=SimpleNamespace(parts=parts, share=lambda *_: share()),
    )


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=4, max_size=4),
)
def test_an_epoch_has_each_example_once_over_losses_departures_and_joins(
    size, accumulate, parts, there
):
    """`there` are the ranks of each step; the weights are those of the batches of the start."""
    in_step = size * accumulate * parts
    seen, count = Counter(), len(there) * in_step
    for step, ranks in enumerate(there):
        weights, batches = Counter(), {}
        for rank in range(ranks):
            session = session_of(rank, ranks, size, accumulate, parts, count)
            micros = drawing.micro_batches_of_step(session)
            for micro, (drawn, weight) in zip(micros, drawing.draws(session, step), strict=True):
                predictions = int((drawn["labels"] != -100).sum())
                if not weight or not predictions:
                    continue
                number = micro.examples.start // size
                weights[number] += weight
                seen.update(drawn["input_ids"].tolist())
                batches.setdefault(number, []).append(weight / predictions)
        for number, each in batches.items():  # of each prediction the same, however it is divided
            assert each == pytest.approx([each[0]] * len(each))
            assert weights[number] == pytest.approx(1)
    silent = {each for each in range(count) if each % 4 == 0}  # which only whole batches contain
    assert {each: number for each, number in seen.items() if number != 1} == {}
    assert {*range(count)} - seen.keys() <= silent


EXAMPLES, LARGEST, STEPS, LR = 12, 3, 8, 0.1


def examples_of(step):
    return torch.randn(EXAMPLES, 32, generator=torch.Generator().manual_seed(step))


def mean_of(model, step, chosen):
    """The gradient of the mean over these examples of a step."""
    return torch.autograd.grad(model(examples_of(step)[chosen]).mean(), [*model.parameters()])


def alone(chosen=lambda step: range(EXAMPLES), steps=STEPS):
    """What one process computes with all examples of each step, or with those that are chosen."""
    model = copy.deepcopy(MODEL)
    for step in range(steps):
        gradients = mean_of(model, step, chosen(step))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
    return [*model.parameters()]


def optimizer_on(axis):
    model = copy.deepcopy(MODEL)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    safety = dt.Safety(verify_every=1)
    return model, dt.replicate(sgd, model, axis, dt.full(), safety=safety)


def advance(model, optimizer, axis, computed, before=lambda step: None):
    """One step of a loop of one's own; notes the examples that this replica computed."""
    step = optimizer.step_count
    before(step)
    optimizer.renumber()
    data = examples_of(step)
    for micro in axis.share(EXAMPLES, LARGEST):
        if micro.weight:
            computed[step].update(micro.examples)
        (micro.weight * model(data[micro.examples]).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def computed():
    return defaultdict(Counter)


def each_once(computed, steps=range(STEPS)):
    return all(computed[step] == Counter(range(EXAMPLES)) for step in steps)


def test_a_run_that_lost_a_replica_is_one_in_which_the_others_computed_its_examples(computed):
    """The step in which it was lost is the mean over the examples of the others."""

    def act(axis):
        number = axis.replica
        if number == 1:
            axis.countdown = 0
        model, optimizer = optimizer_on(axis)
        while optimizer.step_count < STEPS:
            advance(model, optimizer, axis, computed)
        return [*model.parameters()]

    ends = [end for end in replicas(act, 4) if end]
    assert len(ends) == 3
    assert each_once(computed)  # it had computed its own in step 3, and took them with it
    others = [*range(3), *range(6, EXAMPLES)]
    expected = alone(lambda step: others if step == 3 else range(EXAMPLES))
    for end in ends:
        torch.testing.assert_close(end, expected)


def test_a_run_that_a_replica_left_equals_one_with_all_examples(computed):
    def act(axis):
        number, last = axis.replica, None
        model, optimizer = optimizer_on(axis)

        def before(step):
            if step == 3 and number == 0:
                axis.depart()

        try:
            while last is None or optimizer.step_count < last:
                advance(model, optimizer, axis, computed, before)
                if last is None and axis.size() == 2:  # on all in the same step
                    last = optimizer.step_count + STEPS
        except ReplicaLeft:
            return None
        return [*model.parameters()], last

    (left, steps), (right, same) = [end for end in replicas(act, 3) if end]
    assert steps == same and each_once(computed, range(steps))
    for end in (left, right):
        torch.testing.assert_close(end, alone(steps=steps), rtol=1e-4, atol=1e-5)


def test_a_run_that_a_replica_joined_equals_one_with_all_examples(computed):
    """From its first step on the newcomer has its share of the run's examples."""
    store = HashStore()

    def trained(model, optimizer, axis):
        door, last = dt.Admission(model, optimizer, token=TOKEN), None
        while last is None or optimizer.step_count < last:
            advance(model, optimizer, axis, computed)
            door.after_step()
            if last is None and axis.size() == 3:  # on all in the same step
                last = optimizer.step_count + STEPS
        axis.close()
        return [*model.parameters()], last

    def member(replica):
        own = next_axis_store(store, replica, 2)
        membership = Membership(own, replica, 2, 0, 1, 30.0, 1, print, confirm_s=30.0)
        axis = SurvivingCommunicator(membership, 30.0)
        return trained(*optimizer_on(axis), axis)

    def newcomer():
        model = copy.deepcopy(MODEL)
        safety = dt.Safety(verify_every=1)
        return trained(model, *dt.admitted(model, dt.Guest(store), token=TOKEN, safety=safety))

    ends = together(partial(member, 0), partial(member, 1), newcomer)
    steps = ends[0][1]
    assert [last for _, last in ends] == [steps] * 3 and each_once(computed, range(steps))
    for end, _ in ends:
        torch.testing.assert_close(end, alone(steps=steps), rtol=1e-4, atol=1e-5)
