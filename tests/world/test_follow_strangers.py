"""Strangers at a feed, and followers that cannot keep up: training does not notice either."""

import contextlib
import logging
import queue
import socket
import threading

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.feed import frames, publisher, stream
from detonation.feed.frames import (
    ABOUT,
    MOST_STRANGERS,
    STATE,
    STEP_DONE,
    WANT,
    BadFrame,
    FrameSocket,
    encoded,
    host_and_port,
)
from detonation.feed.token import prove_to_feed, prove_to_follower, read_token
from limits import LIMIT_S

TOKEN = b"a token for tests only"


@pytest.fixture(autouse=True)
def _without_rest(monkeypatch):
    """Copies of the state follow each other at once."""
    monkeypatch.setattr(publisher, "REST", 0.0)


def training(size=8, **settings):
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters()), model, LoopbackCommunicator(2), dt.full()
    )
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN, **settings)
    optimizer.record(feed)
    return model, optimizer, feed


def step(model, optimizer):
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_training(model, optimizer, until):
    """Steps until `until()`."""
    while not until():
        step(model, optimizer)


def refused(connection):
    """True once the feed has closed the connection."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 64, bytes(64), b"\xff" * 100_000]
)
def test_a_stranger_is_refused_and_logged_and_training_goes_on(said, caplog):
    model, optimizer, feed = training()
    with (
        caplog.at_level(logging.WARNING, "detonation"),
        socket.create_connection(host_and_port(feed.address)) as one,
    ):
        one.sendall(said)
        assert refused(one)
    assert feed.followers == 0
    step(model, optimizer)
    (record,) = caplog.records
    assert (
        record.message.startswith("refused 127.0.0.1:")
        and "it does not know the token" in record.message
    )
    assert TOKEN.decode() not in caplog.text
    feed.close()


def test_connections_that_say_nothing_are_few_and_a_follower_comes_in_after_them(caplog):
    model, optimizer, feed = training()
    silent = [socket.create_connection(host_and_port(feed.address)) for _ in range(MOST_STRANGERS)]
    for each in silent:
        assert each.recv(4096)  # the opening: all places are taken
    with socket.create_connection(host_and_port(feed.address)) as more:
        assert refused(more)
    step(model, optimizer)
    for each in silent:
        each.close()
    served = nn.Linear(8, 8)
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:
        in_training(model, optimizer, lambda: follower.update(wait_s=0.01) > 0)
        feed.close()
        follower.update(to=optimizer.step_count)
        assert torch.equal(served.weight, model.weight)


def test_followers_leave_open_files_to_the_rank(monkeypatch, caplog):
    *_, feed = training()
    with (
        monkeypatch.context() as few,
        caplog.at_level(logging.WARNING, "detonation"),
        socket.create_connection(host_and_port(feed.address)) as one,
    ):
        limits = one.fileno() + frames.RESERVED_FILES // 2, -1
        few.setattr(frames.resource, "getrlimit", lambda _: limits)
        with socket.create_connection(host_and_port(feed.address)) as more:
            assert refused(more)
    assert "few open files are left to this process" in caplog.text
    feed.close()


def test_another_token_is_refused_on_both_sides():
    *_, feed = training()
    with pytest.raises(dt.errors.LostFeed, match="the feed has refused the token"):
        dt.follow(nn.Linear(8, 8), feed.address, token=b"another token of a length")
    feed.close()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        thread = threading.Thread(target=lambda: answer_as_feed(impostor.accept()[0]))
        thread.start()
        with pytest.raises(dt.errors.LostFeed, match="the other end does not know the token"):
            dt.follow(nn.Linear(8, 8), f"127.0.0.1:{impostor.getsockname()[1]}", token=TOKEN)
        thread.join()


def answer_as_feed(connection):
    with connection:
        connection.sendall(b"DTFEED\x00\x01" + bytes(32))
        connection.recv(64)
        connection.sendall(b"a proof without the token, 32 b.")
        connection.recv(1)


@contextlib.contextmanager
def pair():
    """Both ends of a connection after the handshake, and their frames: the feed's first."""
    ends, keys = socket.socketpair(), []
    thread = threading.Thread(target=lambda: keys.append(prove_to_feed(ends[1], TOKEN)))
    thread.start()
    key = prove_to_follower(ends[0], TOKEN)
    thread.join()
    assert keys == [key]
    with ends[0], ends[1]:
        yield ends, FrameSocket(ends[0], key, feeds=True), FrameSocket(ends[1], key, feeds=False)


