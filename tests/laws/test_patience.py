"""Patience: a gradient that is late is silent in its step, stays in its memory, and is sent in the next one."""

import copy
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.agreement import patience
from detonation.core.agreement.patience import MOST_LATE
from detonation.core.codec.aggregate import Mean
from detonation.core.flat.tensors import digest
from steps import Nobody
from zoo import GRADIENT, Plain, batch, built

PATIENT = {
    name: replace(scheme, link="all-gather" if scheme.link == "auto" and not scheme.summable else scheme.link)
    for name, scheme in GRADIENT.items()
    if scheme.feedback and scheme.feedback.decay and not scheme.round.delay and scheme.link != "owner"
}
STEPS = 11
LATE = {(1, 2): 1, (2, 2): 1, (1, 5): 3, (0, 6): 1, (2, 8): 1}
"""By replica and step: the empty messages that leave before the gradient of the step is there."""


def started(communicator, scheme, patience=1e6, lr=0.05, base=torch.optim.SGD, safety=None):
    communicator.arrivals = Nobody
    model = built(Plain)
    optimizer = base(model.parameters(), lr=lr)
    return model, dt.replicate(optimizer, model, communicator, scheme, patience=patience, safety=safety)


def advance(model, optimizer, replica, steps, late=LATE, fed=None):
    """Takes steps as a user's loop does; returns the steps in which this replica computed a gradient."""
    worked = []
    for step in steps:
        if not optimizer.idle:
            worked.append(step)
            model(batch(replica, step, 32)).mean().backward()
            if fed is not None:
                fed.append([p.grad.clone() for p in model.parameters()])
            for ahead in range(late.get((replica, step), 0)):
                optimizer._consensus.patience.answer(step + ahead)
        optimizer.step()
        optimizer.zero_grad()
    return worked


@pytest.mark.parametrize("name", PATIENT)
def test_law_1_a_late_gradient_is_not_lost(name):
    """The mean of what was fed in is what was applied and the mean of the memories."""
    feedback = replace(PATIENT[name].feedback, decay=1.0, alpha=1.0, error_feedback=True)
    scheme = replace(PATIENT[name], feedback=feedback, aggregation=Mean(), link="all-gather")

    def act(communicator):
        model, optimizer = started(communicator, scheme, lr=1.0)
        before, fed = [p.detach().clone() for p in model.parameters()], []
        worked = advance(model, optimizer, communicator.replica, range(STEPS), fed=fed)
        memory = [optimizer.local_state()[f"0.residual.{name}"].clone() for name, _ in model.named_parameters()]
        applied = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
        return applied, memory, [sum(each) for each in zip(*fed, strict=True)], worked

    runs = simulate_replicas(act, 3)
    sat_out = [{7}, {3, 6, 7, 8}, {3, 9}]
    assert [set(range(STEPS)) - set(run[3]) for run in runs] == sat_out
    for index, applied in enumerate(runs[0][0]):
        kept, fed = (sum(run[which][index] for run in runs) / 3 for which in (1, 2))
        torch.testing.assert_close(applied + kept, fed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PATIENT)
def test_law_6_where_nobody_is_late_it_is_the_scheme_itself(name):
    def act(communicator):
        found = []
        for seconds in (None, 1e6):
            model, optimizer = started(communicator, PATIENT[name], seconds)
            advance(model, optimizer, communicator.replica, range(4), late={})
            state = {key: digest([tensor]) for key, tensor in optimizer.local_state().items()}
            found.append((digest(model.parameters()), state, optimizer.stats.bytes_sent))
        assert found[1][1].pop("0.silent")
        assert found[0] == found[1]

    simulate_replicas(act, 3)


@pytest.mark.parametrize("name", PATIENT)
def test_laws_2_9_late_replicas_agree_and_resume_exactly(name):
    """Also between the step that missed a gradient and the one that sends it."""

    def act(communicator):
        model, optimizer = started(communicator, PATIENT[name], base=torch.optim.AdamW)
        advance(model, optimizer, communicator.replica, range(3))
        saved = copy.deepcopy((model.state_dict(), optimizer.base.state_dict(), dt.replica_state(optimizer)))
        advance(model, optimizer, communicator.replica, range(3, STEPS))
        assert (optimizer.stats.late, optimizer.stats.refused, optimizer.stats.skipped) == ({0: 1, 1: 4, 2: 2}, 0, 0)
        again, other = started(communicator, PATIENT[name], base=torch.optim.AdamW)
        again.load_state_dict(saved[0])
        other.base.load_state_dict(saved[1])
        dt.load_replica_state(other, saved[2])
        advance(again, other, communicator.replica, range(3, STEPS))
        assert digest(again.parameters()) == digest(model.parameters())
        for key, tensor in other.local_state().items():
            assert torch.equal(tensor, optimizer.local_state()[key]), key
        other.verify()
        return digest(model.parameters())

    assert len(set(simulate_replicas(act, 3))) == 1


