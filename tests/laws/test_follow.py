"""The law of following: a process that is no replica holds what the replicas agree on, bit for bit, at every step."""

import copy
import gc
import math
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import detonation as dt
import worlds
from covering import some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.integrity.observer import StepObserver
from detonation.core.schemes import buckets
from detonation.feed import publisher, stream
from detonation.feed.token import LostFeed
from detonation.gates.closeness import Closeness
from limits import LIMIT_S
from steps import STEPS, advance, bases, started, step_on
from zoo import KINDS, REGISTERED, Padded, Plain, batch, built

TOKEN = b"a token for tests only"
JOINED_AFTER = 3


def agreed_weights(optimizer):
    """The weights that the replicas agreed on last, by name."""
    return {
        slot.name: digest([tensor])
        for each in optimizer.build()
        for slot, tensor in zip(each.layout.slots, each.shared_weights(), strict=True)
    }


def held(model):
    return {name: digest([parameter]) for name, parameter in model.named_parameters()}


def followed(communicator, scheme):
    """Of each step after the follower came, and of the end: whether it has the weights that the replicas have."""
    model, optimizer = started(communicator, scheme)
    if communicator.replica:
        advance(model, optimizer, communicator.replica, range(STEPS))
        optimizer.synchronize()
        return []
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    advance(model, optimizer, 0, range(JOINED_AFTER - 1))
    served, seen = built(Plain), []
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        for step in range(JOINED_AFTER - 1, STEPS):
            advance(model, optimizer, 0, [step])
            follower.update(to=step + 1)
            seen.append(held(served) == agreed_weights(optimizer))
        optimizer.synchronize()
        feed.close()
        while not follower.ended:
            follower.update(wait_s=1)
        seen.append(held(served) == agreed_weights(optimizer) == held(model))
        assert follower.joins == 1 and follower.step == STEPS
    return seen


@some("name", REGISTERED, keep=[name for name in REGISTERED if name in KINDS])
def test_a_follower_holds_the_weights_of_each_step(name):
    scheme = REGISTERED[name]
    seen = simulate_replicas(lambda c: followed(c, scheme), 2)[0]
    assert seen == [True] * (STEPS - JOINED_AFTER + 2)


def complete_after_synchronize(communicator, scheme):
    """Whether a follower is complete before `synchronize`, whether it has the weights after it then,
    its step when it is complete, and whether it has these weights then.
    """
    model, optimizer = started(communicator, scheme)
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    served = built(Plain)
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        advance(model, optimizer, 0, range(JOINED_AFTER))
        follower.update(to=JOINED_AFTER)
        before = follower.complete, held(served)
        optimizer.synchronize()
        while not follower.complete:
            follower.update(wait_s=1)
        return before[0], before[1] == held(model), follower.step, held(served) == held(model)


def test_a_follower_is_complete_when_it_has_the_weights_after_synchronize():
    found = complete_after_synchronize(LoopbackCommunicator(2), dt.diloco(every=4))
    assert found == (False, False, JOINED_AFTER, True)


def went_back(communicator, scheme):
    """Whether a follower has the weights of each step after training went back, and the copies that came."""
    model, optimizer = started(communicator, scheme)
    feed = (
        dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN) if communicator.replica == 0 else None
    )
    optimizer.record(feed)
    served, seen = built(Plain), []
    follower = dt.follow(served, feed.address, token=TOKEN, wait=False) if feed else None

    def train(steps):
        for step in steps:
            while feed and not feed.followers:
                follower.update(wait_s=0.01)
            advance(model, optimizer, communicator.replica, [step])
            while feed and follower.step != optimizer.step_count:
                follower.update(wait_s=0.01)
            seen.append(not feed or held(served) == agreed_weights(optimizer))

    train(range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(range(3, 6))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    advance(
        model, optimizer, 1 - communicator.replica, [3]
    )  # other data; the feed tells that training went back
    train(range(4, STEPS))
    if feed:
        feed.close()
        follower.close()
    return seen, follower and follower.joins


@pytest.mark.parametrize("name", ["full", "demo", "streaming"])
def test_a_follower_goes_back_with_training(name, monkeypatch):
    monkeypatch.setattr(publisher, "REST", 0.0)
    seen, joins = simulate_replicas(lambda c: went_back(c, REGISTERED[name]), 2)[0]
    assert seen == [True] * (STEPS + 2) and joins == 2


def test_a_follower_that_nobody_has_any_more_leaves_its_place():
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN, most_followers=1)
    optimizer.record(feed)
    follower = dt.follow(built(Plain), feed.address, token=TOKEN, wait=False)
    while not feed.followers:
        follower.update(wait_s=0.01)
    (thread,) = (stream._thread for stream in follower._streams)
    del follower
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as other:
        while other.step < 0:
            advance(model, optimizer, 0, [optimizer.step_count])
            other.update(wait_s=0.01)
    feed.close()


