"""The law of admission: a replica that comes in while others train is one of them from an agreed step on."""

import copy
import gc
import math
import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import detonation as dt
from detonation.cluster.processes import waiting
from detonation.cluster.survive import elastic_axis, membership, port
from detonation.cluster.survive.agreement import (
    ReplicaLeft,
    ReplicaLost,
    axis_key,
    next_axis_store,
    note_gone,
)
from detonation.cluster.survive.groups import GroupAhead
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.cluster.survive.users import AxisUser, Host
from detonation.core.flat.tensors import digest
from detonation.feed import admission
from limits import LIMIT_S, Clock, until
from steps import Died, bases, together, unsent
from zoo import TALKING, Plain, batch, built

REPLICAS, AFTER = 2, 4
TOKEN = b"0123456789abcdef"
MODEL = built(Plain)
COMING = ("demo", "demo-owner", "random", "full", "diloco", "streaming")
"""One of each way: all-gather, owners, all-reduce of a part and of all, anchors, and a round with a delay."""


def steps(model, optimizer, axis, door):
    """Trains until the newcomer is in, or gone, and some steps more."""
    last = None
    while last is None or optimizer.step_count < last:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + optimizer.step_count)
        if not optimizer.idle:
            model(batch(axis.replica, optimizer.step_count, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        door.after_step()
        if last is None and axis._membership.guest > REPLICAS:  # as all know at the same step
            last = optimizer.step_count + AFTER
    optimizer.synchronize()
    agreed = [tensor for each in optimizer.build() for tensor in each.shared_weights()]
    axis.close()
    return digest(agreed), digest(model.parameters()), optimizer.step_count, axis.size()


class Clumsy(SurvivingCommunicator):
    """A replica that cannot use the first group that is formed after all have agreed on the step of a newcomer."""

    failed = False

    def _formed(self):
        group, store = super()._formed(), self._membership.store
        if not self.failed and store.check([axis_key("ready", self._membership.guest, 0)]):
            self.failed = True
            group.abandon()
            raise RuntimeError
        return group


def member(store, replica, scheme, balance=False, kind=SurvivingCommunicator):
    own = next_axis_store(store, replica, REPLICAS)
    membership = Membership(own, replica, REPLICAS, 0, 1, 30.0, 1, print, confirm_s=30.0)
    axis, model = kind(membership, 30.0), copy.deepcopy(MODEL)
    safety = dt.Safety(verify_every=1)
    base = bases(model.parameters())
    optimizer = dt.replicate(base, model, axis, scheme, clip=0.5, balance=balance, safety=safety)
    return steps(model, optimizer, axis, dt.Admission(model, optimizer, token=TOKEN))


def newcomer(store, scheme):
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    safety = dt.Safety(verify_every=1)
    optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN, safety=safety)
    return steps(model, optimizer, axis, dt.Admission(model, optimizer, token=TOKEN))


@pytest.mark.parametrize("ended", [False, True])
def test_a_newcomer_that_nobody_lets_in_does_not_wait_for_ever(ended, monkeypatch):
    """The others agree on no step, as another shard of the newcomer never has its state; or training ends."""
    clock = Clock()  # it waits for the state as long as that takes, and then in no time
    ready = []

    def entry(guest):
        clock.sleep(LIMIT_S if ready and not ended else 0.0)

    monkeypatch.setattr(dt.Guest, "ready", lambda guest: ready.append(guest))
    monkeypatch.setattr(dt.Guest, "entry", entry)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=clock))
    store, model = HashStore(), copy.deepcopy(MODEL)
    axis = dt.elastic(replica=0, replicas=1, store=store)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
    door, came = dt.Admission(model, optimizer, token=TOKEN), []

    def come_in():
        with pytest.raises(ReplicaLost) as raised:
            dt.admitted(copy.deepcopy(MODEL), dt.Guest(store), token=TOKEN, timeout_s=LIMIT_S)
        came.append(str(raised.value))

    newcomer = threading.Thread(target=come_in, daemon=True)
    newcomer.start()
    while door._feed is None or not door._feed._subscribed:
        model(batch(0, optimizer.step_count, 32)).mean().backward()
        optimizer.step()
        door.after_step()
    if ended:
        door._feed.close()
    newcomer.join()
    door._feed.close()
    axis.close()
    what = f"training ended after {optimizer.step_count} steps, before replica 1 joined"
    disagreed = f"the other replicas did not agree on a step for replica 1 within {LIMIT_S} s"
    assert came == [what if ended else disagreed]


