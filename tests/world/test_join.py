"""Joining: a newcomer takes the state of training from a feed, and is a replica from the next step on."""

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.feed.shared_state import memory_norm
from steps import STEPS, advance, started
from zoo import SCHEMES, Plain, built

TOKEN = b"a token for tests only"
NAMES = ["full", "demo", "demo-owner", "random-sign", "diloco", "streaming"]


def before_joining(name):
    """The state dicts of two replicas after some steps, and the newcomer's model and follower at that step."""

    def replica(communicator):
        model, optimizer = started(communicator, SCHEMES[name])
        feed = (
            dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
            if communicator.replica == 0
            else None
        )
        optimizer.record(feed)
        served = built(Plain)
        follower = dt.follow(served, feed.address, token=TOKEN, wait=False) if feed else None
        while feed and not feed.followers:
            follower.update(wait_s=0.01)
        advance(model, optimizer, communicator.replica, range(4))
        optimizer.synchronize()
        if feed:
            feed.close()
            while not follower.ended:
                follower.update(wait_s=1)
        return model, optimizer, follower

    return simulate_replicas(replica, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_newcomer_is_a_replica_from_the_next_step_on(name):
    old = before_joining(name)
    follower = old[0][2]
    assert (memory_norm(old[0][1]) > 0) == bool(SCHEMES[name].feedback)

    def replica(communicator):
        if communicator.replica == 2:
            model, optimizer = follower.model, follower.join(communicator)
        else:
            before_model, before, _ = old[communicator.replica]
            model, optimizer = before_model, regrouped(before, before_model, communicator, name)
        advance(model, optimizer, communicator.replica, range(4, STEPS))
        optimizer.synchronize()
        return digest(model.parameters()), optimizer.step_count

    found = simulate_replicas(replica, 3)
    assert found[0] == found[1] == found[2] and found[0][1] == STEPS


def regrouped(before, model, communicator, name):
    """The optimizer of a replica that goes on along another axis, with its memory."""
    optimizer = dt.replicate(before.base, model, communicator, SCHEMES[name], clip=0.5)
    state, fresh = dt.replica_state(before), optimizer.build() and optimizer.local_state()
    kept = {
        k: state[k] if k in state and state[k].shape == fresh[k].shape else fresh[k].clone()
        for k in fresh
    }
    dt.load_replica_state(optimizer, {**kept, "step": state["step"]})
    return optimizer


def test_one_replica_goes_on_from_a_follower_as_the_training_itself():
    """A warm standby: bit for bit the training that it followed, where nothing was left in a memory."""
    (model, optimizer, follower), *_ = before_joining("full")
    standby = follower.join(LoopbackCommunicator(2))
    alone = dt.replicate(optimizer.base, model, LoopbackCommunicator(2), dt.full(), clip=0.5)
    alone.resume_at(optimizer.step_count)
    for each, one in ((follower.model, standby), (model, alone)):
        advance(each, one, 0, range(4, STEPS))
    assert digest(follower.model.parameters()) == digest(model.parameters())
    assert torch.equal(*(next(iter(one.state.values()))["exp_avg"] for one in (standby, alone)))
