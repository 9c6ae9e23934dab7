"""The exchange through owners: bytes that do not grow with the replicas, and neither memory nor loss suffers."""

import itertools
from dataclasses import replace

import pytest
import torch

import detonation as dt
from covering import some
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.codec.aggregate import Mean
from detonation.core.flat.rows import RowOwners
from detonation.core.flat.tensors import digest
from detonation.core.link.link import Link
from detonation.core.memory import Feedback
from detonation.core.replicator.channel import Channel
from detonation.core.runtime import Runtime
from detonation.core.schemes import traffic
from steps import Passing
from zoo import TALKING

CPU = torch.device("cpu")
STEPS = 100
SHAPES = {"w": (130, 64), "b": (70,), "none": (0,)}


class Counting(Passing):
    """Counts the bytes that a communicator is given for other replicas."""

    handed = 0

    def all_gather(self, mine):
        self.handed += mine.nbytes * (self.size() - 1)
        return super().all_gather(mine)

    def all_to_all(self, mine):
        self.handed += mine.nbytes // self.size() * (self.size() - 1)
        return super().all_to_all(mine)


def sends(communicator, scheme):
    """Bytes that one exchange hands to the network, and those that were counted and foreseen."""
    layout, counting = scheme.codec.layout(SHAPES), Counting(communicator)
    link = Link(counting)
    channel = Channel(scheme, layout, link, Runtime(CPU))
    channel.send([torch.randn(shape) for shape in SHAPES.values()], 0).receive().flat()
    return counting.handed, link.bytes_sent, traffic.message_bytes(scheme, layout, link.replicas)


THROUGH_OWNERS = {
    "demo": dt.demo(link="owner"),
    "demo-dense-reply": dt.demo(topk=16, link="owner"),
    "demo-tiles": dt.demo(topk=6, chunk=8, tiles=True, precision="bf16", link="owner"),
    "demo-majority": dt.demo(precision="sign", aggregate="majority_vote", link="owner"),
    "random-sign": dt.random_sign(link="owner"),
}


@pytest.mark.parametrize("scheme", THROUGH_OWNERS.values(), ids=THROUGH_OWNERS)
def test_bytes_through_owners_are_foreseen_and_do_not_grow_with_the_replicas(scheme):
    for replicas in (2, 3, 4, 5):
        for handed, counted, foreseen in simulate_replicas(lambda c: sends(c, scheme), replicas):
            assert handed == counted == foreseen
    layout = scheme.codec.layout({"w": (64_000, 64)})
    sent = [
        traffic.message_bytes(scheme, layout, replicas, bare=True) for replicas in (32, 64, 128)
    ]
    assert max(sent) < 1.1 * min(sent)


def kept_and_sent(communicator, scheme):
    """The channel after some steps, and what it put in and what came out, `[rows, chunk]` each."""
    layout, link = scheme.codec.layout(SHAPES), Link(communicator)
    channel = Channel(scheme, layout, link, Runtime(CPU))
    put_in, sent = layout.zeros(CPU), layout.zeros(CPU)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + link.replica)
        signals = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
        put_in += layout.flatten(signals, CPU)
        sent += channel.send(signals, step).receive().flat()
    return channel, put_in, sent


@some("replicas", [3, 4, 5], keep=[3])
def test_law_1_nothing_is_lost_between_replicas_and_owners(replicas):
    """Means over the replicas: put in = sent to all + kept by replicas + kept by owners."""
    for name, talking in TALKING.items():
        if talking.feedback is None or talking.aggregation != Mean():
            continue
        scheme = replace(talking, link="owner", feedback=Feedback(1.0))
        channels, put_in, sent = zip(
            *simulate_replicas(lambda c, s=scheme: kept_and_sent(c, s), replicas), strict=True
        )
        layout, exchange = channels[0].layout, channels[0].exchange
        assert all(torch.equal(other, sent[0]) for other in sent), name  # law 2
        owned = exchange.owners.collect([channel.exchange.residual for channel in channels])
        kept = sum(
            channel.memory.residual for channel in channels
        ) / replicas + scheme.codec.basis.inverse(owned)
        for whole, part, came in zip(
            *map(layout.parts, (sum(put_in) / replicas, kept, sent[0])), strict=True
        ):
            torch.testing.assert_close(part + came, whole, atol=3e-5, rtol=1e-4, msg=name)


