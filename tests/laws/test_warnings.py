"""What is said of a step: warnings once, errors that are explained, counts of all steps."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.survive import surviving
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core import runtime
from detonation.core.integrity.fault_counts import NonFiniteGradient
from limits import Clock
from zoo import SCHEMES, TALKING, Plain, batch, built


def warned(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_two_replicas_of_three_tell_of_one_gradient_that_is_not_finite(caplog):
    """The first one and the one that has it, once each, in however many messages it is left out."""

    def act(communicator):
        model, optimizer = started_with(communicator, dt.Safety(non_finite="skip"))
        model(batch(communicator.replica, 0, 32)).mean().backward()
        if communicator.replica == 2:
            for parameter in model.parameters():
                parameter.grad.fill_(torch.nan)
        optimizer.step()
        return optimizer.stats.skipped

    assert simulate_replicas(act, 3) == [1] * 3
    assert sum("is not finite on replica 2" in text for text in warned(caplog)) == 2


def started_with(communicator, safety, scheme=SCHEMES["demo"]):
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, dt.replicate(base, model, communicator, scheme, safety=safety)


def alone(mesh):
    """The warnings of a rank whose axis has one replica, before and in its first step."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("detonation").addHandler(handler)
    model = dt.shard(built(Plain), mesh)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    model(batch(0, 0, 32)).mean().backward()
    optimizer.step()
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_one_replica_that_is_the_whole_world_is_warned_of_nothing(shards):
    assert worlds.run(alone, 1, shards) == [[]] * shards


def test_whoever_watches_a_process_hears_of_the_error_that_ended_a_step(monkeypatch):
    """It adds to the text what the process knows of the network, before the caller reads it."""
    heard = []

    def explain(error):
        heard.append(error)
        error.add_note("rank 3 is gone")

    monkeypatch.setattr(runtime.PROGRESS, "explain", explain)
    model, optimizer = started_with(LoopbackCommunicator(2), dt.Safety())
    model(batch(0, 0, 32)).mean().backward()
    next(model.parameters()).grad.fill_(torch.nan)
    with pytest.raises(NonFiniteGradient) as raised:
        optimizer.step()
    assert heard == [raised.value] and raised.value.__notes__ == ["rank 3 is gone"]


def counted(late, monkeypatch):
    """What the statistics say after each step, of which two have a gradient that is not finite."""
    monkeypatch.setattr(runtime, "decides_on_device", lambda device: late)
    model, optimizer = started_with(
        LoopbackCommunicator(2), dt.Safety(non_finite="skip"), TALKING["demo"]
    )
    found = []
    for step in range(5):
        model(batch(0, step, 32)).mean().backward()
        if step in (1, 2):
            next(model.parameters()).grad.fill_(torch.nan)
        optimizer.step()
        optimizer.zero_grad()
        found.append((optimizer.stats.skipped, optimizer.stats.skipped_by_parameter))
    return found


def test_statistics_are_those_of_all_steps_taken_wherever_they_are_counted(monkeypatch):
    at_once = counted(False, monkeypatch)
    assert [skipped for skipped, _ in at_once] == [0, 2, 4, 4, 4]
    assert counted(True, monkeypatch) == at_once


def test_the_seconds_of_a_recovery_count_from_the_first_sign_of_the_loss(monkeypatch):
    """The main thread may have noticed it before the thread that recovers."""
    clock = Clock()
    membership = SimpleNamespace(members=[0, 1, 2], called=True, noticed_at=clock())
    logged = []

    class Recovers(SurvivingCommunicator):
        def __init__(self):
            self._membership = membership
            self._changed = threading.Condition()
            self.users = SimpleNamespace(present=[])
            self.pending = []

        def _regroup(self):
            clock.sleep(3.0)
            return [SimpleNamespace(members=membership.members)]

        def _log_change(self, before, agreement, seconds):
            logged.append(seconds)

    monkeypatch.setattr(surviving, "time", SimpleNamespace(monotonic=clock))
    clock.sleep(2.0)
    Recovers()._recover()
    assert logged == [5.0]


def test_a_state_of_more_replicas_is_refused_with_what_may_differ():
    """Owners keep what they have not answered, of rows that depend on the number of replicas."""

    def trained(communicator):
        model, optimizer = started_with(communicator, dt.Safety(), SCHEMES["demo-owner"])
        model(batch(communicator.replica, 0, 32)).mean().backward()
        optimizer.step()
        return optimizer

    saved = simulate_replicas(lambda communicator: trained(communicator).state_dict(), 3)
    text = (
        r"server_residual was saved with .*: load a state of the same model, shards and replicas$"
    )

    def loaded(communicator):
        with pytest.raises(ValueError, match=text):
            trained(communicator).load_state_dict(saved[communicator.replica])

    simulate_replicas(loaded, 2)
