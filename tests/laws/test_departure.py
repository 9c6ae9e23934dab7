"""A replica that is asked to leave takes part up to a step on which all agree, and hands over what it has not sent."""

import contextlib
import copy
import threading
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

import detonation as dt
from detonation.cluster.survive.agreement import ReplicaLeft
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from detonation.core.optimizer import reconfigure
from detonation.core.optimizer.replicated import Replicated
from limits import LIMIT_S, until
from steps import together, unsent
from zoo import TALKING, Plain, batch, built

REPLICAS = 3
MODEL = built(Plain)  # the threads share a random generator
REMEMBERING = [name for name, scheme in TALKING.items() if scheme.feedback]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Clumsy(SurvivingCommunicator):
    """A replica that cannot use the first group that is formed after all have agreed that one leaves."""

    failed = False

    def _formed(self):
        group = super()._formed()
        if self.departing and not self.failed:
            self.failed = True
            group.abandon()
            raise RuntimeError
        return group


def threads_of(act, min_replicas=1, clumsy=-1, shards=1):
    """What `act(communicator, rank)` returns on each rank, a thread of its own."""
    store = HashStore()

    def run(rank):
        replica, shard = divmod(rank, shards)
        membership = Membership(
            store, replica, REPLICAS, shard, shards, 30.0, min_replicas, print, confirm_s=30.0
        )
        communicator = (Clumsy if replica == clumsy else SurvivingCommunicator)(membership, 30.0)
        result = act(communicator, rank)
        if replica in communicator._membership.members and communicator.error is None:
            communicator.close()
        return result

    return dict(enumerate(together(*(partial(run, rank) for rank in range(REPLICAS * shards)))))


def trained(communicator, replica, scheme, leaves, look):
    """Trains until the replica has left and some steps more; `look(optimizer, model)` before and after the numbers
    change, and how the replica ended."""
    model = copy.deepcopy(MODEL)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, communicator, scheme, safety=dt.Safety(verify_every=1))
    seen, renumber = [], optimizer.renumber

    def looked():
        before, size = look(optimizer, model), communicator.size()
        try:
            renumber()
        except ReplicaLeft:
            seen.append((before, None))
            raise
        if communicator.size() < size:
            seen.append((before, look(optimizer, model)))

    optimizer.renumber = looked  # which each step begins with
    step = 0
    while not seen or optimizer.step_count < step:
        model(batch(replica, optimizer.step_count, 32)).mean().backward()
        if optimizer.step_count == 3 and replica == leaves:
            communicator.depart()
        try:
            optimizer.step()
        except ReplicaLeft as error:
            return *seen[0], str(error)
        optimizer.zero_grad()
        step = step or (len(seen) and optimizer.step_count + 3)
    optimizer.synchronize()
    return *seen[0], digest(model.parameters())


def memories(optimizer, model):
    if not optimizer.is_built:
        return None
    return [each.clone() for each in unsent(optimizer)]


@pytest.mark.parametrize("name", REMEMBERING)
def test_law_1_what_a_replica_has_not_sent_stays_where_it_leaves(name):
    leaves = sum(name.encode()) % REPLICAS
    ends = threads_of(lambda axis, replica: trained(axis, replica, TALKING[name], leaves, memories))
    stay = [replica for replica in range(REPLICAS) if replica != leaves]
    assert ends[leaves][2].startswith(f"replica {leaves} has left after step ")
    assert len({ends[replica][2] for replica in stay}) == 1  # equal, bit for bit
    if TALKING[name].signal == "gradients":  # else a round ended between the looks
        for number in range(len(ends[leaves][0])):
            was = sum(ends[replica][0][number] for replica in range(REPLICAS)) / REPLICAS
            now = sum(ends[replica][1][number] for replica in stay) / len(stay)
            torch.testing.assert_close(now, was, **CLOSE)
            assert was.any()


def test_a_replica_leaves_where_nothing_is_sent_and_nobody_has_a_memory():
    def act(axis, replica):
        model = copy.deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(sgd, model, axis, "none")
        if replica == 1:
            axis.depart()
        with axis._changed:
            assert axis._changed.wait_for(lambda: axis.departing, LIMIT_S)
        model(batch(replica, 0, 32)).mean().backward()
        try:
            optimizer.step()
        except ReplicaLeft:
            return 0
        return axis.size()

    assert threads_of(act) == {0: 2, 1: 0, 2: 2}