def test_owners_get_their_rows_in_turns_and_give_them_back():
    for rows, replicas, run in itertools.product((1, 7, 24, 25, 61, 96), (1, 2, 3, 5), (2, 4, 8)):
        owners, lines, short = (
            RowOwners(rows, replicas, run),
            torch.arange(3.0 * rows).view(rows, 3),
            torch.arange(rows),
        )
        turns = rows // (replicas * run)
        expected = [
            [(turn * replicas + r) * run + row for turn in range(turns) for row in range(run)]
            for r in range(replicas)
        ]
        rest = [*range(turns * replicas * run, rows), *[-1] * owners.missing]
        for r, mine in enumerate(expected):
            mine += rest[r * (len(rest) // replicas) : (r + 1) * (len(rest) // replicas)]
        padded = torch.cat([lines, torch.full((1, 3), 9.0)])
        dealt, numbers = owners.deal_each([(lines, padded[-1]), (short.view(-1, 1), None)])
        assert torch.equal(dealt, padded[torch.tensor(expected)])
        assert numbers.flatten(1).tolist() == [[max(0, row) for row in mine] for mine in expected]
        assert torch.equal(owners.collect(dealt), lines)
        assert all(
            map(torch.equal, owners.collect_each([dealt, numbers]), (lines, short.view(-1, 1)))
        )


def test_an_all_reduce_is_refused_where_the_network_cannot_add():
    with pytest.raises(ValueError, match="needs precision fp32 or bf16, a shared selection"):
        dt.scheme("random", {"link": "all-reduce", "precision": "sign"})
    with pytest.raises(ValueError, match="link is 'ring', must be one of auto"):
        dt.demo(link="ring")


def trained(communicator, scheme):
    """A digest of the weights after some steps on gradients that differ between replicas."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.randn(shape)) for shape in ((65, 64), (70,))]
    )
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, communicator, scheme
    )
    generator = torch.Generator().manual_seed(communicator.replica)
    for _ in range(2 * scheme.round.every + 2):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad[: 8 * communicator.replica] *= 10  # some rows of some replicas are loud
        optimizer.step()
    optimizer.synchronize()
    return digest(model.parameters())


def ends(scheme, link, replicas):
    """The digest of each replica after training through `link`."""
    return simulate_replicas(
        lambda communicator: trained(communicator, replace(scheme, link=link)), replicas
    )


OWN_SELECTION = {
    name: scheme
    for name, scheme in TALKING.items()
    if not scheme.codec.selection.shared and scheme.link == "auto"
}
EXACT = {
    "nonzero": dt.schemes.random(rate=1 / 4, aggregate="mean_nonzero"),
    "votes": dt.schemes.striding(rate=1 / 4, aggregate="majority_vote"),
}
"""Shared selections in fp32: an owner aggregates the same numbers in the same order, and nothing is rounded."""


@some("replicas", [3, 5], keep=[3])
def test_auto_is_all_gather_bit_for_bit(replicas):
    """Among few replicas for a selection of the sender's own, and through owners too where nothing is rounded."""
    for name, scheme in OWN_SELECTION.items():
        assert ends(scheme, "auto", replicas) == ends(scheme, "all-gather", replicas), name
    for name, scheme in EXACT.items():
        assert ends(scheme, "owner", replicas) == ends(scheme, "all-gather", replicas), name


def learned(communicator, scheme):
    """The loss of a student of a random teacher after some steps."""
    generator = torch.Generator().manual_seed(1)
    hidden, out = (torch.randn(shape, generator=generator) for shape in ((32, 64), (64, 10)))

    def loss(x):
        answers = ((0.3 * x @ hidden).tanh() @ out).argmax(1)
        return torch.nn.functional.cross_entropy(student(x), answers)

    torch.manual_seed(0)
    student = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = dt.replicate(
        dt.SignSGD(student.parameters(), lr=4e-3), student, communicator, scheme
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    generator = torch.Generator().manual_seed(10 + communicator.replica)
    for _ in range(STEPS):
        loss(torch.randn(16, 32, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return float(loss(torch.randn(2000, 32, generator=torch.Generator().manual_seed(2))))


@pytest.mark.long  # no branch of its own
def test_owners_cost_no_loss():
    """An answer of one message's size cost 8 % here, and up to a third in benchmarks/bytes/links.py."""
    scheme = dt.demo(topk=1, decay=0.95, precision="sign", error_feedback=False)
    gathered, owner = (
        simulate_replicas(lambda c, link=link: learned(c, replace(scheme, link=link)), 4)
        for link in ("all-gather", "owner")
    )
    assert owner == [owner[0]] * 4
    assert owner[0] < 1.03 * gathered[0]


def test_auto_takes_owners_once_an_all_gather_sends_more():
    layout = dt.demo().codec.layout({"w": (10_000, 64)})
    signs = dt.demo(topk=1, precision="sign")
    kinds = {
        scheme: [traffic.collective_for(scheme, layout, r) for r in (2, 4, 8, 16, 32)]
        for scheme in (dt.demo(), signs)
    }
    assert kinds[dt.demo()] == ["all-gather", "all-gather", "owner", "owner", "owner"]
    assert kinds[signs] == [
        *["all-gather"] * 4,
        "owner",
    ]  # with 16 owners would send 7 % less, for a round more
    for replicas in range(2, 200):  # law 5 holds for what it takes
        traffic.require_below_dense(dt.demo(), layout, replicas)


def test_headers_do_not_drive_auto_to_owners_who_cost_loss():
    scheme = dt.demo(topk=30, chunk=48)
    layout = scheme.codec.layout({"w": (12, 48)})
    bare, whole = (
        traffic.exchange_bytes("all-gather", scheme, layout.rows, 3, bare=bare)
        for bare in (True, False)
    )
    assert bare < traffic.dense_bytes(layout.numel, 3) < whole
    assert traffic.collective_for(scheme, layout, 3) == "all-gather"


class ByWholeMessages:
    rowwise = False


def test_an_aggregation_of_whole_messages_says_how_it_weighs_them():
    with pytest.raises(
        TypeError, match="ByWholeMessages does not aggregate row by row: define its `weights`"
    ):
        replace(dt.schemes.random(), aggregation=ByWholeMessages())


@pytest.mark.parametrize(
    "scheme",
    [dt.schemes.random(rate=1 / 4, aggregate="clipped_mean"), dt.schemes.sparseloco(every=2)],
)
def test_clipping_takes_the_norms_of_whole_messages(scheme):
    """An owner sees some rows of each message, and their norm is not that of the message."""
    assert ends(scheme, "auto", 4) == ends(scheme, "all-gather", 4)
    with pytest.raises(ValueError, match=r"link is 'owner'.*clipped_mean.*norm of the whole"):
        replace(scheme, link="owner")
