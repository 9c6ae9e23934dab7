"""Runs in which a replica is slow: with `train.balance` it takes fewer steps, and in any run it is named."""

import dataclasses
import math
import threading
from types import SimpleNamespace

import pytest
import torch

import worlds
from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.core.flat.tensors import digest
from detonation.gates import balance
from detonation.train.loop import fit as fitting
from detonation.train.loop.fit import NonFiniteLoss, Stopped, fit
from detonation.train.loop.session import start_session
from detonation.train.loop.summary import summarise
from detonation.train.loop.world import Waits
from detonation.train.verbs.simulate import virtual

ROUNDS = ("scheme.name=diloco", "scheme.every=4", "train.steps=16", "train.balance=true")
LOST = "the loss is not finite at step {} on replica 1 (shard 0), which trained nothing from that step on"


@pytest.fixture
def clock(monkeypatch):
    """The time of each simulated replica, which passes where it computes: the second takes twice as long."""
    times = {"replica 0": 0.0, "replica 1": 0.0}
    monkeypatch.setattr(balance, "time_mark", lambda device: times[threading.current_thread().name])
    return times


def run(config, clock, until=16, begun=lambda step, replica, session, stop: None, made=virtual):
    """Each replica's records, the steps in which it computed, and its session after `until` steps."""

    def act(communicator):
        session, stop, replica = made(config, communicator), Stop(), communicator.replica
        records, computed = [], []

        def before(module, *given):
            step = session.optimizer.step_count
            if torch.is_grad_enabled():
                computed.append(step)
                clock[f"replica {replica}"] += 1.0 + replica
            begun(step, replica, session, stop)

        session.model.register_forward_pre_hook(before)
        session.optimizer.set_up()
        error = None
        try:
            fit(session, 0, until, records.append, stop)
        except (NonFiniteLoss, Stopped) as caught:
            error = caught
        return records, computed, session, error

    return simulate_replicas(act, 2)


def test_a_slow_replica_computes_fewer_steps_and_all_end_equal(tiny, clock):
    (records, fast, one, _), (others, slow, two, _) = run(tiny(*ROUNDS), clock)
    assert fast == [*range(16)] and slow == [0, 1, 2, 3, 5, 7, 9, 11, 13, 15]
    assert clock == {"replica 0": 16.0, "replica 1": 20.0}  # 32 without
    assert digest(one.model.parameters()) == digest(two.model.parameters())
    assert [record.taking for record in records] == [2, 2, 2, 2] + [1, 2] * 6
    assert [r.loss for r in records[3:]] == [
        r.loss for r in others[3:]
    ]  # of the round before, the same everywhere
    assert len({r.loss for r in records[3:7]}) == 1 and records[7].loss != records[6].loss
    assert [r.lr for r in records] == [r.lr for r in others]
    assert {r.agreeing_s for r in records} == {None}  # in one process replicas compute in turns


class OnMachinesOfTheirOwn:
    """The world of a simulated replica for which time passes while it waits for the values of others."""

    def __init__(self, alone, clock):
        self._alone, self._clock = alone, clock

    def __getattr__(self, name):
        return getattr(self._alone, name)

    def all_gather(self, values):
        name = threading.current_thread().name
        begun = self._alone.all_gather(torch.tensor([self._clock[name]]))
        arrived = self._alone.all_gather(values)

        def wait():
            self._clock[name] = max(self._clock[name], *(at for (at,) in begun()))
            return arrived()

        return wait


@pytest.mark.parametrize("sets", [("scheme.name=demo",), ("scheme.name=full",), ROUNDS])
def test_a_record_tells_waiting_for_the_slowest_from_computing(tiny, clock, monkeypatch, sets):
    """Losses are agreed on before the last backward, after it, or at the end of a round: after the optimizer's step."""
    monkeypatch.setattr(
        fitting,
        "time",
        SimpleNamespace(perf_counter=lambda: clock[threading.current_thread().name]),
    )

    def made(config, communicator):
        session = virtual(config, communicator)
        return dataclasses.replace(session, world=OnMachinesOfTheirOwn(session.world, clock))

    found = run(tiny("train.steps=16", *sets), clock, made=made)
    for replica, (records, computed, session, _) in enumerate(found):
        busy = [r.seconds - r.step_s - r.agreeing_s for r in records]
        assert busy == [(1.0 + replica) * computed.count(step) for step in range(16)]
        assert {r.step_s for r in records} == {0.0}
        assert session.waits.table() == found[0][2].waits.table()
    first, second = ([r.agreeing_s for r in records] for records, *_ in found)
    assert (
        first[:4] == ([0.0, 0.0, 0.0, 4.0] if sets == ROUNDS else [1.0] * 4)
        and second[:4] == [0.0] * 4
    )


def test_a_signal_ends_all_replicas_at_the_end_of_the_round(tiny, clock):
    def begun(step, replica, session, stop):
        if (step, replica) == (5, 1):
            stop.number = 15

    found = run(tiny(*ROUNDS), clock, begun=begun)
    assert [str(error) for *_, error in found] == ["stopped by SIGTERM after step 8"] * 2


