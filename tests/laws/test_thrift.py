"""Nothing is paid for twice: bytes, copies, messages and waits are as few as they can be."""

import os
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_padding_rows import Words, train
from test_step_cost import Watch
from test_written import SMEARING, TOKEN
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.survive import elastic_axis
from detonation.core.codec import precision
from detonation.core.flat.layout import Layout
from detonation.core.integrity.message import HEADER_BYTES, MAGIC, resent
from detonation.core.link.communicator import HostStaging, communicator_of
from detonation.core.schemes import buckets
from detonation.feed import publisher
from detonation.feed.shard import ShardFollower
from detonation.feed.stream import Joined
from detonation.feed.weights import differences
from limits import Clock
from steps import advance, following, started
from zoo import TALKING, Plain, built

CPU = torch.device("cpu")


def rows_of(codec):
    rows = 2 * codec.unit + 5
    made = torch.Generator().manual_seed(1)
    return rows, torch.randn(rows, codec.selection.chunk, generator=made)


@pytest.mark.parametrize("name", TALKING)
def test_law_4_the_memory_of_a_message_is_no_larger_than_the_message(name):
    codec = TALKING[name].codec
    rows, flat = rows_of(codec)
    message = codec.encode(codec.select(flat, 0, 3))
    assert message.untyped_storage().nbytes() == codec.nbytes(rows)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.int64])
def test_numbers_of_a_message_are_copied_only_where_their_address_is_odd(kind):
    octets = torch.arange(10 * kind.itemsize, dtype=torch.uint8).view(1, -1)
    for start in range(kind.itemsize + 1):
        cut = octets[:, start : start + 4 * kind.itemsize]
        found = precision.numbers(cut, kind)
        assert (found.data_ptr() == cut.data_ptr()) == (start % kind.itemsize == 0)
        assert torch.equal(found.view(torch.uint8), cut)


def test_a_message_that_another_sends_again_needs_little_more_memory_than_its_copy():
    message = torch.zeros(2**20, dtype=torch.uint8)
    words = message[:HEADER_BYTES].view(torch.int64)
    words[0] = MAGIC
    words[4] = len(message) - HEADER_BYTES
    with Watch() as watch:
        resent(message, 1)
    assert watch.peak <= 1.25 * len(message)


def kept_buffers(mesh):
    """Which buffers of some messages are still in memory after each was given back."""
    axis = communicator_of(mesh["replicate"])
    known = []
    for size in (64, 128, 256):
        received = torch.zeros(mesh.size(), size, dtype=torch.uint8)
        known.append(weakref.ref(received))
        axis.recycle(received)
        del received
    return [each() is not None for each in known]


def test_a_rank_on_a_cpu_keeps_one_buffer_of_those_it_has_received_in():
    assert worlds.run(kept_buffers, 2, 1) == [[False, False, True]] * 2


