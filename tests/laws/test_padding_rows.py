"""A padding row whose first gradient comes late moves from then on, on all replicas and for all readers."""

import pytest
import torch
from test_written import SMEARING, TOKEN
from torch import nn

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.link.link import Link
from steps import following, step_on

FIRST = 3
"""The first step in which anybody uses the words."""
STEPS = 6
SAFETY = dt.Safety(verify_every=2)
NEVER = dt.Safety(verify_every=0)


class Words(nn.Module):
    """Words that some batches use, and with them the padding, as an output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.words = nn.Embedding(16, 8, padding_idx=0)

    def forward(self, x, use):
        hidden = self.trunk(x).tanh()
        if use == "nothing":
            return hidden.square().mean()
        hidden = hidden + self.words(torch.tensor([1, 2]))
        if use == "words":
            return hidden.square().mean()
        return nn.functional.linear(hidden, self.words.weight).exp().mean()


MODEL = Words()


def started(communicator, scheme, safety=SAFETY):
    model = Words()
    model.load_state_dict(MODEL.state_dict())
    base = dt.SignSGD(model.parameters(), lr=0.1)
    return model, dt.replicate(base, model, communicator, scheme, safety=safety)


def train(model, optimizer, replica, uses, overlap=False):
    """`uses`: of each step, by replica."""
    rows = []
    for step, use in enumerate(uses):
        x = torch.ones(2, 8) * (1 + step + replica)
        step_on(optimizer, model(x, use[replica]), overlap)
        optimizer.zero_grad()
        rows.append(bool(model.words.weight[0].any()))
    return rows


LATE = [("nothing", "nothing")] * FIRST + [("words", "output")] * (STEPS - FIRST)
"""No replica uses the words at first; then one uses their padding row, too."""
SPORADIC = [("words", "words")] * FIRST + [("words", "output")] * (STEPS - FIRST)
"""A replica uses the padding row some steps after all have used the words."""


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("name", SMEARING)
def test_law_11_a_padding_row_moves_from_its_first_gradient_on(name, overlap, tmp_path):
    def act(communicator):
        model, optimizer = started(communicator, SMEARING[name])
        log = dt.UpdateLog(tmp_path)
        optimizer.record(log)
        rows = train(model, optimizer, communicator.replica, LATE, overlap)
        log.close()
        return rows, model.words.weight.detach().clone()

    (rows, first), (_, second) = simulate_replicas(act, 2)
    assert rows == [False] * FIRST + [True] * (STEPS - FIRST)
    assert torch.equal(first, second)
    model, again = started(LoopbackCommunicator(2), SMEARING[name])
    dt.replay(tmp_path, again)
    assert torch.equal(model.words.weight, first)


@pytest.mark.parametrize("name", ["demo", "muloco-2bit"])
def test_law_11_a_padding_row_that_is_used_later_moves_from_the_next_comparison_on(name):
    def act(communicator):
        model, optimizer = started(communicator, SMEARING[name])
        return train(model, optimizer, communicator.replica, SPORADIC)

    first, second = simulate_replicas(act, 2)
    assert first == second == [False] * (FIRST + 1) + [True] * (STEPS - FIRST - 1)


def resumed(mesh, name, folder):
    """The words of a run, and of one that goes on from a checkpoint; the padding row has one gradient, before it."""
    weights = []
    for begun in (True, False):
        model = Words()
        model.load_state_dict(MODEL.state_dict())
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = dt.replicate(base, model, mesh["replicate"], SMEARING[name], safety=SAFETY)
        replica = mesh["replicate"].get_local_rank()
        if begun:
            train(model, optimizer, replica, [("output", "words")] * 2)
            dt.save_checkpoint(folder, model, optimizer)
        else:
            dt.load_checkpoint(folder, model, optimizer)
        train(model, optimizer, replica, [("words", "words")] * 2)
        weights.append(model.words.weight.detach().clone())
    return weights


@pytest.mark.parametrize("name", ["demo", "muloco-2bit"])
def test_law_9_a_padding_row_that_moves_goes_on_from_a_checkpoint(name, tmp_path):
    for weights, again in worlds.run(resumed, 2, 1, name, tmp_path):
        assert torch.equal(weights, again) and weights[0].any()


def test_law_15_a_follower_has_a_padding_row_that_moves_late():
    model, optimizer = started(LoopbackCommunicator(2), SMEARING["demo"])
    served = Words()
    with following(model, optimizer, served, TOKEN) as (feed, follower):
        train(model, optimizer, 0, [("nothing",)] * FIRST)
        while follower.step < optimizer.step_count:
            follower.update(wait_s=0.01)
        train(model, optimizer, 0, [("output",)] * 2)
        while follower.joins < 2 or not feed.followers:
            train(model, optimizer, 0, [("output",)])
            follower.update(wait_s=0.01)
    assert torch.equal(served.words.weight, model.words.weight) and served.words.weight[0].any()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_replicas_ask_about_padding_rows_only_until_they_know(first, monkeypatch):
    """`first`: the step in which a replica has a gradient of the words. Later steps exchange
    nothing about them."""
    asked = [0] * 4
    collect = Link.collect

    def counted(link, mine, *options, **named):
        if not link.replica and mine.dtype == torch.int64:
            asked[optimizers[0].step_count] += 1
        return collect(link, mine, *options, **named)

    monkeypatch.setattr(Link, "collect", counted)
    uses = [("words" if step == first else "nothing", "nothing") for step in range(len(asked))]
    optimizers = {}

    def act(communicator):
        model, optimizer = started(communicator, next(iter(SMEARING.values())), NEVER)
        optimizers[communicator.replica] = optimizer
        train(model, optimizer, communicator.replica, uses)

    simulate_replicas(act, 2)
    assert [bool(each) for each in asked] == [step <= first for step in range(len(asked))]