def test_a_step_before_a_return_is_another_moment_than_the_same_step_after_it(monkeypatch):
    """A shard that comes again before another must not meet it at a step of the training before."""
    monkeypatch.setattr(publisher, "REST", 0.0)
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN, run="first")
    optimizer.record(feed)
    advance(model, optimizer, 0, [0])
    saved, moments = copy.deepcopy((model.state_dict(), optimizer.state_dict())), []

    def again():
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        advance(model, optimizer, 0, [1])

    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as follower:
        for joins in (1, 2):
            while not feed.followers:
                follower.update(wait_s=0.01)
            again()
            while follower.joins < joins:
                follower.update(wait_s=0.01)
            follower.update()
            moments.append(follower._shards[0].moment)
            again()  # the follower is dropped
    feed.close()
    assert [moment[1] for moment in moments] == [2, 2] and moments[0] != moments[1]


def followed_shards(mesh, name, kind):
    """A replica of shards has a feed for each; one model follows both: whether it was equal, of each step."""
    model = dt.shard(built(kind), mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(adam, model, mesh["replicate"], REGISTERED[name], clip=0.01)
    feed = None
    if mesh.get_local_rank("replicate") == 0:
        feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN, run="first")
        optimizer.record(feed)
    addresses = gathered(feed.address if feed else "")[:2]
    served, follower, seen = built(kind), None, []
    if mesh.get_rank() == 0:
        follower = dt.follow(served, ",".join(addresses), token=TOKEN, wait=False)
    for step in range(STEPS):
        while not all(
            gathered(not feed or feed.followers > 0)[: 1 if step == 0 else 2]
        ):  # shard 0 tells of shard 1
            if follower is not None:
                follower.update(wait_s=0.01)
        advance(model, optimizer, mesh.get_rank(), [step])
        shards = gathered(agreed_weights(optimizer))[:2]
        if (
            follower is not None
            and follower.update(wait_s=0.0 if follower.step < 0 else 5.0) == step + 1
        ):
            seen.append([agreed_weights(shard.optimizer) for shard in follower._shards] == shards)
    optimizer.synchronize()
    if feed is not None:
        feed.close()
    whole, (fingerprint, _) = (
        [p.full_tensor() for p in model.parameters()],
        dt.fingerprint(model, mesh),
    )
    if follower is not None:
        while not follower.ended:
            follower.update(wait_s=5)
        seen.append(
            digest(whole) == digest(served.parameters()) and fingerprint == follower.fingerprint
        )
        follower.close()
    return seen


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def follower_that_is_sharded(mesh):
    """A rank of a sharded follower: whether it had the weights, and which gradients it held then."""
    model = dt.shard(built(Plain), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(sgd, model, mesh["replicate"], dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    served = dt.shard(built(Plain), mesh)
    addresses = ",".join(gathered(feed.address))
    with dt.follow(served, addresses, token=TOKEN, wait=False) as follower:
        while not all(gathered(feed.followers > 0)):
            follower.update(wait_s=0.01)
        advance(model, optimizer, mesh.get_rank(), range(STEPS))
        follower.update(to=STEPS)
        gradients = [name for name, p in served.named_parameters() if p.grad is not None]
    feed.close()
    parameters = zip(model.parameters(), served.parameters(), strict=True)
    return all(torch.equal(p.to_local(), q.to_local()) for p, q in parameters), gradients


@pytest.mark.parametrize("shards", [1, 2])
def test_a_sharded_follower_holds_no_gradient_to_which_a_newcomer_would_add(shards):
    assert worlds.run(follower_that_is_sharded, 1, shards) == [(True, [])] * shards


def half_reached(mesh):
    """Follows two shards, of which one is never reached, to the end of training: the error, or None."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters()), model, mesh["replicate"], dt.full()
    )
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        addresses = f"{feed.address},127.0.0.1:{nobody.getsockname()[1]}"
        follower = (
            dt.follow(built(Plain), addresses, token=TOKEN, wait=False)
            if mesh.get_rank() == 0
            else None
        )
        while follower is not None and not feed.followers:
            follower.update(wait_s=0.01)
        advance(model, optimizer, mesh.get_rank(), range(STEPS))
        feed.close()
        if follower is not None:
            with (
                follower,
                pytest.raises(
                    dt.errors.LostFeed, match="training has ended, and the feed of one of"
                ),
            ):
                follower.update(to=STEPS)


def test_a_follower_that_never_reached_a_shard_does_not_wait_for_it_after_the_end():
    worlds.run(half_reached, 1, 2)


def reached_late(mesh, steps):
    """Follows two shards, of which the second is reached late; it takes `steps`, and its feed ends last.

    Returns the error, or whether the follower has the weights.
    """
    stream.PAUSES_S = (0.01,) * 4  # of the attempts to reach the second shard
    model, mine = dt.shard(built(Plain), mesh), mesh.get_rank()
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters()), model, mesh["replicate"], dt.full()
    )
    nobody, feed = (
        socket.socket(),
        dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN) if mine == 0 else None,
    )
    nobody.bind(("127.0.0.1", 0))  # and does not listen
    first, port = gathered(feed.address if feed else nobody.getsockname()[1])
    follower = (
        dt.follow(built(Plain), f"{first},127.0.0.1:{port}", token=TOKEN, wait=False)
        if mine == 0
        else None
    )

    def until(holds):
        """Updates until it holds on all ranks."""
        while not all(gathered(holds())):
            if follower is not None:
                follower.update(wait_s=0.01)

    optimizer.record(feed)
    until(lambda: mine or feed.followers)
    advance(model, optimizer, mine, [0])
    until(lambda: mine or (len(follower._streams) > 1 and follower._streams[1].gone))
    nobody.close()
    feed = feed or dt.Feed(model, optimizer, f"127.0.0.1:{port - 1}", token=TOKEN)
    optimizer.record(feed)
    until(lambda: feed.followers)
    advance(model, optimizer, mine, range(1, 1 + steps))
    if mine == 0:
        feed.close()
        while (
            follower.update(wait_s=0.01) < (1 + steps if steps else -1)
            or not follower._streams[0].ended
        ):
            pass
        follower.update(wait_s=0.01)  # looks whether anything is still to come
    gathered(None)
    if mine == 1:
        feed.close()
    whole = [p.full_tensor() for p in model.parameters()]
    if follower is None:
        return None
    with follower:
        try:
            follower.update(to=1 + steps, wait_s=LIMIT_S)
        except dt.errors.LostFeed as error:
            return str(error)
        return follower.ended and digest(whole) == digest(follower.model.parameters())


def test_a_shard_whose_feed_was_found_late_may_end_after_the_others():
    assert worlds.run_alone(reached_late, 1, 2, 2)[0] is True


def test_a_shard_that_ends_before_its_copy_came_is_not_waited_for():
    assert (
        worlds.run_alone(reached_late, 1, 2, 0)[0]
        == "training has ended before its final weights arrived: this process has no weights yet"
    )


def cut_before_the_end(mesh):
    """Follows two shards, of which the second is lost and waits for its copy when training ends.

    Returns whether the follower has the final weights, and its copies of the first shard.
    """
    model, mine = dt.shard(built(Plain), mesh), mesh.get_rank()
    optimizer = dt.replicate(
        bases(model.parameters()), model, mesh["replicate"], dt.diloco(every=3)
    )
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    addresses, follower = ",".join(gathered(feed.address)), None
    if mine == 0:
        follower = dt.follow(built(Plain), addresses, token=TOKEN, wait=False)

    def until(holds):
        """Updates until it holds on all ranks."""
        while not all(gathered(bool(holds()))):
            if follower is not None:
                follower.update(wait_s=0.01)

    until(lambda: mine or feed.is_asked)
    advance(model, optimizer, mine, [0])
    until(lambda: not mine or feed.is_asked)
    feed._next_copy = 0.0
    advance(model, optimizer, mine, [1])
    until(lambda: mine or follower.step == 2)
    if follower is not None:
        follower._streams[1]._hang_up()
    until(lambda: not mine or feed.is_asked)
    feed._next_copy = math.inf
    advance(model, optimizer, mine, range(2, STEPS))
    optimizer.synchronize()
    feed.close()
    whole = [p.full_tensor() for p in model.parameters()]
    if follower is None:
        return None
    with follower:
        while not follower.ended:
            follower.update(wait_s=LIMIT_S)
        return digest(whole) == digest(follower.model.parameters()), follower.joins


def test_a_shard_that_waits_for_its_copy_at_the_end_meets_the_others_there():
    assert worlds.run_alone(cut_before_the_end, 1, 2)[0] == (True, 1)


def parted(mesh):
    """Follows two shards that both come again, the second one so late that the first waits with too many steps.

    Returns the copies that came for the first shard, and False where the follower goes on no more.
    """
    stream.PAUSES_S = (0.01,) * 4
    publisher.REST = 0.0
    model, mine = dt.shard(built(Plain), mesh), mesh.get_rank()
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters()), model, mesh["replicate"], dt.full()
    )
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    addresses, follower = ",".join(gathered(feed.address)), None
    if mine == 0:
        follower = dt.follow(built(Plain), addresses, token=TOKEN, wait=False, most_behind=8)
    limit = time.monotonic() + LIMIT_S

    def until(holds):
        """Updates until it holds on all ranks; false where it does not come to that."""
        while not all(gathered(bool(holds()))):
            if follower is not None:
                follower.update(wait_s=0.01)
            if any(gathered(time.monotonic() > limit)):
                return False
        return True

    def train(steps):
        advance(model, optimizer, mine, range(optimizer.step_count, optimizer.step_count + steps))

    for comes in (
        lambda: mine or feed._coming,
        lambda: not mine or feed._coming,
    ):  # shard 0 tells of shard 1
        until(comes)
        train(1)
    until(lambda: mine or follower.step == 2)
    for each in follower._streams if follower else ():
        each._hang_up()
    until(lambda: feed._coming)
    feed.first_copy = 20 if mine else 0
    train(20)  # the second shard has steps from 20 on, and the first one no room for them
    met = until(lambda: mine or feed._coming)
    train(1)
    met = met and until(lambda: mine or follower.step == 23)
    feed.close()
    if follower is None:
        return met
    follower.close()
    return met and follower.joins


def test_shards_that_come_again_far_apart_meet_again():
    assert worlds.run_alone(parted, 1, 2) == [3, True]


@pytest.mark.long_cases("demo-Plain")
@pytest.mark.parametrize(
    ("name", "kind"), [("demo", Plain), ("streaming", Plain), ("demo", Padded)]
)
def test_a_follower_holds_the_shards_of_a_replica_as_one_model(name, kind):
    seen = worlds.run(followed_shards, 2, 2, name, kind)[0]
    assert len(seen) > 2 and all(seen), seen


def became_close(communicator):
    """Of a feed of replica 1, whose replicas are close from the third step on: where its follower was, and why."""
    model, optimizer = started(communicator, dt.loco())
    feed = (
        dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN) if communicator.replica == 1 else None
    )
    optimizer.record(feed)
    follower = dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) if feed else None
    for step in range(4):
        while feed and step in (0, 3) and not feed._coming:  # it comes again after it was dropped
            follower.update(wait_s=0.01)
        if step == 2:
            optimizer.closeness = Closeness()
            optimizer.reconfigure(dt.loco(decay=0.9))
        advance(model, optimizer, communicator.replica, [step])
        if step == 1 and feed:
            follower.update(to=2)
            assert held(follower.model) == held(model)
    while feed and "to stay close" not in follower.trouble:
        follower.update(wait_s=0.01)
    if feed:
        # training goes on, and its next start may be one that can be followed
        assert not follower.ended
        feed.close()
        follower.close()
    return feed and (follower.step, follower.joins, follower.trouble)


def test_a_feed_of_another_replica_ends_where_the_replicas_become_close(monkeypatch):
    monkeypatch.setattr(publisher, "REST", 0.0)
    _, (step, joins, trouble) = simulate_replicas(became_close, 2)
    assert (step, joins) == (2, 1) and "serve the feed from replica 0" in trouble


def test_who_follows_from_before_the_first_step_can_join_before_it():
    """The state before the first step is a state as any other."""
    model, optimizer = started(LoopbackCommunicator(1), dt.full())
    optimizer.set_up()
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as follower:
        with pytest.raises(LostFeed, match="call update before join"):
            follower.join(LoopbackCommunicator(1))
        while follower.step < 0:
            optimizer.synchronize()
            follower.update(wait_s=0.01)
        newcomer = follower.join(LoopbackCommunicator(1))
        assert newcomer.step_count == 0 and held(follower.model) == held(model)
    feed.close()


def joined_in_flight(communicator):
    """Of each step: whether a follower that joins alone has the weights on which the replicas agreed,
    and why it cannot join two replicas; "" if it can. And whether it has the last weights.
    """
    scheme = REGISTERED["streaming"]
    model, optimizer = started(communicator, scheme)
    if communicator.replica:
        return advance(model, optimizer, 1, range(STEPS))
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    found = []
    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        for step in range(STEPS):
            advance(model, optimizer, 0, [step])
            follower.update(to=step + 1)
            refused = ""
            try:
                follower.join(LoopbackCommunicator(2))
            except ValueError as error:
                refused = str(error)
            newcomer = follower.join(LoopbackCommunicator())
            found.append((agreed_weights(newcomer) == agreed_weights(optimizer), refused))
        found.append(held(follower.model) == agreed_weights(optimizer))
    feed.close()
    return found


def test_a_message_in_flight_prevents_joining_others_but_not_going_on_alone():
    *found, last = simulate_replicas(joined_in_flight, 2)[0]
    assert all(equal for equal, _ in found) and last
    refused = [bool(text) for _, text in found]
    assert any(refused) and not all(refused)
    for step, (_, text) in enumerate(found, 1):
        assert not text or text.startswith(f"a message is in flight after step {step}, so ")


class Heard(StepObserver):
    """Keeps all messages, by step."""

    def __init__(self):
        self.messages = {}

    def received(self, place, step, message):
        self.messages.setdefault(step, []).append(message.reshape(-1).clone())


def heard(communicator):
    """What an observer of overlapped steps gets, and in how many buckets it was sent."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(sgd, model, communicator, dt.full())
    observer = Heard()
    optimizer.record(observer)
    (replicator,) = optimizer.set_up()
    for step in range(2):
        loss = model(batch(communicator.replica, step, 300)).square().mean()
        step_on(optimizer, loss, overlap=True)
        optimizer.zero_grad()
    return observer.messages, len(replicator.channel.pipelines)


def test_an_observer_gets_each_message_whole_in_however_many_buckets_it_was_sent(monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 1)
    found = {}
    for number in (1, 2, 3):
        monkeypatch.setattr(buckets, "SMALL_BUCKETS", number)
        messages, sent = simulate_replicas(heard, 2)[0]
        assert sent == number
        found[number] = {step: [digest(each)] for step, each in messages.items()}
    assert len(found[1]) == 2 and found[1] == found[2] == found[3]