def test_a_loss_that_is_not_finite_moves_nobody(tiny, clock):
    """The round ends without the replica, and its last step has a record as any other."""

    def begun(step, replica, session, stop):
        if (step, replica) == (5, 1):
            session.model.register_forward_hook(
                lambda *given: given[2].loss.data.fill_(float("nan")) and None
            )

    (records, fast, one, error), (others, slow, two, same) = run(tiny(*ROUNDS), clock, begun=begun)
    assert str(error) == str(same) == LOST.format(6)
    assert (
        [record.step for record in records] == [record.step for record in others] == [*range(1, 9)]
    )
    assert math.isfinite(records[7].loss) and records[7].loss == others[7].loss != records[6].loss
    assert one.optimizer.step_count == two.optimizer.step_count == 8
    assert fast == [*range(8)] and slow == [
        0,
        1,
        2,
        3,
        5,
    ]  # it takes no more, and all end with the round
    weights = [*one.model.parameters(), *two.model.parameters()]
    assert all(bool(weight.isfinite().all()) for weight in weights)
    assert digest(one.model.parameters()) == digest(two.model.parameters())


@pytest.mark.parametrize(
    "sets", [(*ROUNDS,), ("scheme.name=full",), ("scheme.name=none", "train.accumulate=2")]
)
def test_a_loss_that_is_not_finite_leaves_buffers_as_before_its_step(tiny, clock, sets):
    def made(config, communicator):
        session = virtual(config, communicator)
        session.model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        return session

    def begun(step, replica, session, stop):
        session.model.seen += torch.is_grad_enabled()
        if (step, replica) == (5, 1):
            session.model.register_forward_hook(
                lambda *given: given[2].loss.data.fill_(float("nan")) and None
            )

    config = tiny(*sets)
    ends = run(config, clock, begun=begun, made=made)
    for replica, (_, computed, session, error) in enumerate(ends):
        assert isinstance(error, NonFiniteLoss)
        kept = [step for step in computed if step != 5 or (config.train.balance and not replica)]
        assert session.model.seen == len(kept)


def test_a_loss_that_is_not_finite_in_the_first_step_is_told_as_such(tiny, clock):
    """It leaves no gradients, which is no fault of the model."""

    def begun(step, replica, session, stop):
        if (step, replica) == (0, 1):
            session.model.register_forward_hook(
                lambda *given: given[2].loss.data.fill_(float("nan")) and None
            )

    for *_, error in run(tiny(*ROUNDS), clock, begun=begun):
        assert str(error) == LOST.format(1)


def test_gradient_schemes_are_refused_before_anything_starts(tiny):
    with pytest.raises(ValueError, match="this run uses demo: pass balance=False"):
        tiny("train.balance=true")


def test_waiting_is_the_slowest_replicas_up_to_what_it_was_busy_for():
    waits = Waits()
    waits.meet([[1, 2], [3, 0], [1, 5]], [1] * 3)
    waits.meet([[2, 0], [1, 1], [9, 0]], [1] * 3)
    assert waits.table() == {
        "seconds": [[0, 2, 0], [0, 0, 1], [0, 2, 0]],
        "network_s": [0, 0, 3],
        "slowest": 1,
        "lasted_s": pytest.approx(25 / 3),
    }


def slowed(mesh, config):
    """A run whose second replica has more to compute in each step."""
    session = start_session(config, torch.device("cpu"))
    if mesh.get_rank() == 1:
        work = torch.randn(700, 700)
        session.model.register_forward_pre_hook(lambda *_: [work @ work for _ in range(8)] and None)
    session.optimizer.set_up()
    records = []
    fit(session, 0, config.train.steps, records.append, Stop())
    return summarise(session, records)


@pytest.mark.long_cases("sets1")
@pytest.mark.parametrize(
    "sets", [["train.steps=4"], ["train.steps=4", "scheme.name=diloco", "scheme.every=2"]]
)
def test_the_slow_replica_is_named_under_every_kind_of_scheme(tiny, sets):
    first, second = worlds.run(slowed, 2, 1, tiny(*sets))
    assert first["waits"] == second["waits"] and first["waits"]["slowest"] == 1
    assert first["waits"]["seconds"][0][1] > first["waits"]["seconds"][1][0]


def test_waits_begin_anew_where_a_replica_comes_in():
    waits = Waits()
    waits.add(seconds=3.0, waited=1.0)
    assert waits.own == (2.0, 1.0) and waits.table() == {}
    waits.meet([[1.0, 9.0]] * 4, [2, 2])
    assert waits.own == (0.0, 0.0) and waits.table()["network_s"] == [9.0, 9.0]
    waits.meet([[1.0, 3.0], [1.0, 1.0], [3.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [2] * 3)
    assert waits.table() == {
        "seconds": [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "network_s": [0.0, 0.0, 0.0],
        "slowest": 1,
        "lasted_s": 2.0,
    }
