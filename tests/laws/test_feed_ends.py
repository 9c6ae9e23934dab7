"""What a feed and its followers owe each other: bounded bytes, an end that is told, nothing left behind."""

import math
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.feed import publisher
from detonation.feed.frames import ABOUT, STATE, FrameSocket, Listener, encoded
from detonation.feed.shard import ShardFollower
from detonation.feed.stream import Stream
from detonation.feed.token import Refused, prove_to_follower
from limits import LIMIT_S, Clock, until
from steps import STEPS, advance, started
from zoo import Plain, built

TOKEN = b"a token for tests only"


def served(frames):
    """A feed that sends these frames to one follower: its port, and the thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as connection:
            out = FrameSocket(connection, prove_to_follower(connection, TOKEN), feeds=True)
            out.receive(1000)
            for frame in frames:
                out.send(*frame)
            connection.settimeout(LIMIT_S)
            with suppress(ConnectionError):
                connection.recv(1)  # until the follower has gone

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize("other", [TOKEN[:-1], TOKEN + b"x", TOKEN[::-1]])
def test_another_token_is_refused_for_good_and_both_ends_know_why(other):
    """A follower does not come again with it: the feed has answered, and not vanished."""
    told = []
    listener = Listener("127.0.0.1:0", TOKEN, lambda *_: told.append("admitted"))
    listener._refuse = lambda connection, peer, why: (told.append(why), connection.close())
    changed = threading.Condition()
    stream = Stream("127.0.0.1", listener.port, other, 2000, 4, changed)
    with changed:
        assert changed.wait_for(lambda: stream.refusal or stream.failures > 1, LIMIT_S)
    stream.close()
    stream._thread.join(LIMIT_S)
    until(lambda: told, "the feed did not say why")  # it answers first
    listener.close()
    assert isinstance(stream.refusal, Refused)
    assert "the feed has refused the token" in str(stream.refusal)
    assert told == ["it does not know the token"] and stream.failures == 1


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_a_follower_takes_no_byte_more_than_its_copy_was_announced_with(excess):
    about = (ABOUT, encoded({"state_bytes": 10}))
    port, thread = served([about, (STATE, bytes(4)), (STATE, bytes(6 + excess))])
    changed = threading.Condition()
    stream = Stream("127.0.0.1", port, TOKEN, 2000, 4, changed)
    with changed:
        assert changed.wait_for(lambda: stream.inbox or stream.trouble, LIMIT_S)
    stream.close()
    thread.join(LIMIT_S)
    if excess:
        assert not stream.inbox
        assert f"a frame has {6 + excess:,} bytes, but at most 6 may arrive" in stream.trouble
    else:
        assert stream.inbox[0].path.stat().st_size == 10


def test_a_follower_goes_on_where_training_comes_back_with_fewer_shards():
    """The streams of the others end, with their threads."""
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        addresses = f"{feed.address},127.0.0.1:{nobody.getsockname()[1]}"
        with dt.follow(built(Plain), addresses, token=TOKEN, wait=False) as follower:
            surplus = follower._stream(1)  # of the training before, which had two shards
            follower._streams.append(surplus)
            follower._shards.append(ShardFollower(follower.model, False, None, False))
            while not feed.followers:
                follower.update(wait_s=0.01)
            for step in range(2):
                advance(model, optimizer, 0, [step])
                follower.update(to=step + 1)
            assert surplus._closed.is_set()
            surplus._thread.join(LIMIT_S)
            assert not surplus._thread.is_alive()
            assert all(map(torch.equal, follower.model.parameters(), model.parameters()))
    feed.close()


def test_a_follower_for_which_there_is_no_seat_comes_again():
    """Training has not ended for it."""
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN, most_followers=1)
    optimizer.record(feed)
    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as first:
        while not feed.followers:
            first.update(wait_s=0.01)
        with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as second:
            while not second.trouble:
                second.update(wait_s=0.01)
            assert "it has 1 followers, the most that it accepts" in second.trouble
            assert not second.ended
    feed.close()


def raising(error):
    def raises(*_):
        raise error

    return raises


FAULTS = {
    "none": None,
    "no memory": ("take_snapshot", raising(MemoryError())),
    "close replicas": ("require_followable", raising(ValueError("the replicas are close"))),
}


@pytest.mark.parametrize("had", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_follower_without_a_copy_at_the_end_gets_the_final_weights_or_an_error(
    had, fault, monkeypatch
):
    """Whenever `ended` is true, its weights are bitwise those of the end; it has `had` steps before."""
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as follower:
        until(lambda: feed.is_asked)
        if had:
            advance(model, optimizer, 0, range(had))
            follower.update(to=had)
            follower._streams[0]._hang_up()  # the network fails, and it comes again
            until(lambda: feed.is_asked)
        feed._next_copy = math.inf  # a copy would use more than its share of the time
        advance(model, optimizer, 0, range(had, STEPS))
        if FAULTS[fault]:
            monkeypatch.setattr(publisher, *FAULTS[fault])
        feed.close()
        if fault == "none":
            while not follower.ended:
                follower.update(wait_s=LIMIT_S)
            assert follower.step == STEPS
            assert all(map(torch.equal, follower.model.parameters(), model.parameters()))
            return
        held = "the weights after step 2$" if had else "no weights yet$"
        with pytest.raises(
            dt.errors.LostFeed, match=f"before its final weights arrived: this process has {held}"
        ):
            follower.update(wait_s=LIMIT_S)
        assert not follower.ended


def test_a_feed_that_ends_before_its_first_step_has_no_last_copy():
    """Its copy would need the other replicas, which may have ended already."""
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    with dt.follow(built(Plain), feed.address, token=TOKEN, wait=False) as follower:
        until(lambda: feed.is_asked)
        feed.close()
        with pytest.raises(dt.errors.LostFeed, match="no weights yet"):
            follower.update(to=1, wait_s=LIMIT_S)
        assert not follower.ended


@pytest.mark.parametrize("wait_s", [0.0, 7.0])
def test_who_closes_a_feed_waits_as_long_as_told_for_all_followers_together(wait_s, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(publisher, "time", SimpleNamespace(monotonic=clock))
    told = []

    class Slow:
        """A follower that reads nothing for some seconds."""

        alive = True
        finish = told.append

        def __init__(self, seconds):
            self.seconds = seconds
            self.thread = self

        def join(self, timeout):
            assert timeout >= 0
            clock.sleep(min(self.seconds, timeout))

    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    feed._subscribed = [Slow(3.0), Slow(100.0), Slow(100.0)]
    began = clock()
    feed.close(ended=False, wait_s=wait_s)
    assert clock() - began == wait_s
    assert [each["ended"] for each in told] == [False] * 3


def test_last_copies_have_more_time_than_queued_steps(monkeypatch):
    """A copy of the state may be large, and the link slow; but an ended run does not wait without end."""
    clock = Clock()
    monkeypatch.setattr(publisher, "time", SimpleNamespace(monotonic=clock))

    class Slow:
        alive = True

        def __init__(self):
            self.thread = self
            self.begun = 0

        def begin(self, *_):
            self.begun += 1

        def finish(self, about):
            assert self.begun == about["ended"] == 1

        def join(self, timeout):
            clock.sleep(timeout)

    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    advance(model, optimizer, 0, [0])
    feed._coming = [Slow()]
    began = clock()
    feed.close(wait_s=1.0)
    assert clock() - began == publisher.LAST_COPY_S