def test_a_store_that_fails_once_does_not_end_patience(caplog):
    asked, answered = [], threading.Event()

    class Interrupted(Nobody):
        def furthest(self):
            asked.append(len(asked))
            if not asked[-1]:
                raise RuntimeError("the store did not answer in time")
            answered.set()
            return -1

    communicator = LoopbackCommunicator(2)
    model, optimizer = started(communicator, PATIENT["demo"])
    optimizer.set_up()
    optimizer._consensus.patience._arrivals = Interrupted()
    advance(model, optimizer, 0, [0], late={})
    assert answered.wait(30)
    advance(model, optimizer, 0, [1], late={})
    assert "how far the replicas are cannot be read: the store did not answer in time" in caplog.text


def test_a_replica_that_is_always_late_is_named_and_heard(caplog):
    """Although its loop computes in each step; the others wait for it once in a while."""
    steps, scheme = 3 * MOST_LATE, PATIENT["demo"]

    def act(communicator):
        model, optimizer = started(communicator, scheme)
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(communicator.replica, step, 32)).mean().backward()
            if communicator.replica == 1:
                optimizer._consensus and optimizer._consensus.patience.answer(step)
            optimizer.step()
        return digest(model.parameters()), optimizer.stats.late

    with caplog.at_level(logging.WARNING, "detonation"):
        weights, late = zip(*simulate_replicas(act, 2), strict=True)
    heard = [1 + n * (MOST_LATE + 1) for n in range(3)]  # step 1 is the first whose thread may send
    assert len(set(weights)) == 1 and late[0] == late[1] == {1: steps - 1 - len(heard)}
    assert "replica 1 was late at step 2, 1 times so far: its gradient travels a step later" in caplog.text
    assert ", 16 times so far" in caplog.text and ", 15 times so far" not in caplog.text


def test_a_closure_may_be_late():
    """The loops of some libraries compute the gradient within `step`."""

    def act(communicator):
        model, optimizer = started(communicator, PATIENT["demo"])

        def closure():
            optimizer.zero_grad()
            loss = model(batch(communicator.replica, optimizer.step_count, 32)).mean()
            loss.backward()
            if communicator.replica and optimizer.step_count == 2:
                optimizer._consensus.patience.answer(2)
            return loss

        losses = [optimizer.step(closure) for _ in range(5)]
        return digest(model.parameters()), [step for step, loss in enumerate(losses) if loss is None]

    weights, idle = zip(*simulate_replicas(act, 2), strict=True)
    assert len(set(weights)) == 1 and list(idle) == [[], [3]]


def test_who_sits_a_step_out_makes_nobody_late(monkeypatch):
    """It comes to that step before the others can, and tells them when it would have come."""
    clock = threading.local()
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: getattr(clock, "now", 0.0)))

    def act(communicator):
        told, clock.now = [], 0.0
        communicator.arrivals = lambda: SimpleNamespace(tell=told.append, furthest=lambda: -1)
        model = built(Plain)
        sgd = torch.optim.SGD(model.parameters())
        optimizer = dt.replicate(sgd, model, communicator, PATIENT["demo"], patience=1e6)
        for step in range(4):
            clock.now += not optimizer.idle
            advance(model, optimizer, communicator.replica, [step])
            optimizer._consensus.patience.look((-1, 0.0))
        early = [*told]
        clock.now += 1.0
        optimizer._consensus.patience.look((-1, 0.0))
        return max(early), max(told)

    assert simulate_replicas(act, 2) == [(3, 3), (2, 3)]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_late_gradient_that_is_not_finite_is_told_with_the_next_message(policy):
    def act(communicator):
        model, optimizer = started(communicator, PATIENT["demo"], safety=dt.Safety(non_finite=policy))
        advance(model, optimizer, communicator.replica, range(2))
        model(batch(0, 2, 32)).mean().backward()
        if communicator.replica:
            next(model.parameters()).grad[0, 0] = torch.nan
            optimizer._consensus.patience.answer(2)
        optimizer.step()
        assert optimizer.stats.skipped == 0 and optimizer.idle == bool(communicator.replica)
        optimizer.zero_grad()
        advance(model, optimizer, communicator.replica, range(3, 5))
        return digest(model.parameters()), optimizer.stats.skipped_by_parameter

    if policy == "stop":
        with pytest.raises(dt.NonFiniteGradient, match=r"layers\.0\.weight is not finite on replica 1 at step 3"):
            simulate_replicas(act, 2)
    else:
        weights, skipped = zip(*simulate_replicas(act, 2), strict=True)
        assert len(set(weights)) == 1 and list(skipped) == [{"layers.0.weight": 1}] * 2


