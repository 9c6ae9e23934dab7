"""Slow replicas take fewer local steps per round, and everything else about a round stays."""

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest, local
from detonation.core.link.link import Link
from detonation.core.round import LocalSteps, Round
from detonation.core.schemes.scheme import SCHEMES as REGISTERED
from detonation.gates import balance
from zoo import SCHEMES, Plain, batch, built

ROUNDS = {
    name: scheme
    for name, scheme in SCHEMES.items()
    if scheme.signal == "parameters" and scheme.round.every > 1 and scheme.resume_from != "sent"
}


class Clock:
    """The time of one simulated replica, which passes where it computes."""

    def __init__(self, monkeypatch):
        self.times = [0.0] * 8
        monkeypatch.setattr(balance, "time_mark", lambda device: self.times[self._replica()])

    def _replica(self):
        name = threading.current_thread().name
        return int(name.removeprefix("replica ")) if name.startswith("replica ") else 0


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def started(communicator, scheme, balanced=True, base=torch.optim.AdamW):
    model = built(Plain)
    return model, dt.replicate(
        base(model.parameters(), lr=1e-2), model, communicator, scheme, balance=balanced
    )


def advance(model, optimizer, replica, steps, clock, slowness, log=None):
    """Takes steps as a user's loop does; returns the steps that were not sat out."""
    worked = []
    for step in steps:
        if not optimizer.idle:
            worked.append(step)
            model(batch(replica, step, 32)).mean().backward()
            clock.times[replica] += slowness[replica]
        optimizer.step()
        optimizer.zero_grad()
    return worked


def trained(communicator, scheme, clock, slowness, steps=12, balanced=True):
    model, optimizer = started(communicator, scheme, balanced)
    worked = advance(model, optimizer, communicator.replica, range(steps), clock, slowness)
    optimizer.synchronize()
    state = {key: tensor.clone() for key, tensor in optimizer.local_state().items()}
    return digest(model.parameters()), worked, state


@pytest.mark.parametrize("name", ROUNDS)
def test_law_6_equal_replicas_train_as_without_it(name, clock):
    def both(communicator):
        slowness = [1.0, 1.0, 1.04]  # less than the slack
        found = [
            trained(communicator, ROUNDS[name], clock, slowness, balanced=on)
            for on in (False, True)
        ]
        for key in found[0][2]:
            assert torch.equal(found[0][2][key], found[1][2][key]), key
        assert found[0][:2] == found[1][:2]
        return found[1][0]

    assert len(set(simulate_replicas(both, 3))) == 1


@pytest.mark.parametrize("name", ROUNDS)
def test_law_2_slow_replicas_sit_steps_out_and_all_agree(name, clock):
    scheme, slowness = ROUNDS[name], [1.0, 2.0, 5.0]
    every, delay = scheme.round.every, scheme.round.delay
    runs = simulate_replicas(lambda c: trained(c, scheme, clock, slowness, 6 * every - delay), 3)
    assert len({weights for weights, _, _ in runs}) == 1
    for replica, (_, worked, state) in enumerate(runs):
        count = max(1, int(every * 1.05 / slowness[replica]))
        # all of the first round, in which nobody knows
        assert len(worked) == every - delay + 5 * count
        assert worked[-1] == 6 * every - delay - 1
        assert state["0.local_steps"].tolist() == [
            max(1, int(every * 1.05 / each)) for each in slowness
        ]
        agreed = [key for key in state if key.startswith("0.anchor")]
        assert agreed and all(torch.equal(state[key], runs[0][2][key]) for key in agreed)


@pytest.mark.parametrize("delay", [1, 2])
def test_with_a_delay_the_steps_of_a_slow_replica_are_not_those_that_are_overwritten(delay, clock):
    """Replica 1 takes one step in a round, and alone trains the weight."""
    scheme = dt.schemes.streaming_diloco(
        every=5, fragments=1, delay=delay, outer_lr=1.0, outer_momentum=0.0, precision="fp32"
    )

    def act(communicator):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(base, model, communicator, scheme, balance=True)
        replica = communicator.replica
        for step in range(15):
            if step == 5 - delay:  # the end of the first round, in which replicas are equal
                optimizer.synchronize()
                before = model.weight.detach().clone()
            if not optimizer.idle:
                [model.bias, model.weight][replica].square().sum().backward()
                clock.times[replica] += [1.0, 20.0][replica]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return optimizer.stats.local_steps, (model.weight / before).mean().item()

    # replica 1 moves the weight by a fifth, as one of 6 local steps; in the second round `delay`
    # steps of replica 0 are overwritten
    after_two_rounds = (1 - 0.2 / 6) * (1 - 0.2 / (6 - delay))
    for counts, kept in simulate_replicas(act, 2):
        assert counts == [5, 1] and kept == pytest.approx(after_two_rounds)


