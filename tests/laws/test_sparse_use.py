"""Nobody is accused for training sparsely: experts, towers and tokens that few replicas use, now and then, or for long
none. A message that is truly too loud is refused all the same."""

import logging

import pytest
import torch
from torch import nn

import detonation as dt
from covering import some
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.integrity.fault_counts import FORGIVEN, STRIKES, FaultCounts
from detonation.core.integrity.guard import FORGET, LOUDER, Expected, decide_usable
from detonation.core.integrity.message import IDENTITY, Header
from detonation.core.schemes import buckets
from zoo import KINDS, SCHEMES, TALKING

REPLICAS, ALL_USE, NONE_USES, ONE_USES = 4, 6, 40, 8
RESUMED = {
    name: SCHEMES[name]
    for name in ("demo", "demo-owner", "demo-sign", "random-sign-owner", "sparseloco")
}


class Expert(nn.Module):
    """Weights that all replicas use at first, then none for long, then the first one alone; nothing else is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 64))


def use(communicator, scheme, steps, saved=None):
    """Trains, and returns the messages refused and the state."""
    model = Expert()
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=1e-2), model, communicator, scheme
    )
    if saved:
        dt.load_replica_state(optimizer, saved[communicator.replica])
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + communicator.replica)
        used = step < ALL_USE or (step >= ALL_USE + NONE_USES and communicator.replica == 0)
        model.weight.grad = torch.randn(32, 64, generator=generator) * used
        optimizer.step()
    return optimizer.stats.refused, dt.replica_state(optimizer)


@pytest.mark.long_cases("demo-tiles-64-sign")
@some("name", TALKING, keep=KINDS)
def test_who_uses_what_others_have_not_used_for_long_is_not_refused(name):
    scheme, steps = TALKING[name], range(ALL_USE + NONE_USES + ONE_USES)
    assert [
        refused for refused, _ in simulate_replicas(lambda c: use(c, scheme, steps), REPLICAS)
    ] == [0] * REPLICAS


@pytest.mark.long_cases("demo-owner", "random-sign-owner")
@pytest.mark.parametrize("scheme", RESUMED.values(), ids=RESUMED)
def test_nor_after_a_resume_while_all_were_silent(scheme):
    silent, end = ALL_USE + NONE_USES, ALL_USE + NONE_USES + ONE_USES
    saved = [
        state for _, state in simulate_replicas(lambda c: use(c, scheme, range(silent)), REPLICAS)
    ]
    again = simulate_replicas(lambda c: use(c, scheme, range(silent, end), saved), REPLICAS)
    assert [refused for refused, _ in again] == [0] * REPLICAS


class Towers(nn.Module):
    """Two towers, of which an example uses both or only the first."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = (
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(2)
        )

    def forward(self, x, with_image):  # [batch, 64] -> [batch, 64]
        return self.text(x) + self.image(x) if with_image else self.text(x)


def two_towers(communicator):
    torch.manual_seed(0)
    model, generator = Towers(), torch.Generator().manual_seed(communicator.replica)
    scheme = dt.demo(decay=0.99)
    optimizer = dt.replicate(dt.SignSGD(model.parameters(), lr=1e-4), model, communicator, scheme)
    for step in range(80):
        with_image = step < 5 or bool(torch.rand((), generator=generator) < 0.03)
        with optimizer.overlap():
            model(torch.randn(8, 64, generator=generator), with_image).sub(
                1
            ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.stats.refused


def test_a_tower_that_few_batches_use_is_trained_to_the_end(monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**14)  # the towers are in buckets of their own
    assert simulate_replicas(two_towers, REPLICAS) == [0] * REPLICAS


def decided(norms, usual):
    """Which of messages with these norms are refused, all else being right."""
    words = torch.tensor(
        [[IDENTITY, 0, 0, sender << 32, 0, 0, 0, 0] for sender in range(len(norms))]
    )
    none = torch.zeros(len(norms), dtype=torch.int64)
    expected = Expected(Header(0, 0, 0, 0), nbytes=0, parameters=1, signals=True)
    return decide_usable(words, none, none, torch.tensor(norms), expected, usual)[0].tolist()


def test_silence_is_not_forgotten_and_a_loud_message_is_refused_in_it():
    usual = torch.zeros(1)
    assert (
        not any(decided([0.0, 0.0, 0.0, 1.0], usual)) and usual == 1
    )  # one alone cannot be told from all
    for _ in range(3):
        assert not any(decided([1.0, 2.0, 3.0, 4.0], usual))
    for _ in range(1000):
        assert not any(decided([1e-9, 1e-9, 1e-9, 0.0], usual))
    assert usual == 3
    assert not any(decided([1e-9, 1e-9, 1e-9, 1000.0], usual))
    assert decided([1e-9, 1e-9, 1e-9, 4000.0], usual) == [False, False, False, True]
    assert usual == 3


def test_what_is_usual_follows_most_and_slowly():
    usual = torch.zeros(1)
    decided([8.0, 8.0, 8.0], usual)
    for _ in range(100):
        assert not any(decided([1.0, 1.0, 1.0], usual))
    torch.testing.assert_close(usual, torch.tensor([8 * FORGET**100]))


def test_no_replica_alone_raises_what_is_usual():
    usual, norm, refused = torch.zeros(1), 1.0, []
    for _ in range(6):
        refused.append(decided([1.0, 1.0, norm], usual)[2])
        norm *= 10
    assert refused == [norm > LOUDER for norm in (1, 10, 100, 1000, 1e4, 1e5)]


def test_old_refusals_no_longer_count(caplog):
    caplog.set_level(logging.CRITICAL)
    counts = FaultCounts(["w"], 0)
    for step in range(10):
        counts.refuse(1, "does not add up", step)
        assert not counts.fatal
        for _ in range(FORGIVEN):
            counts.accept([1], 0)
    for step in range(STRIKES):
        assert not counts.fatal
        counts.refuse(1, "does not add up", step)
    assert counts.fatal and counts.refused == 10 + STRIKES
