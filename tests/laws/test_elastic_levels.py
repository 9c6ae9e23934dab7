"""Levels of which the outermost is elastic: racks of nodes are lost and leave whole, and what is inside them stays."""

import copy
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import detonation as dt
from covering import covered
from detonation import schemes
from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.survive.agreement import ReplicaLeft, ReplicaLost
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from detonation.core.link.elastic_communicator import AgreedCommunicator
from detonation.core.link.link import Link
from limits import LIMIT_S
from steps import Died, Mortal, Passing, together
from zoo import Plain, batch, built

RACKS, NODES, STEPS = 3, 2, 8
MODEL = built(Plain)  # the threads share a random generator
REMEMBERS = partial(dt.demo, topk=4, chunk=16, decay=1.0)
LEVELS = {
    "full, full": (dt.full(), dt.full()),
    "full, demo": (dt.full(), REMEMBERS()),
    "demo, full": (REMEMBERS(), dt.full()),
    "owners, owners": (REMEMBERS(link="owner"), REMEMBERS(link="owner")),
    "full, diloco": (dt.full(), dt.diloco(every=4)),
    "demo, diloco": (REMEMBERS(), dt.diloco(every=4)),
    "local_sgd, diloco": (schemes.local_sgd(every=2), dt.diloco(every=4)),
}


def membership(store, replica, replicas, shard=0, shards=1):
    return Membership(store, replica, replicas, shard, shards, 30.0, 1, print, confirm_s=30.0)


def racks(act):
    """What `act(inside, between, rank)` returns on each rank, a thread of its own; nothing for one that died."""
    store, inner, ends = HashStore(), [HashStore() for _ in range(RACKS)], {}

    def run(rank):
        rack, node = divmod(rank, NODES)
        within = SurvivingCommunicator(membership(inner[rack], node, NODES), 30.0)
        between = Mortal(membership(store, rack, RACKS, node, NODES), 30.0)
        try:
            ends[rank] = act(Passing(within), between, rank)
        except Died:
            with between._changed:
                between._closed = True
                between._changed.notify_all()
            between._membership.leave(0)  # the others need not wait until it is silent for long
            between._group.abandon()
        else:
            if between.error is None and rack in between._membership.members:
                between.close()
            between._membership.stop()
        within.close(0.0 if rank not in ends else 5.0)

    together(*(partial(run, rank) for rank in range(RACKS * NODES)))
    return ends


def started(schemes, inside, between, base):
    model = copy.deepcopy(MODEL)
    levels = list(zip((inside, between), schemes, strict=True))
    return model, dt.replicate(
        base(model.parameters()), model, levels=levels, safety=dt.Safety(verify_every=1)
    )