@pytest.mark.parametrize("how", ["left", "killed", "silent"])
def test_a_newcomer_hears_at_once_that_the_run_has_ended(how, monkeypatch):
    """Before it counts as one, and while it waits; as ever where one of the replicas is there."""
    monkeypatch.setattr(port, "_PRESENT_S", 0.0)
    store = HashStore()
    axes = together(
        *(partial(dt.elastic, replica=replica, replicas=2, store=store) for replica in (0, 1))
    )
    guest = dt.Guest(store)
    own = guest.membership.store
    axes[1].host.membership.stop()
    note_gone(own, 1)
    guest.hosts.require()
    axes[0].host.membership.stop()
    if how == "left":
        own.set(axis_key("left", 0), "1")
    elif how == "killed":
        note_gone(own, 0)
    else:
        guest.hosts._silence_s = 0.0
        guest.hosts.require()
        monkeypatch.setattr(port, "pace_of", lambda beat: 0.0)
    with pytest.raises(ReplicaLost, match="the run whose replicas met here has ended: start it"):
        guest.addresses(LIMIT_S)
    guest.membership.stop()
    if how != "silent":
        with pytest.raises(ReplicaLost, match="has ended: start it again, or give the address"):
            dt.Guest(store)
        assert own.add("numbers", 0) == 1  # it did not count as a newcomer


def test_a_newcomer_hears_why_the_run_cannot_let_it_in(monkeypatch):
    """The machine that lets it in has no token."""
    monkeypatch.delenv("DETONATION_TOKEN", raising=False)
    store, model, said = HashStore(), copy.deepcopy(MODEL), []
    axis = dt.elastic(replica=0, replicas=1, store=store)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
    door = dt.Admission(model, optimizer)

    def come_in():
        with pytest.raises(ReplicaLost) as raised:
            dt.admitted(copy.deepcopy(MODEL), dt.Guest(store), token=TOKEN, timeout_s=LIMIT_S)
        said.append(str(raised.value))

    newcomer = threading.Thread(target=come_in)
    newcomer.start()
    while newcomer.is_alive():
        model(batch(0, optimizer.step_count, 32)).mean().backward()
        optimizer.step()
        door.after_step()
    assert said[0].startswith("the run cannot let replica 1 in: ") and "token" in said[0]
    axis.close()


@pytest.mark.parametrize("dropped", [False, True])
def test_all_wait_for_a_collection_of_garbage_only_for_an_optimizer_that_was_dropped(
    dropped, monkeypatch
):
    """All wait for the replica that lets a newcomer in, and its heap may be large."""
    store = HashStore()
    model = copy.deepcopy(MODEL)
    axis = dt.elastic(replica=0, replicas=1, store=store)
    collect = gc.collect
    gc.disable()
    try:
        optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
        if dropped:
            optimizer.base.cycle = optimizer
        optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
        door = dt.Admission(model, optimizer, token=TOKEN)
        collections = []
        monkeypatch.setattr(gc, "collect", lambda: collections.append(collect()))
        guest = dt.Guest(store)
        until(lambda: axis.host.guest is not None)
        door.after_step()
        assert guest.addresses(LIMIT_S)
        assert len(collections) == dropped
    finally:
        gc.enable()
    guest.membership.stop()
    axis.close()


def test_a_newcomer_where_nobody_has_met_says_for_whom_it_waits(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "MEET_LINE_S", 0.0)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(
        ReplicaLost, match=r"no run has started at this store within 0\.1 s: start the run"
    ):
        dt.Guest(store)
    assert "this replica has waited for 0 s, at most 0.1, for the first replicas" in caplog.text


def left_behind(store):
    """A newcomer that ends when all wait for it."""
    guest, model = dt.Guest(store), copy.deepcopy(MODEL)
    with dt.follow(model, guest.addresses(LIMIT_S), token=TOKEN) as follower:
        guest.ready()
        while guest.entry() is None:
            follower.update(wait_s=0.01)
    guest.membership.leave(0)


