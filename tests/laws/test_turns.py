"""Training that goes back, several optimizers and later ones, on an axis whose replicas change.

What all agree on is dated by turns, which never fall, and holds for every optimizer on the axis.
"""

import copy
import gc
import math
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.survive.agreement import ReplicaLeft, next_axis_store
from detonation.cluster.survive.membership import Membership
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.flat.tensors import digest
from limits import LIMIT_S
from steps import Died, Mortal, replicas, together
from zoo import TALKING, Plain, batch, built

MODEL = built(Plain)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
KINDS = ["full", "demo", "demo-owner", "diloco"]
TOKEN = b"0123456789abcdef"


def asked(axis, leaves):
    """Asks replica `leaves` to leave, and waits until all have agreed on it."""
    if axis._membership.replica == leaves:
        axis.depart()
    with axis._changed:
        assert axis._changed.wait_for(lambda: axis.departing, LIMIT_S)


def optimizer_of(axis, scheme, model, part=None, lr=0.1):
    sgd = torch.optim.SGD((part or model).parameters(), lr=lr)
    return dt.replicate(sgd, model, axis, scheme)


def step_of(model, optimizers, number, replica=0):
    model(batch(replica, number, 32)).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def going_back(axis, name, event):
    """Trains 10 steps, goes back to step 2, and trains on; in step 4 a replica goes."""
    model = copy.deepcopy(MODEL)
    optimizer = optimizer_of(axis, TALKING[name], model)
    for number in range(10):
        if number == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step_of(model, [optimizer], number)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    replica = axis.replica
    for number in range(2, 9):
        if number == 4 and event == "lost" and replica == 1:
            raise Died
        if number == 4 and event == "leaves":
            asked(axis, 1)
        try:
            step_of(model, [optimizer], number)
        except ReplicaLeft as error:
            return str(error)
    optimizer.synchronize()
    return flat(model), axis.size(), optimizer.build()[0].link.replicas


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("event", ["lost", "leaves"])
@pytest.mark.parametrize("name", KINDS)
def test_law_12_a_replica_goes_after_training_went_back(name, event):
    """All see the same batches, so a loss changes nothing but roundings and owners of rows.

    One that leaves gives its memory to another replica, which then sends other coefficients.
    """
    ends = replicas(partial(going_back, name=name, event=event))
    left = [ends[0], ends[2]]
    assert [end[1:] for end in left] == [(2, 2)] * 2  # adopted, in steps below the largest before
    assert torch.equal(left[0][0], left[1][0])
    assert ends[1] is None if event == "lost" else "has left after step 4" in ends[1]
    if name != "demo-owner" and (event == "lost" or name == "full"):
        whole = replicas(partial(going_back, name=name, event=""))
        torch.testing.assert_close(left[0][0], whole[0][0], **CLOSE)


def trains_with_a_door(store, replica, backs, news):
    """A member that goes back, or makes a new optimizer, before a newcomer asks to come in."""
    membership = Membership(
        next_axis_store(store, replica, 2), replica, 2, 0, 1, 30.0, 1, print, confirm_s=30.0
    )
    axis, model = Mortal(membership, 30.0), copy.deepcopy(MODEL)
    optimizer = optimizer_of(axis, TALKING["demo"], model)
    step_of(model, [optimizer], 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for number in range(20):
        step_of(model, [optimizer], number)
    if backs:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    if news:
        optimizer = optimizer_of(axis, TALKING["demo"], model)
    return on(axis, model, optimizer)


def on(axis, model, optimizer, size=3):
    door, last = dt.Admission(model, optimizer, token=TOKEN), None
    while last is None or optimizer.step_count < last:
        step_of(model, [optimizer], optimizer.step_count)
        door.after_step()
        if last is None and axis.size() == size:
            last = optimizer.step_count + 3
    axis.close()
    return optimizer.step_count, digest(model.parameters())


def comes(store):
    model = copy.deepcopy(MODEL)
    optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN)
    return on(axis, model, optimizer)


@pytest.mark.parametrize(("backs", "news"), [(True, False), (False, True), (True, True)])
def test_a_newcomer_comes_in_after_training_went_back_or_another_optimizer_was_made(backs, news):
    store = HashStore()
    members = [partial(trains_with_a_door, store, number, backs, news) for number in range(2)]
    ends = together(*members, partial(comes, store))
    assert len(set(ends)) == 1