def take_steps(model, optimizer, rank):
    for step in range(STEPS):
        model(batch(rank, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@covered("name, point", [*LEVELS], [(0, False), (1, True)])
def test_law_2_the_racks_that_are_left_take_every_step_and_stay_equal(name, point):
    def act(inside, between, rank):
        if rank // NODES == 1:
            between.countdown, between.under_way = point
        model, optimizer = started(LEVELS[name], inside, between, torch.optim.AdamW)
        take_steps(model, optimizer, rank)
        optimizer.synchronize()
        counts = optimizer._routes[0, 1][1]  # of the level inside, whose ranks keep their numbers
        assert len({*counts._good.values()}) <= 1
        place = optimizer.coordinates
        return (
            digest(model.parameters()),
            optimizer.step_count,
            (place.replica, place.replicas),
            between.size(),
        )

    ends = racks(act)
    assert ends.keys() == {0, 1, 4, 5} and len({end[0] for end in ends.values()}) == 1
    assert [end[1:] for end in ends.values()] == [(STEPS, ends[rank][2], 2) for rank in ends]
    assert [ends[rank][2] for rank in sorted(ends)] == [(number, 4) for number in range(4)]


class Late(Mortal):
    """Rank 3 ends before it sends, and after ranks 0 and 4 have received what its rack sent through rank 2.

    So it does in a step whose collectives before, `after` of them, all ranks have received.
    """

    after = 0
    there = ()  # an event of each rank
    seen = 0  # collectives of that step that were received here

    def _launch(self, each):
        if self.countdown == 0 and self._begun == self.dies_in:
            assert self.there[0].wait(LIMIT_S) and self.there[4].wait(LIMIT_S)
        super()._launch(each)

    def _conclude(self, each, result, absent):
        super()._conclude(each, result, absent)
        self.seen += self._begun == self.dies_in
        if self.seen > self.after:
            self.there[self._membership.rank].set()


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr("test_elastic_levels.Mortal", Late)
    monkeypatch.setattr(Late, "there", [threading.Event() for _ in range(RACKS * NODES)])


@pytest.mark.parametrize("name", LEVELS)
def test_law_2_a_rack_is_lost_after_one_of_its_nodes_has_sent_and_before_the_other_has(name, late):
    def act(inside, between, rank):
        between.countdown = 0 if rank == 3 else -1
        model, optimizer = started(LEVELS[name], inside, between, torch.optim.AdamW)
        try:
            take_steps(model, optimizer, rank)
        except ReplicaLost:
            return "lost"
        optimizer.synchronize()
        return digest(model.parameters()), between.size()

    ends = racks(act)
    assert ends.pop(2) == "lost" and ends.keys() == {0, 1, 4, 5}
    assert len({*ends.values()}) == 1 and ends[0][1] == 2


def faulty(optimizer, rank):
    """On rack 1 a reason to stop in step 4."""

    def fault(*_):
        if optimizer.step_count == 3 and rank // NODES == 1:
            optimizer._routes[0, 1][1].desync(1, "a weight")

    optimizer.register_step_pre_hook(fault)


@pytest.mark.parametrize("name, messages", [("full, demo", 1), ("owners, owners", 2)])
def test_law_2_a_reason_to_stop_of_which_some_nodes_hear_and_others_lose_the_rack_is_lost(
    name, messages, late, monkeypatch
):
    monkeypatch.setattr(Late, "after", messages)

    def act(inside, between, rank):
        between.countdown = between.after if rank == 3 else -1
        model, optimizer = started(LEVELS[name], inside, between, torch.optim.AdamW)
        faulty(optimizer, rank)
        try:
            take_steps(model, optimizer, rank)
        except (ReplicaLost, dt.errors.Desync):
            return "ended"
        return digest(model.parameters()), between.size()

    ends = racks(act)
    assert ends.pop(2) == "ended" and ends.keys() == {0, 1, 4, 5}
    assert len({*ends.values()}) == 1 and ends[0][1] == 2


def test_a_reason_to_stop_of_which_some_shards_hear_and_others_lose_the_replica_stops_all(
    late, monkeypatch
):
    """Each of them exchanges its own part: what one has heard, the others learn afterwards."""
    monkeypatch.setattr(Late, "after", 2)

    def act(inside, between, rank):
        between.countdown = between.after if rank == 3 else -1
        model = copy.deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(sgd, model, between, REMEMBERS(link="owner"))
        optimizer.set_up()
        optimizer._consensus.shards = (Link(inside),)
        optimizer._consensus.connect(optimizer.levels, optimizer.build())
        faulty(optimizer, rank)
        with pytest.raises((ReplicaLost, dt.errors.Desync)) as error:
            take_steps(model, optimizer, rank)
        return error.type.__name__, optimizer.step_count

    ends = racks(act)
    assert ends.pop(2)[1] == 3 and ends == dict.fromkeys((0, 1, 4, 5), ("Desync", 3))


def test_law_2_parts_of_a_message_are_of_the_same_racks(late):
    """Each node sends a part of what its rack holds whole; all join the parts of the racks that are there."""

    def act(inside, between, rank):
        between.dies_in, between.countdown = 0, 0 if rank == 3 else -1
        link = Link(between, intra_node=inside)
        try:
            (rows,), absent = link.wait(
                [link.all_gather(torch.full((5,), 1 + rank // NODES, dtype=torch.uint8))]
            )
            (total,), _ = link.wait([link.all_reduce(torch.full((5,), 1.0 + rank // NODES))])
        except ReplicaLost:
            return "lost"
        return rows.tolist(), absent, total.tolist()

    ends = racks(act)
    assert ends.pop(2) == "lost"
    assert [*ends.values()] == [([[1] * 5, [0] * 5, [3] * 5], {1}, [4.0] * 5)] * 4


def test_law_2_what_an_all_to_all_brought_to_one_rack_alone_changes_nothing_on_the_others():
    """Each receives rows of its own, so that no other rack knows what it has: nobody may start anything anew."""

    def of_rack(*absent):
        started = []

        def node(inside):
            between = SimpleNamespace(
                size=lambda: 3, absent=absent[inside.replica], all_gather=None
            )
            between.all_to_all = lambda mine: (
                lambda: started.append(1) or torch.ones(3, 2, dtype=torch.uint8)
            )
            agreed = AgreedCommunicator(between, [inside])
            return agreed.all_to_all(None)().tolist(), set(agreed.absent)

        return *simulate_replicas(node, NODES), len(started)

    assert of_rack({}, {}) == (([[1, 1]] * 3, set()),) * NODES + (NODES,)
    assert of_rack({1}, {}) == (([[1, 1], [0, 0], [1, 1]], {1}),) * NODES + (NODES,)


def test_the_mean_is_that_of_the_nodes_that_are_left():
    """With full synchronisation in both levels: of all nodes alike, against ordinary torch."""

    def act(inside, between, rank):
        if rank // NODES == 1:
            between.countdown = 0
        sgd = partial(torch.optim.SGD, lr=0.1)
        model, optimizer = started(LEVELS["full, full"], inside, between, sgd)
        take_steps(model, optimizer, rank)
        return [parameter.detach() for parameter in model.parameters()]

    model, ranks = copy.deepcopy(MODEL), range(RACKS * NODES)
    for step in range(STEPS):
        left = [
            rank for rank in ranks if step < 3 or rank // NODES != 1
        ]  # it died before it sent anything
        each = [
            torch.autograd.grad(model(batch(r, step, 32)).mean(), list(model.parameters()))
            for r in left
        ]
        with torch.no_grad():
            for parameter, *gradients in zip(model.parameters(), *each, strict=True):
                parameter -= 0.1 * torch.stack(gradients).mean(0)
    for found in racks(act).values():
        torch.testing.assert_close(found, [*model.parameters()])


def unsent(optimizer):
    """What the memories of this rank hold, of each parameter; of means that it owns, as if they were its own alone."""
    totals = 0
    for channel in (each.channel for each in optimizer.build() if each.channel.memory):
        flat, link = channel.memory.residual.clone(), channel.link
        if hasattr(channel.exchange, "owners"):
            owned = [
                channel.exchange.residual * (replica == link.replica)
                for replica in range(link.replicas)
            ]
            flat += link.replicas * channel.scheme.codec.basis.inverse(
                channel.exchange.owners.collect(owned)
            )
        totals = totals + torch.cat([part.flatten() for part in channel.layout.parts(flat)])
    return totals


@pytest.mark.parametrize("name", [name for name in LEVELS if "demo" in name or "owners" in name])
def test_law_1_what_a_rack_has_not_sent_in_any_level_stays_where_it_leaves(name):
    """It asks in step 3; the mean over ranks of what was given = what the weights took + what they have not sent."""

    def act(inside, between, rank):
        model, optimizer = started(LEVELS[name], inside, between, partial(torch.optim.SGD, lr=1.0))
        seen, renumber = [], optimizer.renumber

        def looked():
            size, before = between.size(), unsent(optimizer) if optimizer.is_built else None
            try:
                renumber()
            finally:
                if between.size() < size or between.error or between._closed:
                    seen.append((before, unsent(optimizer)))

        optimizer.renumber = looked  # which each step begins with
        last = 0
        while not last or optimizer.step_count < last:
            model(batch(rank, optimizer.step_count, 32)).mean().backward()
            if optimizer.step_count == 3 and rank == 2:  # one of its nodes is told
                between.depart()
            try:
                optimizer.step()
            except ReplicaLeft:
                return seen[0], "left"
            optimizer.zero_grad()
            last = last or (len(seen) and optimizer.step_count + 3)
        optimizer.synchronize()
        return seen[0], digest(model.parameters())

    ends = racks(act)
    stay = [0, 1, 4, 5]
    assert [ends[rank][1] for rank in (2, 3)] == ["left"] * 2 and len(
        {ends[rank][1] for rank in stay}
    ) == 1
    was = sum(ends[rank][0][0] for rank in range(RACKS * NODES)) / (RACKS * NODES)
    now = sum(ends[rank][0][1] for rank in stay) / len(stay)
    assert was.any()
    torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)


def test_inner_levels_lose_no_replica():
    store = HashStore()
    axis = dt.elastic(replica=0, replicas=1, store=store)
    model = nn.Linear(2, 1)
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="only the outermost level may lose replicas"):
        dt.replicate(adamw, model, levels=[(axis, dt.full()), (Passing(axis), dt.diloco())])
    axis.close()


def test_nobody_comes_in_under_several_levels():
    axis = dt.elastic(replica=0, replicas=1, store=HashStore())
    model = nn.Linear(2, 1)
    levels = [(Passing(axis), dt.full()), (axis, dt.diloco())]
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, levels=levels)
    with pytest.raises(ValueError, match="nobody comes in under several levels"):
        dt.Admission(model, optimizer)
    axis.close()