@pytest.mark.parametrize(
    ("name", "balance"),
    [*((name, False) for name in COMING), ("diloco", True), ("streaming", True)],
)
def test_a_newcomer_is_equal_to_the_others_from_its_first_step_on(name, balance, caplog):
    store, scheme = HashStore(), TALKING[name]
    members = [
        lambda replica=replica: member(store, replica, scheme, balance)
        for replica in range(REPLICAS)
    ]
    with caplog.at_level("INFO", "detonation.feed"):
        ends = together(*members, lambda: newcomer(store, scheme))
    assert len(ends) == REPLICAS + 1
    assert caplog.text.count(" has joined") == 1, caplog.text
    assert "have changed" not in caplog.text
    assert len(set(ends)) == 1 and ends[0][-1] == REPLICAS + 1


def test_a_newcomer_enters_in_a_group_that_all_have_formed_before_its_step(monkeypatch):
    """So nobody waits for connections at that step. A rank counts as late here until all have begun."""
    begun, taken = [], []
    begin, take, await_guest = GroupAhead.__init__, GroupAhead.take, AxisUser._await_guest

    def begins(ahead, *arguments):
        begin(ahead, *arguments)
        begun.append(ahead)

    def formed(ahead):
        ahead._group.result(LIMIT_S)
        return ahead._members

    def awaited(user, step):
        until(lambda: not user.expects(step) or len(begun) > REPLICAS)
        await_guest(user, step)

    monkeypatch.setattr(GroupAhead, "__init__", begins)
    monkeypatch.setattr(GroupAhead, "formed", property(formed))
    monkeypatch.setattr(GroupAhead, "take", lambda ahead: taken.append(ahead) or take(ahead))
    monkeypatch.setattr(AxisUser, "_await_guest", awaited)
    store, scheme = HashStore(), TALKING["demo"]
    members = [partial(member, store, replica, scheme) for replica in range(REPLICAS)]
    ends = together(*members, lambda: newcomer(store, scheme))
    assert len(set(ends)) == 1 and ends[0][-1] == REPLICAS + 1
    assert len(taken) == REPLICAS + 1 and {*taken} == {*begun}


def test_a_newcomer_trains_what_the_others_train(monkeypatch):
    """Whatever its own model has frozen: another parameter, and none of theirs."""
    models = [copy.deepcopy(MODEL) for _ in range(2)]
    models[0].layers[0].bias.requires_grad_(False)
    models[1].layers[1].bias.requires_grad_(False)
    monkeypatch.setitem(globals(), "MODEL", models[0])
    store, scheme = HashStore(), TALKING["demo"]
    trained = []

    def comes():
        base = partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9))
        optimizer, axis = dt.admitted(
            models[1],
            dt.Guest(store),
            token=TOKEN,
            optimizer=base,
            safety=dt.Safety(verify_every=1),
        )
        trained.extend(parameter.requires_grad for parameter in models[1].parameters())
        return steps(models[1], optimizer, axis, dt.Admission(models[1], optimizer, token=TOKEN))

    members = [partial(member, store, replica, scheme) for replica in range(REPLICAS)]
    ends = together(*members, comes)
    assert len(set(ends)) == 1 and ends[0][-1] == REPLICAS + 1
    assert trained == [parameter.requires_grad for parameter in models[0].parameters()]


def test_all_know_the_step_of_a_newcomer_where_some_have_to_agree_twice(monkeypatch):
    monkeypatch.setattr(GroupAhead, "formed", [])
    store, scheme = HashStore(), TALKING["demo"]
    kinds = SurvivingCommunicator, Clumsy
    members = [
        partial(member, store, replica, scheme, kind=kind) for replica, kind in enumerate(kinds)
    ]
    ends = together(*members, lambda: newcomer(store, scheme))
    assert len(set(ends)) == 1 and ends[0][-1] == REPLICAS + 1