def trains_a_part(store, replica):
    membership = Membership(
        next_axis_store(store, replica, 1), replica, 1, 0, 1, 30.0, 1, print, confirm_s=30.0
    )
    axis, model = Mortal(membership, 30.0), copy.deepcopy(MODEL)
    optimizer = optimizer_of(axis, TALKING["demo"], model, model.layers[0])
    return on(axis, model, optimizer, 2)


def test_a_newcomer_trains_later_what_no_optimizer_trained_when_it_came_in():
    """It asks for a gradient of these weights as it did before, and so the others do."""
    store, model = HashStore(), copy.deepcopy(MODEL)

    def comes_for_a_part():
        optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN)
        return on(axis, model, optimizer, 2)

    ends = together(partial(trains_a_part, store, 0), comes_for_a_part)
    assert ends[0] == ends[1]
    assert all(parameter.requires_grad for parameter in model.parameters())


class Later:
    """Lets all members make another optimizer before the same step, once the door is open."""

    def __init__(self):
        self.step = math.inf
        self.made = threading.Barrier(3)


def makes_another(store, later, replica):
    """A member that makes an optimizer between the open door and the step of the newcomer."""
    membership = Membership(
        next_axis_store(store, replica, 2), replica, 2, 0, 1, 30.0, 1, print, confirm_s=30.0
    )
    axis, model = Mortal(membership, 30.0), copy.deepcopy(MODEL)
    first = optimizer_of(axis, TALKING["demo"], model, model.layers[0])
    door = dt.Admission(model, first, token=TOKEN)
    while first.step_count < later.step:
        step_of(model, [first], first.step_count)
        door.after_step()
        if door._feed is not None:
            later.step = min(later.step, first.step_count + 3)
    another = optimizer_of(axis, TALKING["demo"], model, model.layers[1])
    assert axis.users.several
    later.made.wait(LIMIT_S)
    while axis.size() < 3:
        step_of(model, [first], first.step_count)
        door.after_step()
    found = axis.users.several
    on(axis, model, first)
    del another
    return found


def test_a_newcomer_has_only_the_optimizer_that_let_it_in_and_all_know_so():
    """Else the others would send as among several optimizers, and the newcomer as one."""
    store, later = HashStore(), Later()

    def comes_to_one_of_two():
        guest = dt.Guest(store)
        later.made.wait(LIMIT_S)
        model = copy.deepcopy(MODEL)
        optimizer, axis = dt.admitted(model, guest, token=TOKEN)
        found = axis.users.several
        on(axis, model, optimizer)
        return found

    members = [partial(makes_another, store, later, number) for number in range(2)]
    assert together(*members, comes_to_one_of_two) == [False] * 3


def memories_around(axis, every, first):
    """The memories of two optimizers before and after the step in which replica 1 leaves."""
    model = copy.deepcopy(MODEL)
    scheme = dt.demo(topk=1, chunk=16, decay=1.0, link="owner" if first else "all-gather")
    pair = [optimizer_of(axis, scheme, model, layer) for layer in model.layers]
    replica, found = axis.replica, None
    for number in range(8):
        model(batch(replica, number, 32)).mean().backward()
        if number == 5:
            asked(axis, 1)
        for place, optimizer in enumerate(pair):
            if place and number % every:
                continue
            size, before = axis.size(), [kept(each) for each in pair]
            renumber = optimizer.renumber

            def looked(optimizer=optimizer, renumber=renumber, before=before, size=size):
                nonlocal found
                try:
                    renumber()
                except ReplicaLeft:
                    found = before, None
                    raise
                if axis.size() < size:
                    found = before, [kept(each) for each in pair]

            optimizer.renumber = looked
            try:
                optimizer.step()
            except ReplicaLeft:
                return found
            finally:
                del optimizer.renumber
        model.zero_grad()
    assert all(each.build()[0].link.replicas == 2 for each in pair)
    return found