def test_a_frame_that_is_too_long_is_refused_before_memory_is_taken():
    with pair() as (_, feed, follower):
        feed.send(ABOUT, b"first")
        assert follower.receive(5) == (ABOUT, b"first")
        feed.send(STATE, b"too long")
        with pytest.raises(BadFrame, match="8 bytes, but at most 7"):
            follower.receive(7)


@pytest.mark.parametrize("tamper", ["content", "kind", "repeated", "sent back"])
def test_a_frame_that_was_changed_repeated_or_sent_back_is_refused(tamper):
    with pair() as (ends, feed, follower):
        feed.send(ABOUT, b"content")
        octets = bytearray(ends[1].recv(4096))
        if tamper == "repeated":
            ends[0].sendall(octets)
            follower.receive(100)
        octets[{"content": -1}.get(tamper, 0)] ^= 1 if tamper in ("content", "kind") else 0
        ends[tamper == "sent back"].sendall(octets)
        with pytest.raises(BadFrame, match="damaged"):
            (feed if tamper == "sent back" else follower).receive(100)


class SlowLink:
    """The end of a feed of a link with 64 KiB/s, by a clock of its own."""

    def __init__(self):
        self.now, self.taken = 0.0, bytearray()

    def send(self, octets):
        self.taken += octets[: 1 << 16]
        self.now += 1
        return min(len(octets), 1 << 16)

    def sendall(self, octets):
        due = self.now + frames.STUCK_S
        while octets:
            octets = octets[self.send(octets) :]
            if octets and self.now > due:
                raise TimeoutError("timed out")


def test_a_follower_on_a_slow_link_has_the_time_for_pieces_and_not_for_a_whole_frame():
    link, content = SlowLink(), bytes(range(256)) * (1 << 14)  # 64 s
    FrameSocket(link, b"key", feeds=True).send(STATE, content)
    assert link.now > 2 * frames.STUCK_S and link.taken.endswith(content)


def test_a_state_beyond_all_measure_is_refused_before_memory_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def boast():
            connection, _ = server.accept()
            with connection:
                frames = FrameSocket(connection, prove_to_follower(connection, TOKEN), feeds=True)
                assert frames.receive(100)[0] == WANT
                frames.send(ABOUT, encoded({"state_bytes": 1 << 50}))
                connection.recv(1)

        thread = threading.Thread(target=boast)
        thread.start()
        with pytest.raises(dt.errors.LostFeed, match="the state of this model has at most"):
            dt.follow(nn.Linear(8, 8), f"127.0.0.1:{server.getsockname()[1]}", token=TOKEN)
        thread.join()


def test_a_follower_that_is_too_far_behind_is_dropped_and_comes_again(caplog, monkeypatch):
    monkeypatch.setattr(frames, "LEAST_WAITING", 1 << 20)
    model, optimizer, feed = training(size=512, most_behind=2)
    served = nn.Linear(512, 512)
    with dt.follow(served, feed.address, token=TOKEN, wait=False, most_behind=1) as follower:
        in_training(model, optimizer, lambda: follower.update(wait_s=0.01) > 0)
        in_training(model, optimizer, lambda: feed.followers == 0 or follower.joins > 1)
        assert "is too far behind" in caplog.text
        in_training(
            model, optimizer, lambda: follower.update(wait_s=0.01) > 0 and follower.joins > 1
        )
        feed.close()
        while not follower.ended:
            follower.update(wait_s=1)
        assert follower.step == optimizer.step_count and torch.equal(served.weight, model.weight)


class StandsStill:
    """The connection to a follower that takes the copy of the state, and of the steps nothing."""

    def __init__(self):
        self.reached, self.closed = threading.Event(), threading.Event()

    def send(self, kind, content=b""):
        if kind == STEP_DONE:
            self.reached.set()
            self.closed.wait(LIMIT_S)

    def close(self):
        self.closed.set()


@pytest.mark.parametrize(
    "size, fit", [(1 << 10, 64), (1 << 20, 8), (4 << 20, 4)], ids=["many", "some", "few"]
)
def test_the_memory_for_a_follower_that_stands_still_has_a_bound(monkeypatch, size, fit):
    monkeypatch.setattr(frames, "LEAST_WAITING", 8 << 20)
    connection = StandsStill()
    subscription = frames.Subscription(connection, "a follower", most_behind=64)
    subscription.begin({"step": 0}, [memoryview(bytes(1000))], skip=0)
    subscription.offer(bytes(size))
    assert connection.reached.wait(LIMIT_S)  # it has caught up
    for _ in range(fit):
        subscription.offer(bytes(size))
    assert subscription.alive
    subscription.offer(bytes(size))
    assert not subscription.alive and connection.closed.is_set() and not subscription._queue