@pytest.mark.parametrize(
    ("name", "lost", "started"),
    [
        ("full", False, True),
        ("demo-owner", False, False),
        ("demo", True, True),
        ("demo-owner", True, False),
    ],
)
def test_a_newcomer_that_gives_up_a_group_in_which_the_others_begin_its_first_step_takes_it_too(
    name, lost, started, monkeypatch
):
    """It does not hear from one of them for a moment; that one may be lost, and is absent in this step then.

    The others have started a collective of that step, or not yet.
    """
    axes, again = {}, threading.Event()
    monkeypatch.setattr(GroupAhead, "formed", [])

    def kept(axis):
        return [*axis._kept.values()]

    class Member(SurvivingCommunicator):
        def _formed(self):
            axes[self._membership.replica] = self
            return super()._formed()

        def start(self, *arguments):
            if REPLICAS in axes and not started:
                assert again.wait(LIMIT_S)
            return super().start(*arguments)

    class Newcomer(SurvivingCommunicator):
        def _formed(self):
            if REPLICAS in axes:
                again.set()
                return super()._formed()
            group, axes[REPLICAS], other = super()._formed(), self, axes[1]
            until(lambda: other._begun > self._entry.step)
            until(lambda: not started or any(each.result is None for each in kept(other)))
            if lost:
                axes[0]._membership.stop()
                note_gone(axes[0]._membership.store, 0)
            group.abandon()
            raise RuntimeError("a member was lost meanwhile")

    monkeypatch.setattr(elastic_axis, "SurvivingCommunicator", Newcomer)
    store, scheme = HashStore(), TALKING[name]

    def first():
        try:
            return member(store, 0, scheme, kind=Member)
        except ReplicaLost:
            return None

    *ends, gone = together(
        lambda: member(store, 1, scheme, kind=Member), lambda: newcomer(store, scheme), first
    )
    assert (
        ends[0] == ends[1]
        and ends[0][-1] == REPLICAS + 1 - lost
        and gone in {None if lost else ends[0]}
    )


def comes_in_without_the_first(monkeypatch, scheme, kind, axes, again):
    """A newcomer of this `kind` ends replica 0 while it comes in; the others begin its first step `again` later.

    `axes` gets the axis of each member.
    """
    await_guest = AxisUser._await_guest

    def awaited(user, step):
        comes = user.expects(step)
        await_guest(user, step)
        if comes:
            assert again.wait(LIMIT_S)

    class Member(SurvivingCommunicator):
        def _formed(self):
            axes[self._membership.replica] = self
            return super()._formed()

    monkeypatch.setattr(AxisUser, "_await_guest", awaited)
    monkeypatch.setattr(elastic_axis, "SurvivingCommunicator", kind)
    store = HashStore()

    def first():
        with pytest.raises(ReplicaLost):
            member(store, 0, scheme, kind=Member)

    stays, comes, _ = together(
        lambda: member(store, 1, scheme, kind=Member), lambda: newcomer(store, scheme), first
    )
    assert stays == comes and stays[-1] == REPLICAS


@pytest.mark.parametrize("name", ["demo", "demo-owner", "diloco"])
def test_a_newcomer_comes_in_without_a_replica_that_is_lost_before_any_begins_its_first_step(
    name, monkeypatch
):
    """All have agreed on the members, and agree once more while nobody has begun that step."""
    axes, again = {}, threading.Event()
    monkeypatch.setattr(GroupAhead, "formed", [])

    class Newcomer(SurvivingCommunicator):
        def _formed(self):
            if REPLICAS in axes:
                again.set()
                return super()._formed()
            group, axes[REPLICAS] = super()._formed(), self
            axes[0]._membership.stop()
            note_gone(axes[0]._membership.store, 0)
            group.abandon()
            raise RuntimeError("a member was lost meanwhile")

    comes_in_without_the_first(monkeypatch, TALKING[name], Newcomer, axes, again)


@pytest.mark.parametrize("begun", [False, True])
def test_a_newcomer_in_the_group_of_all_loses_a_replica_before_the_others_begin_its_first_step(
    begun, monkeypatch
):
    """It compares itself with the others once, whether it has begun that step by then or not."""
    axes, again = {}, threading.Event()

    class Newcomer(SurvivingCommunicator):
        def for_one(self, hand_over=None):
            user = None
            if begun:
                user = super().for_one(hand_over)
            axes[0]._membership.stop()
            note_gone(axes[0]._membership.store, 0)
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.losses) > 0, LIMIT_S)
            again.set()
            return user or super().for_one(hand_over)

    comes_in_without_the_first(monkeypatch, TALKING["demo"], Newcomer, axes, again)


def test_a_newcomer_knows_of_a_replica_that_is_asked_to_leave_while_all_wait_for_it(monkeypatch):
    """That one leaves before the step after that of the newcomer, which hands over with the others."""
    axes, enter_step, await_guest = {}, AxisUser.enter_step, AxisUser._await_guest

    def entered(user, step):
        axes[user._membership.replica] = user.axis
        return enter_step(user, step)

    def awaited(user, step):
        if user.axis is axes[0] and user.expects(step) and not axes[0].departing:
            axes[1].depart()
            with axes[0]._changed:
                assert axes[0]._changed.wait_for(lambda: axes[0].departing, LIMIT_S)
        await_guest(user, step)

    monkeypatch.setattr(AxisUser, "enter_step", entered)
    monkeypatch.setattr(AxisUser, "_await_guest", awaited)
    store, scheme = HashStore(), TALKING["demo"]

    def leaves():
        with pytest.raises(ReplicaLeft):
            member(store, 1, scheme)

    first, second, _ = together(
        lambda: member(store, 0, scheme), lambda: newcomer(store, scheme), leaves
    )
    assert first == second and first[-1] == 2


