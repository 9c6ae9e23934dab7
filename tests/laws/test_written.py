"""The law of written weights: what others write between steps reaches whoever follows, bit for bit."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.flat.written import WrittenWeights, weight_places
from steps import following
from zoo import SCHEMES, Plain, batch, built

TOKEN = b"a token for tests only"
STEPS = 6
GRADIENTS = ["full", "demo", "demo-sign", "loco"]


def started(communicator, scheme, base=torch.optim.AdamW):
    model = built(Plain)
    model.layers[0].bias.requires_grad_(False)  # which a write moves alone
    return model, dt.replicate(base(model.parameters(), lr=1e-2), model, communicator, scheme)


def clamp(model, step):
    if step != 2:  # most steps, so that one follows another without a write
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)


def advance(model, optimizer, replica, steps, write=clamp):
    for step in steps:
        model(batch(replica, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        write(model, step)


@pytest.mark.parametrize("name", [*GRADIENTS, "diloco"])
def test_law_15_a_log_has_what_was_written_between_two_steps(name, tmp_path, caplog):
    def train(communicator):
        model, optimizer = started(communicator, SCHEMES[name])
        log = dt.UpdateLog(tmp_path)
        optimizer.record(log)
        advance(model, optimizer, communicator.replica, range(STEPS))
        log.close()
        return [digest([p]) for p in model.parameters()]

    with caplog.at_level(logging.WARNING):
        expected = simulate_replicas(train, 2)[0]
    told = [
        each.message
        for each in caplog.records
        if "outside of optimizer.step() wrote weights" in each.message
    ]
    assert len(told) == 1 and "layers.0.bias" in told[0]
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES[name])
    assert dt.replay(tmp_path, optimizer) == STEPS
    again = [digest([p]) for p in model.parameters()]
    if name == "diloco":  # replicas train alone between messages, and a write is part of that
        assert again[1] == expected[1]
    else:
        assert again == expected


def test_a_replay_from_a_checkpoint_before_the_write_has_it_too(tmp_path):
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    advance(model, optimizer, 0, range(2), lambda *_: None)
    saved = model.state_dict(), optimizer.state_dict()
    saved = {key: value.clone() for key, value in saved[0].items()}, torch_copy(saved[1])
    clamp(model, 0)
    advance(model, optimizer, 0, range(2, 4))
    log.close()
    other, again = started(LoopbackCommunicator(2), SCHEMES["demo"])
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert dt.replay(tmp_path, again) == 4
    assert digest(other.parameters()) == digest(model.parameters())


def test_a_write_after_the_log_has_begun_another_file_is_in_it(tmp_path):
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    for steps in (range(2), range(2, 4)):
        advance(model, optimizer, 0, steps)
        log.rotate()
        clamp(model, 0)
        with torch.no_grad():
            model.layers[1].weight.mul_(0.5)
    advance(model, optimizer, 0, range(4, 5))
    log.close()
    other, again = started(LoopbackCommunicator(2), SCHEMES["demo"])
    assert dt.replay(tmp_path, again) == 5
    assert digest(other.parameters()) == digest(model.parameters())


def torch_copy(state):
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: torch_copy(value) for key, value in state.items()}
    return [torch_copy(each) for each in state] if isinstance(state, list) else state


def swap(model, step):
    """As `load_state_dict` of a part, `.data`, and `copy_` write."""
    with torch.no_grad():
        if step % 3 == 0:
            part = {name: tensor * 0.5 for name, tensor in model.layers[0].state_dict().items()}
            model.layers[0].load_state_dict(part)
        elif step % 3 == 1:
            model.layers[1].weight.data = model.layers[1].weight * 0.5
        else:
            model.layers[0].weight.copy_(model.layers[0].weight.sign() * 0.01)


@pytest.mark.parametrize("write", [clamp, swap])
@pytest.mark.parametrize("name", GRADIENTS)
def test_law_15_a_follower_has_what_was_written_between_two_steps(name, write):
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES[name])
    served = built(Plain)
    with following(model, optimizer, served, TOKEN) as (_, follower):
        advance(model, optimizer, 0, range(STEPS), write)
    assert follower.joins == 1 and follower.step == STEPS
    assert digest(served.parameters()) == digest(model.parameters())


def test_what_training_moves_by_itself_is_no_write(tmp_path, caplog):
    def train(communicator):
        model, optimizer = started(communicator, SCHEMES["random-sign"], dt.SignSGD)
        optimizer.record(dt.UpdateLog(tmp_path))
        advance(model, optimizer, communicator.replica, range(3), lambda *_: None)
        optimizer.synchronize()
        with torch.no_grad():
            model(batch(0, 0, 32))  # an evaluation
        advance(model, optimizer, communicator.replica, range(3, 5), lambda *_: None)

    with caplog.at_level(logging.WARNING):
        simulate_replicas(train, 2)
    assert not [
        each
        for each in caplog.records
        if "outside of optimizer.step() wrote weights" in each.message
    ]


def test_every_write_that_torch_counts_is_found():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    weights = WrittenWeights(weight_places(model))
    assert not weights.found()  # nothing was noted
    first, last = model[0].weight, model[2]
    with torch.no_grad():
        for write in (
            lambda: first.clamp_(-1, 1),
            lambda: first.detach().add_(1),
            lambda: first[0].zero_(),
            lambda: setattr(first, "data", first.clone()),
            lambda: model[0].load_state_dict(model[0].state_dict()),
            lambda: setattr(model[0], "weight", nn.Parameter(first.clone())),
        ):
            weights.note()
            assert not weights.found()
            write()
            assert "0.weight" in weights.found() and "2.weight" not in weights.found()
    weights.note()
    last.weight.data.add_(1)  # which torch does not count: the documents say so
    assert not weights.found()


def momenta(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def test_a_dropped_optimizer_lets_go_of_its_base():
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=0), nn.Linear(4, 4))
    base = dt.SignSGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(2), dt.random_sign(rate=0.5))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert base._optimizer_step_pre_hooks
    del optimizer
    gc.collect()
    assert not base._optimizer_step_pre_hooks
    base.step()


class Tied(nn.Module):
    """The weights of an embedding are the output layer, too, which no module says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8, padding_idx=0)

    def forward(self, x):
        return nn.functional.linear(self.embedding(x).tanh(), self.embedding.weight)