def kept(optimizer):
    """The memory of this replica, and its part of the mean of all, which it has not sent."""
    if not optimizer.is_built:
        return None
    channel = optimizer.build()[0].channel
    memory, link = channel.memory.residual.clone(), channel.link
    owned = torch.zeros_like(memory)
    if isinstance(channel.exchange, TwoStage):
        mine = [channel.exchange.residual * (each == link.replica) for each in range(link.replicas)]
        owned = channel.scheme.codec.basis.inverse(channel.exchange.owners.collect(mine))
    return memory, owned


@pytest.mark.parametrize(("every", "owner"), [(1, False), (3, False), (1, True)])
def test_law_1_all_optimizers_on_the_axis_hand_over_where_a_replica_leaves(every, owner):
    ends = replicas(partial(memories_around, every=every, first=owner))
    for place in (0, 1):
        was = mean_of([before[place] for before, _ in ends])
        now = mean_of([after[place] for _, after in (ends[0], ends[2])])
        torch.testing.assert_close(now, was, **CLOSE)
        assert ends[1][0][place][0].any()


def mean_of(found):
    """What all together have still to tell, as a part of their mean."""
    return sum(memory for memory, _ in found) / len(found) + sum(owned for _, owned in found)


def leaving_in_turns(axis, earlier):
    """Two optimizers, between whose steps replica 1 is asked to leave; replica 2 has left before."""
    model = copy.deepcopy(MODEL)
    pair = [optimizer_of(axis, TALKING["demo"], model, layer) for layer in model.layers]
    for number in range(9):
        model(batch(axis.replica, number, 32)).mean().backward()
        for place, optimizer in enumerate(pair):
            if earlier and (number, place) == (2, 0):
                asked(axis, 2)
            if (number, place) == (5, 1):
                asked(axis, 1)
            try:
                optimizer.step()
            except ReplicaLeft:
                return number, place
        model.zero_grad()
    return axis.size(), [each.build()[0].link.replicas for each in pair]


def test_a_departure_is_at_its_turn_whichever_optimizer_let_another_replica_go_before():
    *_, usual, _ = replicas(partial(leaving_in_turns, earlier=False))
    stays, then, first = replicas(partial(leaving_in_turns, earlier=True))
    assert then == usual and first < then
    assert stays == (1, [1, 1])


def moved_by_one(axis):
    """Two optimizers with open rounds, in which replica 1 alone moves, and leaves."""
    model = copy.deepcopy(MODEL)
    scheme = dt.diloco(every=1000, outer_lr=1.0, outer_momentum=0.0)
    pair = [optimizer_of(axis, scheme, model, layer) for layer in model.layers]
    replica = axis.replica
    for number in range(6):
        if number == 4:
            asked(axis, 1)
        (model(batch(0, number, 32)).mean() * (replica == 1)).backward()
        try:
            for optimizer in pair:
                optimizer.step()
        except ReplicaLeft:
            break
        model.zero_grad()
    return [(layer.weight - start.weight).detach() for layer, start in layers_of(model)]


def layers_of(model):
    return list(zip(model.layers, MODEL.layers, strict=True))


def test_the_open_rounds_of_all_optimizers_end_before_a_replica_leaves():
    ends = replicas(moved_by_one)
    for place in (0, 1):
        assert ends[1][place].any()
        for replica in (0, 2):
            torch.testing.assert_close(ends[replica][place], ends[1][place], **CLOSE)


def two_phases(axis, drops, event):
    """A second optimizer is made after 12 steps of the first, which is dropped, or not used."""
    model = copy.deepcopy(MODEL)
    first = optimizer_of(axis, dt.diloco(every=5), model)
    for number in range(12):
        step_of(model, [first], number)
    gone = weakref.ref(first)
    if drops:
        del first
        gc.collect()
        assert gone() is None
    second, replica = optimizer_of(axis, dt.full(), model), axis.replica
    for number in range(6):
        if number == 2 and event == "lost" and replica == 1:
            raise Died
        if number == 2 and event == "leaves":
            asked(axis, 1)
        try:
            step_of(model, [second], number)
        except ReplicaLeft as error:
            return str(error)
    return flat(model), axis.size(), second.levels[0][0].shared