def told(axis, model, optimizer, door):
    """What this replica was given in each step, what it holds in the end, and what it has not sent."""
    given, last = {}, None
    while last is None or optimizer.step_count < last:
        step, made = (
            optimizer.step_count,
            torch.Generator().manual_seed(100 * optimizer.step_count + axis.replica),
        )
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=made)
        given[step] = flat([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        door.after_step()
        if last is None and axis._membership.guest > REPLICAS:
            last = optimizer.step_count + AFTER
    optimizer.synchronize()
    weights = flat([parameter.detach().clone() for parameter in model.parameters()])
    left = torch.zeros_like(weights)  # a round has sent all
    if optimizer.build()[0].channel.memory:
        left = flat(unsent(optimizer))
    axis.close()
    return given, weights, left


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize(
    "scheme",
    [
        dt.demo(topk=1, chunk=16, decay=1.0, link="all-gather"),
        dt.demo(topk=1, chunk=16, decay=1.0, link="owner"),
        dt.diloco(every=1000, outer_lr=1.0, outer_momentum=0.0),  # the round is open all the time
    ],
    ids=["all-gather", "owner", "round"],
)
def test_law_1_what_the_others_have_not_sent_is_not_lost_where_a_newcomer_comes_in(scheme):
    store = HashStore()

    def mine(replica):
        membership = Membership(
            next_axis_store(store, replica, REPLICAS), replica, REPLICAS, 0, 1, 30.0, 1, print, 30.0
        )
        axis, model = SurvivingCommunicator(membership, 30.0), copy.deepcopy(MODEL)
        optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=1.0), model, axis, scheme)
        return told(axis, model, optimizer, dt.Admission(model, optimizer, token=TOKEN))

    def come_in():
        model = copy.deepcopy(MODEL)
        optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN)
        return told(axis, model, optimizer, dt.Admission(model, optimizer, token=TOKEN))

    given, weights, left = zip(*together(lambda: mine(0), lambda: mine(1), come_in), strict=True)
    assert len({*map(len, given)}) == 2
    everything = sum(
        torch.stack([each[step] for each in given if step in each]).mean(0)
        for step in max(given, key=len)
    )
    moved = flat(parameter.detach() for parameter in MODEL.parameters()) - weights[0]
    torch.testing.assert_close(moved + torch.stack(left).mean(0), everything, rtol=0, atol=1e-3)


def test_a_newcomer_that_is_lost_on_its_way_costs_the_others_nothing():
    store, scheme = HashStore(), TALKING["demo"]
    members = [
        lambda replica=replica: member(store, replica, scheme) for replica in range(REPLICAS)
    ]
    *ends, _ = sorted(together(*members, lambda: left_behind(store)), key=lambda end: end is None)
    assert len(set(ends)) == 1 and ends[0][-1] == REPLICAS


def test_a_newcomer_comes_in_after_one_that_ended_before_it_asked():
    """The others look for numbers one after the other, and the first one has asked nothing."""
    store, model = HashStore(), copy.deepcopy(MODEL)
    axis = dt.elastic(replica=0, replicas=1, store=store)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
    door = dt.Admission(model, optimizer, token=TOKEN)
    assert axis.host.membership.store.add("numbers", 1) == 1
    came = []

    def come_in():
        guest = dt.Guest(store, silence_s=1.1)
        _, axis = dt.admitted(copy.deepcopy(MODEL), guest, token=TOKEN, timeout_s=LIMIT_S)
        came.append((guest.number, axis.size()))
        axis.close()

    coming = threading.Thread(target=come_in, daemon=True)
    coming.start()
    while coming.is_alive() and axis.size() == 1:
        model(batch(0, optimizer.step_count, 32)).mean().backward()
        optimizer.step()
        door.after_step()
    optimizer.verify()  # the newcomer does so before its first step
    axis.close()
    coming.join()
    assert came == [(2, 2)]


