"""benchmarks/lab/relay.py: a path follows its seed, nothing arrives early, and every byte arrives."""

import socket
import threading
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from benchmarks.lab.relay import Conditions, LinkPath, TcpRelay
from benchmarks.lab.relayed_nodes import NoNamespaces, relayed_cluster

import detonation as dt
from detonation.cluster.launch import run_local

ROUGH = Conditions.of("8mbit,10ms", jitter_s=0.02, loss=0.05, stall_s=0.3, competing=0.4, seed=3)
RATE = 1e6  # bytes per second of 8mbit


def arrivals(conditions, count=200, nbytes=1500, every=0.0):
    path = LinkPath(conditions)
    return [path.arrival(nbytes, n * every, stall=path.loses(nbytes)) for n in range(count)]


def test_a_plain_path_is_rate_and_latency():
    assert arrivals(Conditions.of("8mbit,10ms"), 3, 1000) == pytest.approx([0.011, 0.012, 0.013])
    assert arrivals(Conditions.of("8mbit,10ms"), 3, 1000, every=1.0) == pytest.approx(
        [0.011, 1.011, 2.011]
    )


def test_a_path_follows_its_seed():
    assert arrivals(ROUGH) == arrivals(ROUGH)
    other = Conditions(**{**vars(ROUGH), "seed": 4})
    assert arrivals(ROUGH) != arrivals(other)
    assert LinkPath(ROUGH, direction=1).arrival(1, 0.0) != LinkPath(ROUGH, direction=0).arrival(
        1, 0.0
    )


def test_nothing_arrives_early_or_out_of_order():
    found = arrivals(ROUGH)
    assert all(early <= late for early, late in pairwise(found))
    assert all(at >= 1500 * (n + 1) / RATE + 0.01 for n, at in enumerate(found))


def test_jitter_stays_below_its_bound():
    late = [
        at - n - 0.0115
        for n, at in enumerate(arrivals(Conditions.of("8mbit,10ms", jitter_s=0.02), every=1.0))
    ]
    assert min(late) >= -1e-9
    assert 0.01 < max(late) <= 0.02 + 1e-9


def test_others_take_their_share():
    """A sender that always has more gets what others leave: over 60 s their part is within a tenth of the rate."""
    path, now = LinkPath(Conditions.of("8mbit", competing=0.4)), 0.0
    sent = 0
    while now < 60.0:
        now, sent = path.arrival(1500, now), sent + 1500
    assert 0.5 * 60 * RATE < sent < 0.7 * 60 * RATE


def test_a_loss_holds_up_what_comes_after_it():
    path = LinkPath(Conditions.of("8mbit", stall_s=0.5))
    assert [path.arrival(1000, 0.0, stall=each) for each in (False, True, False)] == pytest.approx(
        [0.001, 0.502, 0.502]
    )
    path = LinkPath(Conditions.of("8mbit", loss=0.1))
    assert 50 < sum(path.loses(1500) for _ in range(1000)) < 200
    assert not any(LinkPath(Conditions.of("8mbit")).loses(10**6) for _ in range(100))


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": 1.0},
        {"competing": -0.1},
        {"jitter_s": -1.0},
        {"burst_bytes": 0},
        {"rate_bits_per_s": 0.0},
    ],
)
def test_conditions_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be"):
        Conditions(**{"rate_bits_per_s": 8e6, **wrong})


def all_of(peer):
    """What a peer sends until it ends."""
    return b"".join(iter(lambda: peer.recv(65536), b""))


@pytest.fixture
def echo():
    """The address of a server that sends back what it has read once its client has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(all_of(peer))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def sent_and_back(address, data):
    """What came back, and the seconds that it took."""
    began = time.monotonic()
    with socket.create_connection(address) as client:
        sender = threading.Thread(
            target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR))
        )
        sender.start()
        back = all_of(client)
        sender.join()
    return back, time.monotonic() - began


def test_every_byte_arrives_and_none_before_its_time(echo):
    data = bytes(range(256)) * 400  # 102,400 bytes: 0.1 s in each direction, and 0.01 s of latency
    conditions = Conditions.of("8mbit,10ms", jitter_s=0.005, loss=0.01, stall_s=0.05, competing=0.2)
    with TcpRelay(echo, conditions) as relay:
        back, seconds = sent_and_back(relay.address, data)
        assert back == data
        assert seconds >= 2 * (len(data) / RATE + 0.01)


def test_connections_share_the_link(echo):
    data, results = b"x" * 50_000, []
    with TcpRelay(echo, Conditions.of("8mbit")) as relay:
        began = time.monotonic()
        clients = [
            threading.Thread(target=lambda: results.append(sent_and_back(relay.address, data)[0]))
            for _ in range(2)
        ]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert time.monotonic() - began >= 2 * len(data) / RATE
    assert results == [data, data]


def test_a_server_that_is_not_there_ends_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with (
        TcpRelay(address, Conditions.of("8mbit")) as relay,
        socket.create_connection(relay.address) as client,
    ):
        assert client.recv(1) == b""


def reduced(cluster):
    """The sum over two nodes, its seconds, and the bytes that this node's kernel has sent for it."""
    mesh = dt.init_mesh(2, 1, "cpu")
    values = torch.arange(50_000, dtype=torch.float32)
    dist.barrier()
    before, began = cluster.counters(dist.get_rank()), time.monotonic()
    dist.all_reduce(values, group=mesh["replicate"].get_group())
    seconds = time.monotonic() - began
    dist.barrier()  # what this node has sent last may still wait in its kernel until the other one has its sum
    counted = cluster.counters(dist.get_rank()).since(before)
    return values.tolist(), seconds, counted.sent_data_bytes


def test_ranks_meet_through_a_relay_of_packets():
    conditions = Conditions.of("80mbit,20ms", jitter_s=0.002, loss=0.002, competing=0.1)
    try:
        with relayed_cluster(2, conditions) as cluster:
            found = run_local(reduced, 2, [cluster], enter=cluster.enter)
    except NoNamespaces as error:
        pytest.skip(str(error))
    for values, seconds, sent in found:
        assert values == [2.0 * each for each in range(50_000)]
        assert (
            seconds >= 200_000 / (10 * RATE) + 0.02
        )  # an all-reduce of two: what each holds, and a latency
        assert sent >= 200_000
