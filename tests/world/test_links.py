"""The exchange through owners: bytes that do not grow with the replicas, and nothing lost between two memories."""

import pytest
import torch

import detonation as dt
import worlds
from detonation.core.link.link import Link
from detonation.core.memory import Feedback
from detonation.core.replicator.channel import Channel
from detonation.core.runtime import Runtime
from detonation.core.schemes import traffic

CPU = torch.device("cpu")
SHAPES = {"w": (1000, 64), "b": (70,), "none": (0,)}


def sends(mesh, scheme):
    """Bytes that one exchange hands to the network by all-to-all, what was counted and foreseen, and dense bytes."""
    layout = scheme.codec.layout(SHAPES)
    link = Link(mesh["replicate"])
    channel = Channel(scheme, layout, link, Runtime(CPU))
    handed, collective = [], torch.distributed.all_to_all_single

    def counting(theirs, mine, **options):
        handed.append(mine.nbytes)
        return collective(theirs, mine, **options)

    torch.distributed.all_to_all_single = counting
    channel.send([torch.randn(shape) for shape in SHAPES.values()], 0).decode()
    foreseen = traffic.message_bytes(scheme, layout, link.replicas)
    header = foreseen - traffic.message_bytes(
        scheme, layout, link.replicas, bare=True
    )  # much beside so small a message
    return link.bytes_sent, foreseen, header, traffic.dense_bytes(layout.numel, link.replicas), sum(handed)


@pytest.mark.parametrize(
    "scheme",
    [dt.demo(), dt.random_sign(), dt.demo(precision="sign", aggregate="majority_vote")],
    ids=["demo", "random-sign", "demo-majority"],
)
def test_bytes_through_owners_do_not_grow_with_the_replicas(scheme):
    reductions = {}
    for replicas in (2, 4, 8):
        sent, foreseen, header, dense, handed = worlds.run(sends, replicas, 1, scheme)[0]
        assert sent == foreseen
        if replicas > 2:  # with two, all-gather sends as much and needs one collective
            assert sent == 2 * handed // replicas * (replicas - 1)
        reductions[replicas] = dense / (sent - header)
    assert reductions[4] == pytest.approx(reductions[2], rel=0.1)
    assert reductions[8] == pytest.approx(reductions[2], rel=0.1)


def conserved(mesh, scheme):
    """Means over the replicas: put in = told to all + kept by replicas + kept by owners."""
    layout = scheme.codec.layout(SHAPES)
    link = Link(mesh["replicate"])
    channel = Channel(scheme, layout, link, Runtime(CPU))
    put_in, sent = layout.zeros(CPU), layout.zeros(CPU)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + link.replica)
        signals = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
        put_in += layout.flatten(signals, CPU)
        sent += channel.send(signals, step).decode()
    k = torch.cat([channel.memory.residual, put_in])
    torch.distributed.all_reduce(k)
    residual, put_in = (k / link.replicas).split(layout.rows)
    parts = [torch.empty_like(channel.exchange.residual) for _ in range(link.replicas)]
    torch.distributed.all_gather(parts, channel.exchange.residual)
    owned = scheme.codec.basis.inverse(channel.exchange.owners.collect(parts))
    for total, *parts in zip(*[layout.views(flat) for flat in (put_in, sent, residual, owned)], strict=True):
        torch.testing.assert_close(sum(parts), total, atol=3e-5, rtol=1e-4)
    return True


@pytest.mark.parametrize(
    "scheme",
    [
        dt.demo(decay=1, link="owner"),
        dt.demo(decay=1, precision="2bit", link="owner"),
        dt.random(rate=1 / 4, decay=1, precision="sign", link="owner"),
    ],
    ids=["demo", "demo-2bit", "random-sign"],
)
def test_law_1_nothing_is_lost_between_replicas_and_owners(scheme):
    assert scheme.feedback == Feedback(1, 1, True)
    assert all(worlds.run(conserved, 3, 1, scheme))


def test_an_all_reduce_is_refused_where_the_network_cannot_add():
    with pytest.raises(ValueError, match="needs fp32 or bf16 at shared indices"):
        dt.scheme("random", {"link": "all-reduce", "precision": "sign"})
    with pytest.raises(ValueError, match="link is 'ring', must be one of auto"):
        dt.demo(link="ring")