def test_the_mean_is_weighted_by_local_steps(clock):
    """A plain reference: each replica alone with SGD, and the mean of its movements by tokens."""
    every, slowness = 4, [1.0, 2.0, 4.0]
    scheme = dt.schemes.local_sgd(every=every)

    def act(communicator):
        model, optimizer = started(communicator, scheme, base=torch.optim.SGD)
        advance(model, optimizer, communicator.replica, range(every), clock, slowness)
        common = [p.detach().clone() for p in model.parameters()]
        worked = advance(
            model, optimizer, communicator.replica, range(every, 2 * every), clock, slowness
        )
        return common, worked, [p.detach().clone() for p in model.parameters()]

    runs = simulate_replicas(act, 3)
    moved, counts = [], [len(worked) for _, worked, _ in runs]
    assert counts == [4, 2, 1]
    for replica, (common, worked, _) in enumerate(runs):
        model = built(Plain)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), common, strict=True):
                parameter.copy_(value)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in worked:
            sgd.zero_grad()
            model(batch(replica, step, 32)).mean().backward()
            sgd.step()
        moved.append([p.detach() - c for p, c in zip(model.parameters(), common, strict=True)])
    for index, (weight, begun) in enumerate(zip(runs[0][2], runs[0][0], strict=True)):
        mean = sum(count * each[index] for count, each in zip(counts, moved, strict=True)) / sum(
            counts
        )
        torch.testing.assert_close(weight, begun + mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name, scheme in ROUNDS.items() if scheme.name in REGISTERED]
)
def test_uneven_rounds_are_followed_and_joined(name, clock):
    """A newcomer of a balanced run is balanced, too, and begins as all do, with equal steps."""
    scheme, slowness = ROUNDS[name], [1.0, 2.0]
    every = scheme.round.every
    token, follows = b"a token for tests only", scheme.link != "owner"

    def act(communicator):
        model, optimizer = started(communicator, scheme)
        feed = (
            dt.Feed(model, optimizer, "127.0.0.1:0", token=token)
            if follows and not communicator.replica
            else None
        )
        optimizer.record(feed)
        served, seen = built(Plain), []
        follower = dt.follow(served, feed.address, token=token, wait=False) if feed else None
        while feed and not feed.followers:
            follower.update(wait_s=0.01)
        for _ in range(4):
            steps = range(optimizer.step_count, optimizer.step_count + every)
            advance(model, optimizer, communicator.replica, steps, clock, slowness)
            optimizer.synchronize()
            while feed and (follower.step, follower.complete) != (optimizer.step_count, True):
                follower.update(wait_s=0.01)
            seen.append(not feed or digest(served.parameters()) == digest(model.parameters()))
        if feed:
            newcomer = follower.join(LoopbackCommunicator(3))
            follower.close()
            feed.close()
            seen.append(newcomer.settings.balance and newcomer.stats.local_steps == [every] * 3)
            seen.append(newcomer.step_count == optimizer.step_count)
        return seen

    for seen in simulate_replicas(act, 2):
        assert all(seen)


@pytest.mark.parametrize("name", ["diloco", "streaming", "sparseloco"])
def test_law_9_a_run_resumes_in_the_middle_of_an_uneven_round(name, clock):
    scheme, slowness = ROUNDS[name], [1.0, 2.5]
    every = scheme.round.every
    cut, end = 3 * every + 1, 5 * every

    def act(communicator):
        replica = communicator.replica
        model, optimizer = started(communicator, scheme)
        advance(model, optimizer, replica, range(cut), clock, slowness)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        advance(model, optimizer, replica, range(cut, end), clock, slowness)
        again, resumed = started(communicator, scheme)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        advance(again, resumed, replica, range(cut, end), clock, slowness)
        return (
            digest(model.parameters()) == digest(again.parameters())
            and resumed.step_count == optimizer.step_count
        )

    assert simulate_replicas(act, 2) == [True, True]


