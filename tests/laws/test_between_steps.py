"""The law of the log, for what comes between two steps: writes, `synchronize`, saves and new files in any order."""

import copy
from itertools import permutations

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from steps import STEPS, advance, bases, started
from zoo import Plain, batch, built

AT = 3
"""The step after which all events come: in the middle of a round, with updates in flight."""
SCHEMES = {
    "demo": dt.demo(),
    "diloco": dt.diloco(every=4),
    "streaming": dt.schemes.streaming_diloco(every=4, fragments=2, delay=1),
}
ORDERS = [
    *permutations(("write", "synchronize", "save", "rotate")),
    ("synchronize", "save", "synchronize"),
    ("write", "synchronize", "write", "save", "synchronize", "write"),
    ("write", "synchronize", "save", "write", "synchronize"),
    ("save", "write", "rotate", "synchronize", "save"),
    ("save", "rotate", "synchronize", "rotate", "write"),
    ("rotate", "synchronize", "rotate", "save", "write", "rotate", "synchronize"),
    ("synchronize", "rotate", "write", "save", "rotate", "synchronize", "rotate"),
]


def trained(folder, scheme, order, oldest):
    """The weights at the end of a run whose `order` of events comes after step `AT`."""
    model, optimizer = started(LoopbackCommunicator(1), scheme)
    log = dt.UpdateLog(folder / "updates")
    optimizer.record(log)
    advance(model, optimizer, 0, range(AT))
    for event in order:
        if event == "write":
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
        elif event == "synchronize":
            optimizer.synchronize()
        elif event == "save":
            dt.save_checkpoint(folder / "checkpoints", model, optimizer)
        else:
            log.rotate(oldest)
    advance(model, optimizer, 0, range(AT, STEPS))
    optimizer.synchronize()
    log.close()
    return digest(model.parameters())


def repeated(folder, scheme, saved):
    """The weights after a replay, from the checkpoint or from the beginning."""
    model, optimizer = started(LoopbackCommunicator(1), scheme)
    if saved:
        dt.load_checkpoint(folder / "checkpoints", model, optimizer)
    if dt.replay(folder / "updates", optimizer) != STEPS:
        return ""
    return digest(model.parameters())


def wrong(_, folder, name):
    """The orders of events after which a replay ends with other weights than training."""
    found = []
    for number, order in enumerate(ORDERS):
        for oldest in (0, AT):
            place = folder / f"{number}-{oldest}"
            end = trained(place, SCHEMES[name], order, oldest)
            starts = [True, False][: 2 - bool(oldest)]  # files up to `oldest` are gone
            for saved in starts:
                if repeated(place, SCHEMES[name], saved) != end:
                    found.append((order, oldest, saved))
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_and_its_log_end_alike_whatever_comes_between_two_steps(name, tmp_path):
    assert worlds.run(wrong, 1, 1, tmp_path, name) == [[]]


def test_a_replay_may_stop_after_any_step(tmp_path):
    """Also where a step did not use a parameter."""
    scheme = dt.loco(precision="bf16")
    model, optimizer = started(LoopbackCommunicator(1), scheme)
    optimizer.record(dt.UpdateLog(tmp_path))
    weights = []
    for step in range(STEPS):
        if step == AT + 2:
            optimizer.state_dict()
        model(batch(0, step, 32)).mean().backward()
        if step == AT + 1:
            next(model.parameters()).grad = None
        optimizer.step()
        optimizer.zero_grad()
        weights.append(digest(model.parameters()))
    again, replaying = started(LoopbackCommunicator(1), scheme)
    found = []
    for step in range(1, STEPS + 1):
        dt.replay(tmp_path, replaying, to=step)
        found.append(digest(again.parameters()))
    assert found == weights


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("order", ["w", "s", "ws", "sw", "wsw", "sws"])
def test_a_replay_from_a_state_dict_repeats_writes_and_completions_in_any_order(
    name, order, tmp_path
):
    """A state dict does not say how often rounds were completed after its step, nor what was written."""
    scheme = SCHEMES[name]
    model, optimizer = started(LoopbackCommunicator(1), scheme)
    optimizer.record(dt.UpdateLog(tmp_path))
    advance(model, optimizer, 0, range(AT))
    saved = []
    for event in order:
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if event == "s":
            optimizer.synchronize()
        else:
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
    saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    advance(model, optimizer, 0, range(AT, STEPS))
    optimizer.synchronize()
    for weights, state in saved:
        again, replaying = started(LoopbackCommunicator(1), scheme)
        again.load_state_dict(weights)
        replaying.load_state_dict(state)
        assert dt.replay(tmp_path, replaying) == STEPS
        assert digest(again.parameters()) == digest(model.parameters())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_write_to_a_weight_of_no_optimizer_is_repeated(frozen, tmp_path):
    def new():
        model = nn.Sequential(built(Plain), nn.Linear(4, 1))
        model[0].requires_grad_(not frozen)
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter.fill_(0.5)
        base = bases(model[1].parameters())
        return model, dt.replicate(base, model, LoopbackCommunicator(2), dt.full())

    model, optimizer = new()
    optimizer.record(dt.UpdateLog(tmp_path))
    for step in range(STEPS):
        if step == AT:
            with torch.no_grad():
                next(model[0].parameters()).mul_(0.5)
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        model.zero_grad()
    again, replaying = new()
    assert dt.replay(tmp_path, replaying) == STEPS
    assert digest(again.parameters()) == digest(model.parameters())