def asks_to_leave(axis):
    axis.depart()


def is_cut_off(axis):
    axis._membership.stop()
    note_gone(axis._membership.store, 0)
    raise Killed


class Killed(BaseException):
    """Ends a replica without a word to the others."""


@pytest.mark.parametrize("ends", [asks_to_leave, is_cut_off])
@pytest.mark.parametrize("copies", [0, 1])
def test_a_newcomer_turns_to_another_replica_where_the_one_that_lets_it_in_is_lost(
    ends, copies, monkeypatch
):
    """Before it has a copy; after that the others may have agreed on its step, and then they go on without it."""
    opened, copied = dt.Admission._open, dt.Feed._let_in

    def opened_and_ended(door, guest):
        opened(door, guest)
        if door._axis._membership.replica == 0:
            door._feed.ends = partial(ends, door._axis)
            if copies == 0:
                door._feed.ends()

    def copied_and_ended(feed, optimizer):
        copied(feed, optimizer)
        if feed._subscribed and copies == 1:
            getattr(feed, "ends", int)()

    monkeypatch.setattr(dt.Admission, "_open", opened_and_ended)
    monkeypatch.setattr(dt.Feed, "_let_in", copied_and_ended)
    surely = (
        copies == 0 and ends is is_cut_off
    )  # it comes, if slowly; elsewhere all may wait for it in vain
    monkeypatch.setattr(membership, "ARRIVE_S", LIMIT_S if surely else 0.5)
    store, scheme, lost = HashStore(), TALKING["demo"], []

    def first():
        with pytest.raises((ReplicaLeft, Killed)):
            member(store, 0, scheme)

    def comes():
        try:
            return newcomer(store, scheme)
        except ReplicaLost as error:
            lost.append(str(error))

    ended, came, _ = together(lambda: member(store, 1, scheme), comes, first)
    if came:
        assert came == ended and ended[-1] == 2
    else:
        assert not surely
        assert ended[-1] == 1 and "did not wait for replica 2" in lost[0]


class Meeting:
    """All members wait for one another. A newcomer is ready only while they do: so they agree on the turn
    before which it joins at this point of their program, once."""

    def __init__(self, monkeypatch):
        self._asks, self._tells, self._needs_copy = (threading.Event() for _ in range(3))
        self._met = []
        self._axes = {}
        tell, withdraw = dt.Guest.ready, dt.Guest.withdraw

        def ready(guest):
            if not any(self._met):
                self._needs_copy.clear()
                self._asks.set()
                assert self._tells.wait(LIMIT_S)
                self._asks.clear()
            tell(guest)

        def withdrawn(
            guest,
        ):  # it has fallen behind, and no member sends a copy while it waits here
            withdraw(guest)
            self._needs_copy.set()

        monkeypatch.setattr(dt.Guest, "ready", ready)
        monkeypatch.setattr(dt.Guest, "withdraw", withdrawn)
        self._barrier = threading.Barrier(REPLICAS, self._meets, LIMIT_S)

    def _meets(self):
        if self._asks.is_set():
            self._tells.set()
            until(lambda: not self._asks.is_set())
            self._tells.clear()
            until(lambda: self._is_known() or self._needs_copy.is_set())
        self._met.append(self._is_known())

    def _is_known(self):
        return all(axis.guest for axis in self._axes.values())

    def of(self, axis):
        """True if all have met here; the newcomer is not one of them."""
        number = axis._membership.replica
        if any(self._met) or number == REPLICAS:
            return False
        self._axes[number] = axis
        self._barrier.wait()
        return self._met[-1]


def test_a_newcomer_joins_later_if_all_go_back_before_its_step(monkeypatch):
    monkeypatch.setattr(membership, "ARRIVE_S", LIMIT_S)
    meeting, store, scheme = Meeting(monkeypatch), HashStore(), TALKING["full"]

    class Door(dt.Admission):
        def after_step(self):
            if meeting.of(self._axis):
                self._optimizer.resume_at(self._optimizer.step_count - 1)
            super().after_step()

    monkeypatch.setattr(dt, "Admission", Door)
    members = [partial(member, store, replica, scheme) for replica in range(REPLICAS)]
    ends = together(*members, lambda: newcomer(store, scheme))
    assert len(set(ends)) == 1 and ends[0][-1] == REPLICAS + 1


