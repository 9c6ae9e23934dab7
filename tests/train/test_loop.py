"""The loop of one rank: for whom it waits, and when."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from detonation.cluster.launch import run_local
from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.core.flat.tensors import digest
from detonation.core.replicator.overlap import Overlap
from detonation.core.schemes import buckets
from detonation.train.loop.evaluate import autocast
from detonation.train.loop.fit import NonFiniteLoss, _Agreement, fit
from detonation.train.loop.session import start_session
from detonation.train.verbs.simulate import virtual
from detonation.wire.units import shard_state
from limits import LIMIT_S

GRADIENT, SENT, RECEIVED, LEFT = "gradient", "sent", "received", "left"


@pytest.mark.parametrize(
    "asked, kind, entered", [("bf16", "cpu", False), ("bf16", "cuda", True), ("", "cuda", False)]
)
def test_autocast_is_for_accelerators(monkeypatch, asked, kind, entered):
    """Many times slower than fp32 on a CPU without instructions for bf16."""
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: (kind, dtype))
    config = SimpleNamespace(train=SimpleNamespace(autocast=asked))
    session = SimpleNamespace(config=config, device=torch.device(kind))
    assert (autocast(session) == (kind, torch.bfloat16)) == entered


class Noted:
    """A world that notes when a loss is sent to the others, and when they are waited for."""

    def __init__(self, world, notes):
        self._world, self._notes = world, notes

    def __getattr__(self, name):
        return getattr(self._world, name)

    def all_gather(self, values):
        self._notes.append(SENT)
        waiter = self._world.all_gather(values)

        def wait():
            self._notes.append(RECEIVED)
            return waiter()

        return wait


def second_step(config):
    """What happens in it, each run of gradients as one."""

    def act(wire):
        notes, steps, session = [], [], virtual(config, wire)
        for parameter in session.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: notes.append(GRADIENT))

        def report(record):
            steps.append([note for note, _ in itertools.groupby(notes)])
            notes.clear()

        fit(replace(session, world=Noted(session.world, notes)), 0, 2, report, Stop())
        return steps[1]

    return simulate_replicas(act, 2)[0]


@pytest.mark.parametrize(
    "sets",
    [
        ["scheme.name=diloco", "scheme.every=3"],
        ["scheme.name=none"],
    ],
    ids=["rounds", "none"],
)
def test_others_are_waited_for_while_backward_computes(tiny, sets):
    assert second_step(tiny(*sets)) == [SENT, GRADIENT, RECEIVED]


def noted_run(config, infinite, first):
    """The second and third step of a rank, with an infinite loss of replica 1 in the third if asked."""
    notes, steps = [], []
    session = start_session(config, torch.device("cpu"))
    for parameter in session.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: notes.append(GRADIENT))
    send = Overlap._send_next

    def sending(self):
        notes.append(LEFT)
        send(self)

    def report(record):
        steps.append([note for note, _ in itertools.groupby(notes)])
        notes.clear()
        if infinite and record.step == 2 and session.rank:
            with torch.no_grad():
                next(session.model.parameters()).fill_(torch.inf)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Overlap, "_send_next", sending)
        if first:
            patch.setattr(_Agreement, "precedes_backward", True)
        patch.setattr(buckets, "SMALLEST", 2**10)
        world = Noted(session.world, notes)
        try:
            fit(replace(session, world=world), 0, 3, report, Stop())
        except NonFiniteLoss:
            steps.append([note for note, _ in itertools.groupby(notes)])
    session.optimizer.local_state()  # refused between an overlap that sent and its step
    return steps[1:], session.optimizer.step_count


@pytest.mark.parametrize("sets", [[], ["train.clip=1.0"]], ids=["plain", "clipped"])
def test_what_leaves_during_backward_is_agreed_on_before(tiny, sets):
    config = tiny("train.accumulate=2", "mesh.replicas=2", "mesh.shards=1", *sets)
    for steps, _ in run_local(noted_run, 2, [config, False, False], timeout_s=LIMIT_S):
        for step in steps:
            assert step[:5] == [GRADIENT, SENT, GRADIENT, RECEIVED, LEFT]
            assert step.count(LEFT) > 1  # in the midst of backward
    for steps, _ in run_local(noted_run, 2, [config, False, True], timeout_s=LIMIT_S):
        assert [step[:5] for step in steps] == [[GRADIENT, SENT, RECEIVED, GRADIENT, LEFT]] * 2


def test_nothing_leaves_if_a_loss_is_not_finite(tiny):
    config = tiny("mesh.replicas=2", "mesh.shards=1")
    for (_, last), done in run_local(noted_run, 2, [config, True, False], timeout_s=LIMIT_S):
        assert last == [SENT, GRADIENT, RECEIVED, GRADIENT]
        assert done == 2


def wire_memories(config):
    """What the memory of the shard wire holds after two steps, and after a third whose last loss is not finite."""
    session = start_session(config, torch.device("cpu"))
    memories, losses = [], itertools.count(1)

    def note(record=None):
        state = shard_state(session.model)
        memories.append(
            {key: digest([piece]) for key, piece in state.items() if "residual." in key}
        )

    def spoil(module, inputs, output):
        if next(losses) == 3 * config.train.accumulate and session.rank:
            output.loss.data.fill_(torch.nan)

    session.model.register_forward_hook(spoil)
    with pytest.raises(NonFiniteLoss, match="at step 3 on replica 0"):
        fit(session, 0, 3, note, Stop())
    note()
    return memories


def test_a_loss_that_is_not_finite_leaves_the_memory_of_the_wire_as_before_its_step(tiny):
    mesh = {"replicas": 1, "shards": 2, "shard_nodes": 2, "shard_gradients": "4bit"}
    config = tiny("train.accumulate=2", "scheme.name=full", mesh=mesh)
    for first, second, lost in run_local(wire_memories, 2, [config], timeout_s=LIMIT_S):
        assert first != second == lost