def test_law_1_holds_where_one_shard_hands_over_later_than_the_other(monkeypatch):
    """The one that was first waits; else the others go on without the replica, and what the late one has is lost."""
    first, hand_over, wait = (
        threading.Event(),
        reconfigure.hand_over_memory,
        getattr(Membership, "await_shards", None),
    )
    users = {}

    def late(replicators, leaving):
        assert replicators[0].link.axis is not users[3] or first.wait(LIMIT_S)
        hand_over(replicators, leaving)

    monkeypatch.setattr(reconfigure, "hand_over_memory", late)
    monkeypatch.setattr(
        Membership,
        "await_shards",
        lambda self, limit_s: first.set() or wait(self, limit_s),
        raising=False,
    )

    def act(axis, rank):
        model = copy.deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(sgd, model, axis, dt.demo(topk=4, chunk=16, decay=1.0))
        users[rank] = optimizer.levels[0][0]
        for step in range(8):
            model(batch(rank, step, 32)).mean().backward()
            if step == 3:
                if rank == 2:
                    axis.depart()
                with axis._changed:  # so that all leave after this step
                    assert axis._changed.wait_for(lambda: axis.departing, LIMIT_S)
            try:
                optimizer.step()
            except ReplicaLeft:
                first.set()
                return "left"
            optimizer.zero_grad()
        return digest(model.parameters())

    ends = threads_of(act, shards=2)
    assert [ends[rank] == "left" for rank in range(6)] == [False, False, True, True, False, False]
    assert ends[0] == ends[4] and ends[1] == ends[5]


def test_law_1_holds_where_another_replica_is_asked_to_leave_while_one_hands_over(monkeypatch):
    """All of them hand over for the same replicas, and the second leaves before a later step."""
    axes, hand_over = {}, reconfigure.hand_over_memory

    def late(replicators, leaving):
        if replicators[0].link.replica == 0 and 2 not in axes[0].departing:
            axes[2].depart()
            with axes[0]._changed:
                assert axes[0]._changed.wait_for(lambda: 2 in axes[0].departing, LIMIT_S)
        hand_over(replicators, leaving)

    monkeypatch.setattr(reconfigure, "hand_over_memory", late)
    ended = []

    def act(axis, replica):
        axes[replica] = axis
        until(lambda: len(axes) == REPLICAS)
        sums, model = {}, copy.deepcopy(MODEL)
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=0.1), model, axis, dt.demo(topk=4, chunk=16)
        )
        renumber = optimizer.renumber

        def looked():
            before, size, step = (
                optimizer.is_built and memories(optimizer, model),
                axis.size(),
                optimizer.step_count,
            )
            if before:
                sums[step] = [before]
            renumber()
            if axis.size() < size:
                sums[step].append(memories(optimizer, model))

        optimizer.renumber = looked
        with contextlib.suppress(ReplicaLeft):
            while len(ended) < 2 or optimizer.step_count < 12:
                model(batch(replica, optimizer.step_count, 32)).mean().backward()
                if optimizer.step_count == 3 and replica == 1:
                    axis.depart()
                optimizer.step()
                optimizer.zero_grad()
        ended.append(replica)
        return sums

    seen = threads_of(act)
    changes = [step for step, both in seen[0].items() if len(both) == 2]
    for step in changes:
        was, now = (
            [sums[step][side] for sums in seen.values() if len(sums.get(step, ())) > side]
            for side in (0, 1)
        )
        for number in range(len(was[0])):
            means = [sum(each[number] for each in of_all) / len(of_all) for of_all in (now, was)]
            torch.testing.assert_close(*means, **CLOSE)
    assert len(changes) == 2


def weights(optimizer, model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_round_ends_before_a_replica_leaves_and_its_movement_counts():
    scheme = dt.diloco(every=1000, outer_lr=1.0, outer_momentum=0.0)
    ends = threads_of(lambda axis, replica: trained(axis, replica, scheme, 2, weights))
    for number in range(4):
        mean = sum(ends[replica][0][number] for replica in range(REPLICAS)) / REPLICAS
        torch.testing.assert_close(ends[0][1][number], mean, **CLOSE)


def test_all_know_who_leaves_where_some_have_to_agree_twice():
    ends = threads_of(
        lambda axis, replica: trained(axis, replica, dt.diloco(every=4), 2, weights), clumsy=1
    )
    assert ends[2][2].startswith("replica 2 has left after step ") and ends[0][2] == ends[1][2]


def test_nobody_leaves_where_too_few_would_be_left():
    def act(axis, replica):
        model = copy.deepcopy(MODEL)
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=0.1), model, axis, dt.full()
        )
        for step in range(40):
            if step == 3 and replica:
                axis.depart()
            model(batch(replica, step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return axis.size()

    assert threads_of(act, min_replicas=3) == {0: 3, 1: 3, 2: 3}


def test_where_a_replica_only_leaves_nobody_is_welcomed(monkeypatch):
    """The options of the groups are told again to newcomers alone."""
    welcomed = []
    monkeypatch.setattr(Replicated, "welcome", lambda *_, **__: welcomed.append(True))
    ends = threads_of(lambda axis, replica: trained(axis, replica, TALKING["demo"], 1, memories))
    assert ends[0][2] == ends[2][2] and welcomed == []