@pytest.mark.parametrize("event", ["lost", "leaves"])
@pytest.mark.parametrize("drops", [True, False])
def test_a_later_optimizer_of_the_same_parameters_goes_on_alone(drops, event):
    """What the first left open is not completed: its anchor is older than the weights."""
    ends = replicas(partial(two_phases, drops=drops, event=event))
    assert torch.equal(ends[0][0], ends[2][0]) and ends[0][1:] == ends[2][1:] == (2, False)
    assert ends[1] is None if event == "lost" else "has left after step 2" in ends[1]
    whole = replicas(partial(two_phases, drops=drops, event=""))
    torch.testing.assert_close(ends[0][0], whole[0][0], **CLOSE)


def changing(axis, name, change):
    """All change what they train before step 3, in which replica 2 is lost."""
    model, replica = copy.deepcopy(MODEL), axis.replica
    if change == "unfreeze":
        model.layers[0].weight.requires_grad_(False)
    optimizer = optimizer_of(
        axis, TALKING[name], model, model.layers[0] if change == "add" else None
    )
    for number in range(6):
        if number == 3:
            model.layers[0].weight.requires_grad_(change != "freeze")
            if change == "add":
                optimizer.add_param_group({"params": [*model.layers[1].parameters()]})
            if replica == 2:
                axis.countdown, axis.dies_in = 0, axis._begun + 1
        step_of(model, [optimizer], number, replica)
    optimizer.synchronize()
    return digest(model.parameters())


@pytest.mark.parametrize("change", ["freeze", "unfreeze", "add"])
@pytest.mark.parametrize("name", ["full", "demo", "demo-owner", "diloco", "random-sign"])
def test_a_replica_is_lost_in_the_step_in_which_all_change_what_they_train(name, change):
    ends = replicas(partial(changing, name=name, change=change))
    assert ends[2] is None and ends[0] == ends[1] is not None


@pytest.mark.parametrize("name", TALKING)
def test_a_state_of_before_the_first_step_comes_back(name):
    """As learning-rate finders do. Memories are empty then, and anchors the weights."""
    model = copy.deepcopy(MODEL)
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(2), TALKING[name])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for _ in range(2):
        for number in range(5):
            step_of(model, [optimizer], number)
        ends.append(flat(model))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert optimizer.step_count == 0
    assert torch.equal(*ends)


@pytest.mark.parametrize("odd", ["key", "shape", "replica"])
def test_a_state_that_does_not_fit_changes_nothing(odd):
    def started():
        model = copy.deepcopy(MODEL)
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, dt.replicate(base, model, LoopbackCommunicator(2), TALKING["demo"])

    (model, optimizer), (twin, other) = started(), started()
    for number in range(3):
        step_of(model, [optimizer], number)
        step_of(twin, [other], number)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].fill_(7.0)
    (name,) = state["replication"]
    own = state["replication"][name]
    own["step"].fill_(1)
    if odd == "key":
        own["0.residual.unknown"] = own.pop("0.residual.layers.0.bias")
    if odd == "shape":
        own["0.residual.layers.0.bias"] = torch.zeros(3)
    if odd == "replica":
        state["replication"]["replica9.shard0"] = state["replication"].pop(name)
    with pytest.raises(ValueError, match=r"the same model|another (number|model)|saved the state"):
        optimizer.load_state_dict(state)
    assert optimizer.step_count == 3
    for number in range(3, 6):
        step_of(model, [optimizer], number)
        step_of(twin, [other], number)
    assert digest(model.parameters()) == digest(twin.parameters())


def test_an_optimizer_that_the_axis_does_not_use_any_more_is_let_go():
    """Also where others train on, no replica goes, and none asks to come in."""
    axis = dt.elastic(replica=0, replicas=1, store=HashStore())
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(axis, dt.full(), model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None and not axis.users.present
    axis.close()


def test_an_optimizer_that_a_report_names_stays_until_all_have_acted_on_it():
    """Whoever drops it between its report and the departure still hands over what it has not sent."""
    axis = dt.elastic(replica=0, replicas=1, store=HashStore())
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(axis, dt.full(), model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    named = axis.users.hold()
    del optimizer
    gc.collect()
    assert [user.number for user in axis.users.present] == named == [0]
    axis.users.let_go()
    gc.collect()
    assert not axis.users.present
    axis.close()