SMEARING = {
    "demo": dt.demo(topk=4, chunk=16),
    "random-sign": dt.random_sign(rate=0.5),
    "muloco-2bit": dt.muloco(every=1, precision="2bit"),
    "demo-owner": SCHEMES["demo-owner"],
}


@pytest.mark.parametrize("name", SMEARING)
def test_law_11_a_padding_row_with_a_gradient_on_any_replica_moves(name, tmp_path):
    def train(communicator):
        model = Tied()
        base = dt.SignSGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(base, model, communicator, SMEARING[name])
        log = dt.UpdateLog(tmp_path)
        optimizer.record(log)
        for _ in range(4):
            if communicator.replica:  # the other one uses the embedding alone
                x = torch.tensor([1, 2])
                nn.functional.cross_entropy(model(x), x + 1).backward()
            else:
                model.embedding(torch.tensor([1, 2])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        log.close()
        return model.embedding.weight.detach().clone()

    first, second = simulate_replicas(train, 2)
    assert torch.equal(first, second) and first[0].any()
    model = Tied()
    again = dt.replicate(
        dt.SignSGD(model.parameters(), lr=0.1), model, LoopbackCommunicator(2), SMEARING[name]
    )
    dt.replay(tmp_path, again)
    assert torch.equal(model.embedding.weight, first)


def test_an_error_that_comes_again_says_what_ends_it():
    def act(communicator):
        model, optimizer = started(communicator, dt.demo())
        texts = []
        for step in range(3):
            model(batch(communicator.replica, step, 32)).mean().backward()
            if step == 0:
                model.layers[0].weight.grad.fill_(torch.nan)
            with pytest.raises(dt.errors.NonFiniteGradient) as raised:
                optimizer.step()
            texts.append(str(raised.value))
            optimizer.zero_grad()
        return texts

    first, second = simulate_replicas(act, 2)
    assert first == second and "at step 0" in first[0] and "load a checkpoint" not in first[0]
    for text in first[1:]:
        assert text.startswith(first[0]) and "load a checkpoint" in text


def test_a_compiled_loop_steps():
    model = nn.Linear(8, 8)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, LoopbackCommunicator(2), dt.demo()
    )

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        step()
    assert optimizer.step_count == 2


