"""Law 15 where the replica that writes the log is lost: the next one goes on, and nothing is lost or repeated."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.survive.agreement import ReplicaLeft, next_axis_store
from detonation.cluster.survive.membership import Membership
from detonation.core.flat.tensors import digest
from detonation.log.records import STEP, heads
from steps import Died, Mortal, end_replica, replicas, together

SCHEMES = {
    "demo": lambda: dt.demo(topk=2, chunk=8, link="all-gather"),
    "diloco": lambda: dt.diloco(every=3),
    "streaming": lambda: dt.schemes.streaming_diloco(every=4, fragments=2, delay=1),
    "full": dt.full,
}
STEPS = 8
TOKEN = b"0123456789abcdef"


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def write(model, optimizer, log):
    with torch.no_grad():
        model.first.bias.mul_(0.5).add_(0.1)


def synchronize(model, optimizer, log):
    optimizer.synchronize()


def reset(model, optimizer, log):
    for state in optimizer.base.state.values():
        state["exp_avg"].zero_()


def rotate(model, optimizer, log):
    log.rotate()


def reconfigure(model, optimizer, log):
    optimizer.reconfigure(dt.demo(topk=3, chunk=8, link="all-gather"))


def trained(scheme, events, folder, lost=None, leaves=None, base=torch.optim.SGD):
    """A digest of the weights of the replicas that are left, and the replay of their log: its last step and the
    digest of its weights. Replica 0 is lost before step `lost`; `events` follow their steps.
    """
    models = [Pair() for _ in range(3)]

    def act(axis):
        me = axis.replica
        model = models[me]
        inner = base(model.parameters(), lr=0.05)
        optimizer = dt.replicate(inner, model, axis, SCHEMES[scheme]())
        log = dt.UpdateLog(folder)
        optimizer.record(log)
        for step in range(STEPS):
            if me == 0 and step == lost:
                raise Died
            if me == 2 and step == leaves:
                axis.depart()
            numbers = torch.Generator().manual_seed(9 * step + me)
            model(torch.randn(4, 16, generator=numbers)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for event in events.get(step + 1, ()):
                event(model, optimizer, log)
        optimizer.synchronize()
        for event in events.get("end", ()):
            event(model, optimizer, log)
        log.close()
        return digest(model.parameters())

    def act_or_leave(axis):
        try:
            return act(axis)
        except ReplicaLeft:
            return None

    ends = {end for end in replicas(act_or_leave) if end}
    assert len(ends) == 1
    model = Pair()
    again = dt.replicate(
        base(model.parameters(), lr=0.05), model, LoopbackCommunicator(3), SCHEMES[scheme]()
    )
    return ends.pop(), lambda: (dt.replay(folder, again), digest(model.parameters()))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("events", "lost"),
    [
        ({}, 0),
        ({}, 1),
        ({}, STEPS - 1),  # nobody steps after this loss
        ({2: [write, synchronize]}, 2),
        ({5: [write, synchronize, write]}, 4),
        ({5: [synchronize] * 3}, 4),
        ({4: [synchronize, write], 7: [write]}, 6),
        ({step: [rotate] for step in range(STEPS)}, 5),
        ({4: [rotate, synchronize], 6: [write, rotate]}, 6),
    ],
)
def test_law_15_a_log_that_another_replica_has_taken_over_ends_with_its_weights(
    scheme, events, lost, tmp_path
):
    end, replay = trained(scheme, events, tmp_path, lost)
    assert replay() == (STEPS, end)


def test_law_15_a_replica_that_takes_over_at_the_end_writes_the_last_write(tmp_path):
    end, replay = trained("demo", {"end": [write]}, tmp_path, STEPS - 1)
    assert replay() == (STEPS, end)


@pytest.mark.parametrize("lost", [4, 6])
def test_law_15_a_log_that_was_taken_over_still_tells_that_training_left_it(lost, tmp_path):
    _, replay = trained("demo", {4: [reset]}, tmp_path, lost, base=torch.optim.AdamW)
    with pytest.raises(
        ValueError, match="after step 4, training continued with weights or optimizer state"
    ):
        replay()


def test_law_15_a_log_has_the_step_that_found_a_loss_if_settings_change_right_after_it(tmp_path):
    trained("demo", {4: [reconfigure]}, tmp_path, lost=3)
    kinds = {(kind, step) for path in tmp_path.iterdir() for kind, _, step in heads(path)}
    assert {step for kind, step in kinds if kind == STEP} == {*range(1, STEPS + 1)}


@pytest.mark.parametrize("scheme", ["demo", "diloco", "streaming"])
def test_law_15_a_replica_leaves_right_after_a_log_was_rotated(scheme, tmp_path):
    """What its departure completes is in the new file, before the steps of the others."""
    every = {step: [rotate] for step in range(STEPS)}
    end, replay = trained(scheme, every, tmp_path, leaves=3)
    assert replay() == (STEPS, end)


def agreed(optimizer):
    return digest(tensor for each in optimizer.build() for tensor in each.shared_weights())


def replicated(model, scheme, axis):
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return dt.replicate(inner, model, axis, SCHEMES[scheme]())


def taken_over_by_a_newcomer(scheme, events, folder, lives):
    """The weights and the last step of a newcomer, and states of the run at the steps before it joined. The only other
    replica is lost `lives` steps later; `events` follow each step, but a write only once both are there.
    """
    store = HashStore()
    states = []
    models = [Pair(), Pair()]

    def steps(me, optimizer, axis):
        model = models[me]
        door = dt.Admission(model, optimizer, token=TOKEN)
        log = dt.UpdateLog(folder)
        optimizer.record(log)
        last = optimizer.step_count + STEPS if me else None
        while optimizer.step_count != last:
            step = optimizer.step_count
            if not me and last == step + STEPS - lives:
                raise Died
            numbers = torch.Generator().manual_seed(9 * step + me)
            model(torch.randn(4, 16, generator=numbers)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not last and axis._membership.guest > 1:
                last = step + STEPS
            for event in events:
                if last or event is rotate:
                    event(model, optimizer, log)
            if not last:
                states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            door.after_step()
        optimizer.synchronize()
        log.close()
        axis.close()
        return agreed(optimizer), optimizer.step_count

    def first():
        membership = Membership(next_axis_store(store, 0, 1), 0, 1, 0, 1, 30.0, 1, print, 30.0)
        axis = Mortal(membership, 30.0)
        try:
            steps(0, replicated(models[0], scheme, axis), axis)
        except Died:
            end_replica(axis)

    def newcomer():
        return steps(1, *dt.admitted(models[1], dt.Guest(store), token=TOKEN))

    _, end = together(first, newcomer)
    return end, states[-3:]


@pytest.mark.parametrize("scheme", ["demo", "diloco", "streaming"])
@pytest.mark.parametrize(
    ("events", "lives"),
    [([], 1), ([rotate], 0), ([rotate], 1), ([rotate, write], 1), ([write, rotate], 2)],
)
def test_law_15_a_newcomer_that_takes_over_the_log_keeps_what_led_to_its_join(
    scheme, events, lives, tmp_path
):
    end, states = taken_over_by_a_newcomer(scheme, events, tmp_path, lives)
    for state in (None, *states):
        model = Pair()
        again = replicated(model, scheme, LoopbackCommunicator(1))
        if state:
            model.load_state_dict(state[0])
            again.load_state_dict(state[1])
        steps = dt.replay(tmp_path, again)
        assert (agreed(again), steps) == end
