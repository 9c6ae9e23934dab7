"""A throttled link of replicas that may be lost: the time of exchanges by a clock of a test's own, and equal bits."""

import copy
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import detonation as dt
from detonation.cluster.network.throttled import NodeLink
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from detonation.link_speed import LinkSpeed
from limits import Clock
from steps import together
from zoo import TALKING, Plain, batch, built

MODEL = built(Plain)  # the threads share a random generator


def replicas_at(speed, act, replicas=3):
    """What `act(axis, clock)` returns on each replica, a thread of its own; nothing of one that it returns None for."""
    store, ends = HashStore(), {}

    def run(replica):
        membership, clock = (
            Membership(store, replica, replicas, 0, 1, 30.0, 1, print, confirm_s=30.0),
            Clock(),
        )
        axis = SurvivingCommunicator(
            membership, 30.0, link=speed and NodeLink(speed, clock=clock, sleep=clock.sleep)
        )
        found = act(axis, clock)
        if found is None:  # it is lost
            with axis._changed:
                axis._closed = True
                axis._changed.notify_all()
            membership.leave(0)
            axis._group.abandon()
        else:
            ends[replica] = found
            axis.close()

    together(*(partial(run, replica) for replica in range(replicas)))
    return ends


def test_exchanges_take_as_long_as_on_a_real_link_also_without_a_replica_that_is_lost():
    """1000 bytes/s and half a second for the one hop of a small message between three replicas, which send 2000
    bytes in each all-gather; an all-reduce is a ring of four hops."""

    def act(axis, clock):
        mine = torch.full((1000,), axis.replica, dtype=torch.uint8)
        first, second = axis.all_gather(mine), axis.all_gather(mine)
        senders, times = [first()[:, 0].tolist(), second()[:, 0].tolist()], [clock.now - 100]
        if axis.replica == 1:
            return None
        clock.now = 200.0  # busy for longer than the link
        senders.append(axis.all_gather(mine)()[:, 0].tolist())
        absent = {*axis.absent}
        times.append(clock.now - 200)
        axis.all_to_all(torch.zeros(3000, dtype=torch.uint8))()
        times.append(clock.now - 200)
        axis.all_reduce(torch.zeros(375))()
        return senders, absent, [*times, clock.now - 200]

    ends = replicas_at(LinkSpeed(8e3, 0.5), act)
    assert ends.keys() == {0, 2}
    for senders, absent, times in ends.values():
        assert senders == [[0, 1, 2], [0, 1, 2], [0, 0, 2]] and absent == {1}
        assert times == pytest.approx([4.5, 2.5, 5.0, 9.0])


@pytest.mark.parametrize("name", ["full", "demo", "demo-owner", "diloco"])
def test_law_2_training_over_a_throttled_link_is_the_same_training(name):
    def act(axis, clock):
        model = copy.deepcopy(MODEL)
        optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, TALKING[name])
        for step in range(6):
            if (axis.replica, step) == (1, 4):
                return None
            model(batch(axis.replica, step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return digest(model.parameters())

    slow, plain = replicas_at(LinkSpeed(1e6, 0.01), act), replicas_at(None, act)
    assert slow == plain and len({*slow.values()}) == 1 and slow.keys() == {0, 2}


def test_a_link_is_that_of_processes_of_one_machine():
    store = HashStore()
    store.set("detonation/elastic/0/text/machine", "another")
    with pytest.raises(
        ValueError, match="a link can be emulated between processes of one machine only"
    ):
        dt.elastic(replica=0, replicas=1, store=store, link="1mbit")


def test_a_loop_names_its_link_where_it_makes_the_axis():
    store = HashStore()
    with pytest.raises(ValueError, match="a link is 'fast', must be a rate above 0"):
        dt.elastic(replica=0, replicas=1, store=store, link="fast")
    axis = dt.elastic(replica=0, replicas=1, store=store, link="1gbit,1ms")
    assert axis.all_reduce(torch.ones(3))().tolist() == [1.0] * 3
    axis.close()
