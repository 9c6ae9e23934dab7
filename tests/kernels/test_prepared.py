"""What a step on kernels prepares once, such as runs of a message and launches, is made again where it changes."""

import copy

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.integrity.message import Message
from steps import Passing

SHAPES = [(70, 64), (3,), (20, 64)]


def of(topk=2):
    return dt.demo(topk=topk, precision="sign", error_feedback=False)


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")


def forget(optimizer):
    """Drops all that the kernels of an optimizer have prepared."""
    channel = optimizer.build()[0].channel
    channel.engine._coders.clear()
    channel.exchange._workspace._kept.clear()
    for name in ("_inspector", "_sums", "_reports"):
        vars(channel.exchange._guard).pop(name, None)
    vars(channel.scheme.codec).pop("derived", None)


def trained(early, forgets):
    """The weights after each step of a run in which all changes that a step may meet."""
    drawn = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList([torch.randn(shape, generator=drawn) for shape in SHAPES])
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, Passing(LoopbackCommunicator(2)), of())
    saved, found = None, []
    for step in range(9):
        if step == 2:
            optimizer.param_groups[0]["lr"] = 1e-2
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
        if step == 4:
            optimizer.reconfigure(of(topk=3))
        if step == 5:
            optimizer.reconfigure(of())
            optimizer.load_state_dict(saved)
        if step == 6:
            model[1].requires_grad_(False)
        if step == 7:
            model[0].data = model[0].detach().clone()
        if step == 8:
            model[1].requires_grad_(True)
        if forgets and step:
            forget(optimizer)
        optimizer.zero_grad()
        loss = sum((torch.randn(p.shape, generator=drawn) * p).sum() for p in model)
        if early and step % 2:  # a message in buckets, between messages in one collective
            with optimizer.overlap():
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        found += [parameter.detach().clone() for parameter in model]
    return found


def started():
    model = torch.nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    return dt.replicate(base, model, Passing(LoopbackCommunicator(2)), of())


def run_of(exchange, step, rows):
    return exchange.run(Message(step, exchange._codec), 0, rows)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, in the interpreter
@pytest.mark.long_cases("at once")
@pytest.mark.parametrize("early", [False, True], ids=["at once", "early"])
def test_what_a_step_prepares_changes_no_bit_whatever_changes_between_steps(early):
    kept, forgotten = (trained(early, forgets) for forgets in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(kept, forgotten, strict=True))


def test_a_step_reuses_the_run_of_its_message_and_not_one_of_other_rows():
    exchange = started().build()[0].channel.exchange
    rows = exchange._rows
    sent = [run_of(exchange, step, rows) for step in range(2)]
    fewer = run_of(exchange, 2, rows - 8)
    again = run_of(exchange, 3, rows)
    assert sent[0] is sent[1] and fewer.rows == rows - 8
    assert again.rows == rows and again is not sent[0]
    signs = {run_of(exchange, step, rows).negative_zeros for step in range(4)}
    assert signs == {False, True}