def test_the_weights_of_replicas_add_up_and_every_replica_has_its_turn():
    for durations in ([5, 5], [5, 9, 11], [1, 1000], [7]):
        for every in (2, 7, 100):
            steps = LocalSteps(Round(every), len(durations))
            steps.agree(durations)
            taken = sum(steps.taken(step).to(torch.int64) for step in range(3 * every, 4 * every))
            assert (
                torch.equal(taken, steps.counts)
                and int(taken.min()) >= 1
                and int(taken.max()) == every
            )
            parts = steps.counts.double() / steps.counts.sum()
            assert float(parts.sum()) == pytest.approx(1)
            ends = [
                count * each for count, each in zip(steps.counts.tolist(), durations, strict=True)
            ]
            steps.agree([0] * len(durations))
            assert torch.equal(taken, steps.counts)
            assert all(
                end <= 1.05 * every * min(durations) or steps.counts[i] == 1
                for i, end in enumerate(ends)
            )


def test_a_closure_is_not_evaluated_where_a_replica_is_idle(clock):
    def act(communicator):
        model, optimizer = started(communicator, dt.diloco(every=4))
        calls = []
        for step in range(8):

            def closure(step=step):
                calls.append(step)
                clock.times[communicator.replica] += 1.0 + communicator.replica
                loss = model(batch(communicator.replica, step, 32)).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()
        return calls

    assert simulate_replicas(act, 2) == [[*range(8)], [0, 1, 2, 3, 5, 7]]


def test_other_lengths_of_rounds_begin_with_equal_steps(clock):
    def act(communicator):
        model, optimizer = started(communicator, dt.diloco(every=4))
        advance(model, optimizer, communicator.replica, range(4), clock, [1.0, 2.0])
        before = optimizer.stats.local_steps
        optimizer.reconfigure(dt.diloco(every=6))
        return before, optimizer.stats.local_steps

    assert simulate_replicas(act, 2) == [([4, 2], [6, 6])] * 2


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (dt.demo(), "needs a single level whose scheme has rounds"),
        (dt.none(), "needs a single level whose scheme has rounds"),
        (dt.diloco(every=1), "rounds of several steps"),
        (replace(dt.schemes.sparta(), round=Round(every=2)), "only the sent coordinates"),
    ],
)
def test_schemes_that_step_together_are_refused(scheme, said):
    model = built(Plain)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=said):
        dt.replicate(sgd, model, LoopbackCommunicator(2), scheme, balance=True)


def sharded(mesh):
    """The slowest shard of a replica counts, and all its shards sit out the same steps."""
    replica, shard = divmod(mesh.get_rank(), 2)
    now = [0.0]
    balance.time_mark = lambda device: now[0]
    model = dt.shard(built(Plain), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(sgd, model, mesh["replicate"], dt.diloco(every=4), balance=True)
    worked = []
    for step in range(8):
        if not optimizer.idle:
            worked.append(step)
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
            now[0] += 2.0 if (replica, shard) == (1, 0) else 1.0
        optimizer.step()
        optimizer.zero_grad()
    return worked, optimizer.stats.local_steps, [digest([local(p)]) for p in model.parameters()]


def test_all_shards_of_a_slow_replica_sit_out():
    runs = worlds.run_alone(sharded, 2, 2)
    assert [len(worked) for worked, _, _ in runs] == [8, 8, 6, 6]
    assert all(counts == [4, 2] for _, counts, _ in runs)
    assert runs[0][2] == runs[2][2] and runs[1][2] == runs[3][2]


def test_shards_take_the_same_steps_where_a_replica_is_lost_before_all_of_its_shards_have_said_theirs():
    """The second shard never hears how quick the lost replica was; shards that part wait for each other for ever."""

    def shard(communicator):
        heard = torch.tensor([[4], [2] if communicator.replica == 0 else [4], [8]])
        between, steps = (
            SimpleNamespace(collect=lambda mine: heard, replica=0),
            LocalSteps(Round(4), 3),
        )
        balance.Balance(steps, between, [Link(communicator)], torch.device("cpu")).end(3)
        return steps.counts.tolist()

    assert simulate_replicas(shard, 2) == [[4, 4, 2]] * 2
