"""Messages padded as on an accelerator: each begins at a multiple of 16 bytes, and says what it says without."""

import pytest
import torch
from benchmarks.accelerator import launches
from torch import nn

import detonation as dt
import worlds
from covering import some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.flat.written import WrittenWeights
from detonation.core.integrity.message import HEADER_BYTES, Header, resent
from detonation.core.link.communicator import Communicator
from detonation.core.link.link import Link
from detonation.core.replicator.channel import Channel
from detonation.core.runtime import Runtime
from detonation.core.schemes import buckets
from detonation.core.schemes.scheme import ALIGNMENT
from detonation.core.schemes.traffic import bytes_sent, collective_for, overlapped_bytes
from detonation.testing import check_scheme
from detonation.wire.collectives import (
    WEIGHT_MOVES,
    BlockIntegers,
    DifferenceGather,
    ErrorFeedbackReduce,
)
from zoo import KINDS, TALKING, Plain, batch, built

STEPS = 4
SHAPES = {"weight": (37, 65), "bias": (70,), "none": (0,)}


class Wire(Communicator):
    """A communicator that keeps the messages that it was given, one row for each receiver; no words of agreement."""

    def __init__(self, inner):
        self._inner, self.replica, self.rows = inner, inner.replica, []

    def size(self):
        return self._inner.size()

    def all_reduce(self, values):
        return self._inner.all_reduce(values)

    def all_gather(self, mine):
        self.rows += (
            [mine.clone()]
            * (self.size() - 1)
            * (mine.dtype == torch.uint8 and len(mine) > HEADER_BYTES)
        )
        return self._inner.all_gather(mine)

    def all_to_all(self, mine):
        self.rows += [row.clone() for row in mine.view(self.size(), -1)]
        return self._inner.all_to_all(mine)


