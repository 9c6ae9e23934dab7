"""The loop of one rank: for whom it waits, and when."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.train.loop.evaluate import autocast
from detonation.train.loop.fit import fit
from detonation.train.verbs.simulate import virtual

GRADIENT, SENT, RECEIVED = "gradient", "sent", "received"


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
        [
            "scheme.name=random_sign",
            "scheme.delay=1",
            "optimizer.name=SignSGD",
            "optimizer.lr=1e-3",
        ],
        ["scheme.name=none"],
    ],
    ids=["rounds", "late", "none"],
)
def test_others_are_waited_for_while_backward_computes(tiny, sets):
    assert second_step(tiny(*sets)) == [SENT, GRADIENT, RECEIVED]


@pytest.mark.parametrize("sets", [[], ["train.clip=1.0"]], ids=["plain", "clipped"])
def test_what_leaves_during_backward_is_agreed_on_before(tiny, sets):
    assert second_step(tiny("train.accumulate=2", *sets)) == [GRADIENT, SENT, RECEIVED, GRADIENT]