class Slow(admission._Arrival):
    """Reads that the replica that gave its state is lost, and is held up until the others wait for it."""

    def _keep_pace(self):
        copy = self._pace.copy
        super()._keep_pace()
        if self._is_ready and self._pace.copy > copy:
            until(lambda: self._guest.entry())


@pytest.mark.parametrize("silent", [False, True])
def test_a_newcomer_joins_later_if_the_replica_that_gives_the_state_is_lost_before_its_step(
    silent, monkeypatch
):
    """It ends within the step before, of which it sends nothing; or its machine freezes, so its connections last."""
    if silent:
        monkeypatch.setattr(admission, "_Arrival", Slow)
    monkeypatch.setattr(membership, "ARRIVE_S", LIMIT_S)
    meeting, store, scheme = Meeting(monkeypatch), HashStore(), TALKING["full"]
    doors, lost = [], []

    class Member(SurvivingCommunicator):
        def start(self, kind, *arguments):
            # of gradients, not of what follows a step
            if kind == "all_reduce" and meeting.of(self) and self._membership.replica == 0:
                lost.append(doors[0]._feed)
                if not silent:
                    lost[0].disconnect("its process ends")
                    lost[0]._listener.close()
                self._membership.stop()
                note_gone(self._membership.store, 0)
                self._group.abandon()
                raise Died
            return super().start(kind, *arguments)

    class Door(dt.Admission):
        def after_step(self):
            if self._axis.replica == 0:
                doors[:] = [self]
            super().after_step()

    def first():
        with pytest.raises(Died):
            member(store, 0, scheme, kind=Member)

    monkeypatch.setattr(dt, "Admission", Door)
    *ends, _ = together(
        lambda: member(store, 1, scheme, kind=Member), lambda: newcomer(store, scheme), first
    )
    lost[0].close(wait_s=0.0)
    assert ends[0] == ends[1] and ends[0][-1] == REPLICAS


class Giver:
    """A shard of the replica that gives the state, with a feed that only counts its copies."""

    def __init__(self, store, shard):
        self.step_count, self.given = 0, []
        self._feed = SimpleNamespace(
            flush=lambda: None,
            is_asked=False,
            followers=0,
            first_copy=math.inf,
            disconnect=lambda reason: self.ask(),
        )
        members = {"replica": 0, "rank": shard, "shard": shard, "shards": 2}
        asked = SimpleNamespace(store=store, guest=1, guest_asks=True, **members)
        self._door = object.__new__(dt.Admission)
        vars(self._door).update(
            _optimizer=self,
            _axis=SimpleNamespace(host=Host(asked), is_first=True),
            _user=SimpleNamespace(turn_of=int, step_of=lambda turn: turn),
            _feed=self._feed,
            _guest=1,
            _copy_turn=math.inf,
            _copies=0,
            _asked=False,
            _next_look=0.0,
        )

    def ask(self):
        self._feed.followers, self._feed.is_asked = 1, True

    def step(self):
        self.step_count += 1
        if self._feed.is_asked and self.step_count >= self._feed.first_copy:
            self._feed.is_asked = False
            self.given.append(self.step_count)
        self._door.after_step()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("later", [0, 1, 3])
def test_all_shards_of_a_newcomer_get_copies_of_the_same_steps_however_often_it_asks(order, later):
    store = HashStore()
    givers = [Giver(store, shard) for shard in range(2)]
    for _ in range(3):
        givers[order[0]].ask()
        for number in range(later + 6):
            if number == later:
                givers[order[1]].ask()
            for shard in order:
                givers[shard].step()
    assert givers[0].given == givers[1].given and len(givers[0].given) == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("missed", [0, 1])
def test_all_shards_of_a_newcomer_get_another_copy_if_one_has_missed_the_last_copy(
    order, missed, monkeypatch
):
    """It lost its connection after all had agreed on the step of that copy, and was back only after that step."""
    monkeypatch.setattr(admission, "LOOK_S", 0.0)
    store = HashStore()
    givers = [Giver(store, shard) for shard in range(2)]
    for giver in givers:
        giver.ask()
    while not givers[1 - missed].given:
        for shard in order:
            givers[shard].step()
        if givers[missed]._feed.first_copy < math.inf:
            givers[missed]._feed.is_asked = False
    givers[missed].ask()
    for _ in range(6):
        for shard in order:
            givers[shard].step()
    assert givers[1 - missed].given[1:] == givers[missed].given != []