def wide():
    """Enough parameters for several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 1031), nn.Tanh(), nn.Linear(1031, 32))


def trained(communicator, scheme, act, make=lambda: built(Plain)):
    """Digests of weights and state of an optimizer after `act`, messages, bytes counted, and what `act` returned."""
    wire, model = Wire(communicator), make()
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, wire, scheme)
    optimizer.set_up()
    wire.rows.clear()  # those of the comparison
    made = act(wire.replica, model, optimizer)
    state = {name: digest([tensor]) for name, tensor in dt.replica_state(optimizer).items()}
    return (digest(model.parameters()), state), wire.rows, optimizer.stats.bytes_sent, made


def train(replica, model, optimizer):
    for step in range(STEPS):
        model(batch(replica, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_overlapped(replica, model, optimizer):
    for step in range(STEPS):
        loss = model(batch(replica, step, 32)).mean()
        with optimizer.overlap():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.set_up()[0].channel.pipelines)


def require_padded(plain, padded):
    """The same messages in the same order, each followed by less than a unit of padding."""
    for one, other in zip(plain, padded, strict=True):
        assert len(other) % ALIGNMENT == 0 and 0 <= len(other) - len(one) < ALIGNMENT
        assert torch.equal(other[: len(one)], one)


def gathered(scheme, replicas):
    return collective_for(scheme, scheme.codec.layout({"all": (4096,)}), replicas) != "all-reduce"


@some("name", [name for name, scheme in TALKING.items() if gathered(scheme, 3)], keep=KINDS)
def test_padding_changes_no_bit_of_weights_memory_or_messages_and_is_counted(name):
    scheme, shapes = TALKING[name], {n: p.shape for n, p in built(Plain).named_parameters()}
    layout = scheme.codec.layout(shapes)
    for replicas in (2, 3):
        found = [
            simulate_replicas(lambda c, s=s: trained(c, s, train), replicas)
            for s in (scheme, scheme.aligned())
        ]
        for (same, plain, sent, _), (also, padded, more, _) in zip(*found, strict=True):
            assert same == also
            require_padded(plain, padded)
            of_steps = [
                sum(bytes_sent(s, layout, replicas, t) for t in range(STEPS))
                for s in (scheme, scheme.aligned())
            ]
            assert [sent, more] == of_steps


@pytest.mark.parametrize("name", ["demo", "demo-owner", "demo-bitmap-2bit", "random-majority"])
def test_buckets_are_padded_one_by_one(name, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**11)
    scheme, shapes = TALKING[name], {n: p.shape for n, p in wide().named_parameters()}
    layout, both = scheme.codec.layout(shapes), (scheme, scheme.aligned())
    found = [
        simulate_replicas(lambda c, s=s: trained(c, s, train_overlapped, wide), 2) for s in both
    ]
    for (same, plain, sent, count), (also, padded, more, _) in zip(*found, strict=True):
        assert same == also and count > 1
        require_padded(plain, padded)
        assert [sent, more] == [STEPS * overlapped_bytes(s, layout, 2) for s in both]


@pytest.mark.parametrize("local_ranks", [1, 2, 3])
def test_a_channel_on_an_accelerator_pads_the_share_of_each_rank(local_ranks):
    link = Link(LoopbackCommunicator(2))
    link.local_ranks = local_ranks
    for device, unit in (("cpu", 1), ("meta", ALIGNMENT * local_ranks)):
        for scheme in (dt.demo(), dt.demo(link="owner"), dt.demo(topk=1, link="owner")):
            layout = scheme.codec.layout(SHAPES)
            channel = Channel(scheme, layout, link, Runtime(torch.device(device), kernels=False))
            assert channel.scheme.codec.alignment == channel.scheme.reply_codec(2).alignment == unit


def test_whoever_sends_a_message_again_pads_it_too(monkeypatch):
    """With padding of any content, here 255."""
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: empty(*a, **k).fill_(255 if k.get("dtype") == torch.uint8 else 0),
    )
    for scheme in (dt.demo(topk=3, chunk=10), dt.demo(topk=3, chunk=10, link="owner")):
        layout, link = scheme.codec.layout(SHAPES), Link(LoopbackCommunicator(3))
        channel = Channel(scheme.aligned(), layout, link, Runtime(torch.device("cpu")))
        for step in range(2):
            update = (
                channel.send([torch.randn(shape) for shape in SHAPES.values()], step)
                .receive()
                .flat()
            )
        assert channel.counts.refused == 0 and update.any()


@pytest.mark.parametrize(
    "scheme",
    [dt.demo(), dt.demo(link="owner"), dt.random_sign(rate=1 / 8)],
    ids=lambda s: f"{s.name}-{s.link}",
)
def test_kernels_read_messages_where_they_arrived(scheme, monkeypatch):
    """A message that is whole and aligned is not joined: that would be a copy."""
    pytest.importorskip("triton")
    from detonation.kernels.gpu.inspection import Inspector

    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    in_place, inspect = [], Inspector.inspect

    def watched(self, runs, shapes, whole, *others):
        in_place.append(whole.data_ptr() == runs[0].data_ptr())
        return inspect(self, runs, shapes, whole, *others)

    monkeypatch.setattr(Inspector, "inspect", watched)
    monkeypatch.setattr(launches, "olmo2_1b", SHAPES.values)  # a message of an odd number of bytes
    launches.operations(scheme, 2, overlap=False, kernels=True)
    assert in_place and all(in_place)


def sent_between_nodes(communicator, width):
    wire, codec, count = Wire(communicator), BlockIntegers(width), 300
    reduce = ErrorFeedbackReduce(Link(wire), None, codec, lambda: {"weight": count})
    gather = DifferenceGather(Link(wire), None, codec, 0, lambda: True, WrittenWeights())
    some = count - (width == 8)  # an odd number of weights
    total, whole, generator = (
        torch.zeros(count),
        torch.empty(3 * some),
        torch.Generator().manual_seed(wire.replica),
    )
    for _ in range(3):
        output = torch.empty(count)
        reduce(
            output,
            torch.randn(3 * count, generator=generator),
            None,
            torch.distributed.ReduceOp.SUM,
        )
        WEIGHT_MOVES()
        gather(whole, total.add_(output)[:some], None)
    return digest([total, whole]), wire.rows


@pytest.mark.parametrize("width", [4, 8])
def test_a_shard_wire_pads_its_messages_too(width, monkeypatch):
    def act(communicator):
        return sent_between_nodes(communicator, width)

    plain = simulate_replicas(act, 3)
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    for (same, rows), (also, padded) in zip(plain, simulate_replicas(act, 3), strict=True):
        assert same == also
        require_padded(rows, padded)


def laned(mesh, scheme):
    """The sizes of the shares that this rank sends over the slow link, and the weights."""
    model = built(Plain)
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], scheme, intra_node=mesh["shard"])
    for step in range(STEPS):
        model(batch(mesh["replicate"].get_local_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.parameters()), optimizer.stats.bytes_sent


@pytest.mark.parametrize("link", ["all-gather", "owner"])
def test_a_share_of_a_message_is_padded_to_whole_units(link):
    scheme = dt.demo(topk=3, chunk=10, link=link)
    layout = scheme.codec.layout({n: p.shape for n, p in built(Plain).named_parameters()})
    (weights, _), *_ = worlds.run(laned, 2, 2, scheme)
    for same, sent in worlds.run(laned, 2, 2, scheme.aligned(local_ranks=2)):
        assert same == weights and sent % ALIGNMENT == 0
        assert sent == STEPS * bytes_sent(
            scheme.aligned(local_ranks=2), layout, 2, 0, local_ranks=2
        )


@pytest.mark.parametrize("name", ["full-bf16", "demo-tiles"])
def test_the_laws_know_the_padding_of_an_accelerator(name, monkeypatch):
    monkeypatch.setenv("DETONATION_KERNELS", "triton")  # the CPU plays one
    check_scheme(TALKING[name])


@pytest.mark.parametrize("nbytes", [0, 100, 4032, 9001])
def test_a_loopback_sends_what_each_replica_would_have_sealed(nbytes):
    messages = torch.randint(0, 256, (2, HEADER_BYTES + nbytes // 8 * 8 + 16), dtype=torch.uint8)
    messages[1, HEADER_BYTES:] = messages[0, HEADER_BYTES:]
    messages[:, HEADER_BYTES + nbytes :] = 0
    for row, sender in enumerate((0, 5)):
        Header(2**62 + 1, 3, 2, sender, status=4, received=2**61).seal(
            messages[row : row + 1], nbytes
        )
    own, wanted = messages
    own[HEADER_BYTES + nbytes :] = 77  # padding of any content
    assert torch.equal(resent(own, 5)[: HEADER_BYTES + nbytes], wanted[: HEADER_BYTES + nbytes])
    for other in (own[1:], own[:50], torch.zeros_like(own)):  # what nobody sealed
        assert torch.equal(resent(other, 5), other)
    assert resent(own.to("meta"), 5).shape == own.shape  # where a read by the host raises