def test_a_feed_that_knows_of_a_follower_is_not_gone_for_it(monkeypatch):
    """Reached late, when training may end: a follower of several shards then gives up those whose feeds are gone."""
    monkeypatch.setattr(stream, "PAUSES_S", (0.001,))
    seen, send = queue.Queue(), FrameSocket.send

    def sent(frames, kind, content=b""):
        send(frames, kind, content)
        if kind == WANT:
            seen.put(follower._streams[0].gone)

    monkeypatch.setattr(FrameSocket, "send", sent)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        follower = dt.follow(nn.Linear(8, 8), address, token=TOKEN, wait=False)
        while not follower._streams[0].gone:
            follower.update(wait_s=0.01)
        nobody.listen()
        connection, _ = nobody.accept()
        with connection:
            prove_to_follower(connection, TOKEN)
            assert seen.get(timeout=LIMIT_S) is False
            follower.close()


def test_a_copy_that_fails_ends_the_following_and_not_the_training(monkeypatch, caplog):
    model, optimizer, feed = training()
    failures = []

    def fails(*_, **__):
        failures.append(1)
        raise MemoryError("no memory")

    monkeypatch.setattr(publisher, "take_snapshot", fails)
    with dt.follow(nn.Linear(8, 8), feed.address, token=TOKEN, wait=False):
        in_training(model, optimizer, lambda: failures)
        step(model, optimizer)
    assert "there is no copy of the state: no memory" in caplog.text and len(failures) == 1
    feed.close()


def test_a_host_that_is_none_is_refused():
    with pytest.raises(dt.errors.LostFeed, match=r"^trainer\.\.example:7000: .*label"):
        dt.follow(nn.Linear(8, 8), "trainer..example:7000", token=TOKEN)


def test_a_token_is_long_and_its_file_private(tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_token({"DETONATION_TOKEN_FILE": str(path)}) == b"0123456789abcdef"
    path.chmod(0o640)
    with pytest.raises(ValueError, match="other users may read the token"):
        read_token({"DETONATION_TOKEN_FILE": str(path)})
    for env, said in (({}, "need a token"), ({"DETONATION_TOKEN": "short"}, "at least 16")):
        with pytest.raises(ValueError, match=said):
            read_token(env)


@pytest.mark.parametrize(
    "token, said",
    [
        (b"", "the token has 0 bytes, must have at least 16"),
        (b"15 bytes, short", "the token has 15 bytes, must have at least 16"),
        ("0123456789abcdef", "the token is of type str, must be bytes"),
    ],
)
def test_a_token_that_is_given_is_long_too(token, said, monkeypatch):
    monkeypatch.setenv("DETONATION_TOKEN", TOKEN.decode())  # not taken in its place
    model = nn.Linear(8, 8)
    axis = dt.elastic(replica=0, replicas=1, store=HashStore())
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.full())
    for opens in (
        lambda: dt.Feed(model, optimizer, "127.0.0.1:0", token=token),
        lambda: dt.Admission(model, optimizer, token=token),
        lambda: dt.follow(model, "127.0.0.1:1", token=token, wait=False),
        lambda: dt.admitted(model, None, token=token),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            opens()
    axis.close()


def test_who_cannot_be_followed_is_told_so():
    model = nn.Linear(8, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = dt.replicate(sgd, model, LoopbackCommunicator(2), dt.none())
    with pytest.raises(ValueError, match="exchanges nothing, so there is nothing to follow"):
        dt.Feed(model, alone, "127.0.0.1:0", token=TOKEN)
    levels = [(LoopbackCommunicator(2), dt.full()), (LoopbackCommunicator(2), dt.full())]
    with pytest.raises(ValueError, match="one level of replication"):
        dt.Feed(model, dt.replicate(sgd, model, levels=levels), "127.0.0.1:0", token=TOKEN)
    late = dt.scheme("streaming_diloco", {"link": "owner"})
    delayed = dt.replicate(sgd, model, LoopbackCommunicator(2), late)
    with pytest.raises(ValueError, match="with a delay and owners"):
        dt.Feed(model, delayed, "127.0.0.1:0", token=TOKEN)
    model, optimizer, feed = training()
    with pytest.raises(OSError, match=r"cannot listen at 127\.0\.0\.1:\d+: Address already in use"):
        dt.Feed(model, optimizer, feed.address, token=TOKEN)
    for other, said in (
        (nn.Linear(8, 9), "another model"),
        (nn.Linear(8, 8, bias=False), "training has bias"),
    ):
        with (
            pytest.raises(ValueError, match=said),
            dt.follow(other, feed.address, token=TOKEN, wait=False) as follower,
        ):
            in_training(
                model, optimizer, lambda follower=follower: follower.update(wait_s=0.01) > 0
            )
    feed.close()