@pytest.mark.parametrize("patterns", [8, 3 * differences.CHUNK // 2])
def test_differences_of_weights_are_found_with_memory_for_one_part_of_them(patterns):
    old = torch.zeros(patterns, dtype=torch.int16)
    new = old.clone()
    new[5] = 1
    with Watch() as watch:
        watch._count(new.untyped_storage())
        watch._count(old.untyped_storage())
        watch.now = watch.peak = 0
        found, deltas = differences.changes(new, old)
    assert (found.tolist(), deltas.tolist()) == ([5], [1])
    part = min(old.nbytes, differences.CHUNK * old.element_size())
    assert watch.peak <= 1.25 * part + 2**10


@pytest.mark.parametrize("name", TALKING)
def test_no_bucket_is_smaller_than_the_smallest_message_that_is_worth_its_launch(name):
    scheme = TALKING[name]
    unit = buckets.rows_of_a_turn(scheme, 2)
    line = 4 * scheme.codec.selection.chunk
    for size in (1, 2, 3, 5, 8, 100):
        numel = size * buckets.SMALLEST // 4
        layout = Layout.of({"w": (numel,)}, scheme.codec.selection.chunk)
        for few in (False, True):
            cut = buckets.cut_into_buckets(layout, scheme, unit, few)
            rows = [bucket.layout.rows for bucket in cut]
            assert sum(rows) == layout.rows
            assert len(cut) == 1 or min(rows) > buckets.SMALLEST // line - unit


class Copies(TorchDispatchMode):
    """The copies of other tensors into one, and whether the host waits for each."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "copy_":
            self.waits.append(not (kwargs or {}).get("non_blocking", (*args, False)[2]))
        return function(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_what_it_copies_to_a_device():
    host = torch.zeros(4, 64, dtype=torch.uint8)
    with Copies() as copies:
        there = HostStaging().to_device(host, torch.empty(64, device="meta"))
    assert there.device.type == "meta" and copies.waits == [False]


def test_a_follower_has_one_copy_of_the_state_where_no_padding_row_moves(monkeypatch):
    """The replicas ask in each step whether one does, as nobody has used the words."""
    dropped = []
    drop = publisher.Feed.disconnect

    def noted(feed, reason):
        dropped.extend([reason] * len(feed._subscribed))
        if not dropped:
            drop(feed, reason)

    monkeypatch.setattr(publisher.Feed, "disconnect", noted)
    model = Words()
    base = dt.SignSGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(2), SMEARING["demo"])
    served = Words()
    with following(model, optimizer, served, TOKEN) as (_, follower):
        train(model, optimizer, 0, [("nothing",)] * 3 + [("words",)] * 2)
    assert dropped == [] and follower.joins == 1
    assert torch.equal(served.words.weight, model.words.weight)


class Waiting:
    """A process that waits for a copy of the state, and reads nothing else."""

    alive = True

    def __init__(self):
        self.copies = 0

    def begin(self, about, state, waiting):
        self.copies += 1

    def offer(self, content):
        pass


@pytest.mark.parametrize("lasts_s", [0.5, 2.0])
def test_copies_of_the_state_use_one_part_in_a_hundred_of_the_time_of_training(
    lasts_s, monkeypatch
):
    """A second follower gets its copy at the first step after the rest, and not before."""
    clock = Clock()
    take = publisher.take_snapshot

    def slow(*arguments, **options):
        clock.sleep(lasts_s)
        return take(*arguments, **options)

    monkeypatch.setattr(publisher, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(publisher, "take_snapshot", slow)
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    first, second = Waiting(), Waiting()
    feed._coming.append(first)
    advance(model, optimizer, 0, [0])
    feed._coming.append(second)
    copied = clock()
    for step, after_s in enumerate([0.0, 99 * lasts_s, 99.9 * lasts_s], 1):
        clock.now = copied + after_s
        advance(model, optimizer, 0, [step])
        assert (first.copies, second.copies) == (1, 0)
    clock.now = copied + 100 * lasts_s
    advance(model, optimizer, 0, [4])
    assert (first.copies, second.copies) == (1, 1)
    feed._subscribed.clear()
    feed.close()


def test_a_follower_loads_only_the_last_of_the_copies_that_wait_for_it(monkeypatch):
    loaded = []
    apply = ShardFollower.apply

    def counted(shard, events):
        loaded.extend(event for event in events if isinstance(event, Joined))
        return apply(shard, events)

    monkeypatch.setattr(ShardFollower, "apply", counted)
    monkeypatch.setattr(publisher, "REST", 0.0)
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    served = built(Plain)
    with following(model, optimizer, served, TOKEN) as (feed, follower):
        stream = follower._streams[0]
        for joins in (1, 2):
            while stream.joins < joins or not feed.followers:
                with follower._changed:
                    came = stream.came
                advance(model, optimizer, 0, [optimizer.step_count])
                with follower._changed:
                    follower._changed.wait_for(lambda came=came: stream.came != came, 0.1)
            if joins == 1:
                feed.disconnect("it comes again")
        advance(model, optimizer, 0, [optimizer.step_count])
        follower.update(to=optimizer.step_count)
        assert len(loaded) == 1
        assert all(map(torch.equal, served.parameters(), model.parameters()))


class OneShard:
    """A mesh whose nodes have one rank each, which has nobody to ask."""

    def __getitem__(self, name):
        return SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1)


def test_a_newcomer_of_one_shard_asks_no_other_shard_for_its_number():
    store = HashStore()
    axis = dt.elastic(replica=0, replicas=1, store=store)
    guest = elastic_axis.Guest(store, OneShard())
    assert guest.number == 1
    guest.membership.stop()
    axis.close()


def test_a_server_of_a_meeting_point_uses_no_processor_until_a_signal_comes():
    """It would end by another signal, which a process gets for each second of a processor."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGVTALRM, lambda *_: os._exit(9))
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        elastic_axis.serve_meeting("127.0.0.1:0", lambda where: told(writes))
    os.close(writes)
    assert os.read(reads, 1) == b"+"
    os.close(reads)
    end = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(end) == 7


def told(writes):
    os.write(writes, b"+")
    pause = signal.pause

    def paused():
        os.kill(os.getpid(), signal.SIGTERM)
        pause()

    signal.pause = paused
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