def test_parameters_change_though_a_replica_is_late():
    def act(communicator):
        model, optimizer = started(communicator, PATIENT["demo"])
        advance(model, optimizer, communicator.replica, range(2))
        model(batch(communicator.replica, 2, 32)).mean().backward()
        next(model.parameters()).requires_grad_(False)
        if communicator.replica:
            optimizer._consensus.patience.answer(2)
        optimizer.step()
        optimizer.zero_grad()
        advance(model, optimizer, communicator.replica, range(3, STEPS))
        return digest(model.parameters()), optimizer.stats.late

    weights, late = zip(*simulate_replicas(act, 2), strict=True)
    assert len(set(weights)) == 1 and late[0] == {0: 1, 1: 4}


def test_a_log_replays_steps_in_which_replicas_were_late(tmp_path):
    def act(communicator):
        model, optimizer = started(communicator, PATIENT["demo"])
        optimizer.record(dt.UpdateLog(tmp_path))
        advance(model, optimizer, communicator.replica, range(STEPS))
        return digest(model.parameters())

    end = simulate_replicas(act, 3)[0]
    model = built(Plain)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.05), model, LoopbackCommunicator(3), PATIENT["demo"]
    )
    assert dt.replay(tmp_path, optimizer) == STEPS and digest(model.parameters()) == end
    assert optimizer.stats.late == {0: 1, 1: 4, 2: 2}


def test_a_state_is_of_replicas_with_patience_or_without():
    def act(communicator, patience):
        model, optimizer = started(communicator, PATIENT["demo"], patience)
        advance(model, optimizer, communicator.replica, range(3), late={} if patience is None else LATE)
        state, idle = dt.replica_state(optimizer), optimizer.idle
        _, other = started(communicator, PATIENT["demo"], 1e6 if patience is None else None)
        dt.load_replica_state(other, state)
        assert not other.idle
        return idle

    assert simulate_replicas(lambda c: act(c, 1e6), 3) == [False, True, True]
    assert simulate_replicas(lambda c: act(c, None), 3) == [False, False, False]


def test_a_follower_holds_the_weights_though_replicas_are_late():
    def act(communicator):
        model, optimizer = started(communicator, PATIENT["demo"], base=torch.optim.AdamW)
        if communicator.replica:
            advance(model, optimizer, communicator.replica, range(STEPS))
            return
        token = b"0123456789abcdef"
        feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=token)
        optimizer.record(feed)
        advance(model, optimizer, 0, range(2))
        served = built(Plain)
        with dt.follow(served, feed.address, token=token, wait=False) as follower:
            while not feed.followers:
                follower.update(wait_s=0.01)
            for step in range(2, STEPS):
                advance(model, optimizer, 0, [step])
                follower.update(to=step + 1)
                assert digest(served.parameters()) == digest(model.parameters())
            assert follower.joins == 1
        feed.close()

    simulate_replicas(act, 3)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"scheme": dt.full()}, "needs a memory for gradients that are late, and full keeps none"),
        ({"scheme": dt.loco(decay=0.0)}, "loco keeps none"),
        ({"scheme": dt.diloco()}, "needs one level of gradients, such as demo.., not diloco; rounds have balance"),
        ({"scheme": dt.random(delay=1)}, "takes no delay, and random has delay=1"),
        ({"scheme": dt.demo(link="owner")}, "takes link='all-gather'"),
        ({"patience": 0.0}, "patience is 0.0, must be seconds above 0"),
        ({"axis": LoopbackCommunicator(2)}, "needs replicas that share a store.*LoopbackCommunicator has none"),
        ({"axis": LoopbackCommunicator(8), "scheme": dt.demo(topk=16)}, "needs link='all-gather' here"),
    ],
)
def test_what_cannot_wait_is_refused_in_one_line(arguments, why):
    model = built(Plain)
    axis = LoopbackCommunicator(2)
    axis.arrivals = Nobody
    if arguments.get("axis") and "scheme" in arguments:
        arguments["axis"].arrivals = Nobody
    chosen = {"axis": axis, "scheme": dt.demo(), "patience": 1.0, **arguments}
    with pytest.raises(ValueError, match=why) as refused:
        dt.replicate(torch.optim.SGD(model.parameters()), model, **chosen).step()
    assert "\n" not in str(refused.value)


def test_settings_may_change_though_replicas_may_be_late():
    def act(communicator):
        model, optimizer = started(communicator, dt.demo(4, 16))
        advance(model, optimizer, communicator.replica, range(4))
        with pytest.raises(ValueError, match="needs link='all-gather' here"):
            optimizer.reconfigure(dt.demo(4, 16, link="owner"))
        advance(model, optimizer, communicator.replica, range(4, 5))
        optimizer.reconfigure(dt.demo(2, 16))
        advance(model, optimizer, communicator.replica, range(5, STEPS))
        sender = optimizer._consensus.patience
        assert sender._channel is optimizer.build()[0].channel and sender._channel.scheme.arguments["topk"] == 2
        return digest(model.parameters()), optimizer.step_count

    first, *others = simulate_replicas(act, 3)
    assert first[1] == STEPS and others == [first] * 2