@pytest.mark.parametrize("name", ["diloco", "streaming"])
@pytest.mark.parametrize("at", [AT, AT + 1])
def test_a_state_dict_that_includes_a_completion_goes_on_as_training_did(name, at, tmp_path):
    """Repeating the completion changes nothing, and its messages do not serve the next round."""
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES[name])
    optimizer.record(dt.UpdateLog(tmp_path))
    advance(model, optimizer, 0, range(at))
    optimizer.synchronize()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    advance(model, optimizer, 0, range(at, STEPS))
    optimizer.synchronize()
    again, replaying = started(LoopbackCommunicator(2), SCHEMES[name])
    again.load_state_dict(saved[0])
    replaying.load_state_dict(saved[1])
    assert dt.replay(tmp_path, replaying) == STEPS
    assert digest(again.parameters()) == digest(model.parameters())


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_last_step_of_a_replay_includes_what_came_after_it(name, rotates, tmp_path):
    """Also where that stands in a file of its own."""
    model, optimizer = started(LoopbackCommunicator(1), SCHEMES[name])
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    advance(model, optimizer, 0, range(AT))
    if rotates:
        log.rotate()
    optimizer.synchronize()
    end = digest(model.parameters())
    advance(model, optimizer, 0, range(AT, STEPS))
    log.close()
    again, replaying = started(LoopbackCommunicator(1), SCHEMES[name])
    assert dt.replay(tmp_path, replaying, to=AT) == AT
    assert digest(again.parameters()) == end


@pytest.mark.parametrize("name", ["streaming", "diloco"])
def test_a_log_goes_on_in_another_process_with_updates_in_flight(name, tmp_path):
    """From the beginning, from a checkpoint before the end of the first process, and from the one at its end."""
    assert worlds.run(restarted, 1, 1, tmp_path, name) == [[]]


def restarted(_, folder, name):
    """The states from which a replay ends with other weights than training."""
    scheme = SCHEMES[name]
    for part, steps in enumerate((range(AT), range(AT, AT + 2), range(AT + 2, STEPS))):
        model, optimizer = started(LoopbackCommunicator(1), scheme)
        if part:
            dt.load_checkpoint(folder / f"checkpoints-{part - 1}", model, optimizer)
        log = dt.UpdateLog(folder / "updates")
        optimizer.record(log)
        advance(model, optimizer, 0, steps)
        dt.save_checkpoint(folder / f"checkpoints-{part}", model, optimizer)
        if part == 2:
            optimizer.synchronize()
        log.close()
    end, found = digest(model.parameters()), []
    for part in (None, 0, 1):
        again, replaying = started(LoopbackCommunicator(1), scheme)
        if part is not None:
            dt.load_checkpoint(folder / f"checkpoints-{part}", again, replaying)
        if dt.replay(folder / "updates", replaying) != STEPS or digest(again.parameters()) != end:
            found.append(part)
    return found


def test_a_state_dict_taken_after_reconfigure_goes_on_with_the_new_settings(tmp_path):
    model, optimizer = started(LoopbackCommunicator(2), dt.demo(topk=2))
    optimizer.record(dt.UpdateLog(tmp_path))
    advance(model, optimizer, 0, range(AT))
    optimizer.reconfigure(dt.demo(topk=4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    advance(model, optimizer, 0, range(AT, STEPS))
    again, replaying = started(LoopbackCommunicator(2), dt.demo(topk=4))
    again.load_state_dict(saved[0])
    replaying.load_state_dict(saved[1])
    assert dt.replay(tmp_path, replaying) == STEPS
    assert digest(again.parameters()) == digest(model.parameters())