def test_a_log_that_nobody_closes_lets_go_of_its_file(tmp_path):
    def train():
        model, optimizer = started(LoopbackCommunicator(2), dt.demo())
        optimizer.record(dt.UpdateLog(tmp_path))
        advance(model, optimizer, 0, range(2), lambda *_: None)

    train()
    gc.collect()
    opened = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.suffix == ".updates"]


def momenta_reset(model, optimizer, other):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def state_dropped(model, optimizer, other):
    optimizer.state.clear()


def base_loaded(model, optimizer, other):
    optimizer.base.load_state_dict(other[1].base.state_dict())


def everything_loaded(model, optimizer, other):
    """The state of another run, after as many steps."""
    model.load_state_dict(other[0].state_dict())
    optimizer.load_state_dict(other[1].state_dict())


def memory_lost(model, optimizer, other):
    state = other[1].state_dict()
    del state["replication"]
    optimizer.load_state_dict(state)


CHANGES = [momenta_reset, state_dropped, base_loaded, everything_loaded, memory_lost]


def changed(tape, change):
    """A training whose optimizer's state somebody changes after three steps; yields the model before and after."""
    other = started(LoopbackCommunicator(2), SCHEMES["demo"])
    advance(*other, 7, range(3), lambda *_: None)
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    log = tape(model, optimizer)
    optimizer.record(log)
    yield model, optimizer, log
    advance(model, optimizer, 0, range(3), lambda *_: None)
    yield model, optimizer, log
    change(model, optimizer, other)
    advance(model, optimizer, 0, range(3, STEPS), lambda *_: None)
    yield model, optimizer, log


@pytest.mark.parametrize("change", CHANGES)
def test_law_15_a_replay_ends_before_a_change_of_the_optimizers_state(change, tmp_path):
    phases = changed(lambda *_: dt.UpdateLog(tmp_path), change)
    next(phases)
    before = digest(next(phases)[0].parameters())
    next(phases)[-1].close()
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    assert dt.replay(tmp_path, optimizer, to=3) == 3 and digest(model.parameters()) == before
    with pytest.raises(
        ValueError, match="after step 3, training continued with weights or optimizer state"
    ):
        dt.replay(tmp_path, optimizer)


def test_a_state_that_only_moved_to_other_memory_is_no_change(tmp_path):
    def moved(model, optimizer, other):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()

    *_, (trained, _, log) = changed(lambda *_: dt.UpdateLog(tmp_path), moved)
    log.close()
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    assert dt.replay(tmp_path, optimizer) == STEPS
    assert digest(model.parameters()) == digest(trained.parameters())


@pytest.mark.parametrize("change", CHANGES)
def test_law_15_a_follower_comes_again_after_a_change_of_the_optimizers_state(change):
    phases = changed(lambda *of: dt.Feed(*of, "127.0.0.1:0", token=TOKEN), change)
    _, optimizer, feed = next(phases)
    served = built(Plain)
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        trained, _, _ = next(phases)

        def train_until_it_has_joined(times):
            while follower.joins < times:
                advance(trained, optimizer, 0, [optimizer.step_count], lambda *_: None)
                follower.update(wait_s=0.01)

        train_until_it_has_joined(1)  # before the change
        next(phases)
        train_until_it_has_joined(2)
        feed.close()
        while not follower.ended:
            follower.update(wait_s=1)
    assert follower.step == optimizer.step_count
    assert digest(served.parameters()) == digest(trained.parameters())


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_weight_of_another_kind_is_refused_by_name(what):
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES["demo"])
    advance(model, optimizer, 0, range(1), lambda *_: None)
    weight = model.layers[1].weight
    if what == "dtype":
        model.half()
    else:
        weight.grad = None
        weight.data = weight.data[:-1].clone()
    with pytest.raises(ValueError, match=r"layers\.\d\.weight is .* was .* at the last step"):
        optimizer.step()
