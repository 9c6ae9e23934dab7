"""The exchange through owners: bytes that do not grow with the replicas, and nothing lost between two memories."""

from dataclasses import replace

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.link.link import Link
from detonation.core.memory import Feedback
from detonation.core.replicator.channel import Channel
from detonation.core.runtime import Runtime
from detonation.core.schemes import traffic
from zoo import TALKING

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
    [
        dt.demo(link="owner"),
        dt.random_sign(link="owner"),
        dt.demo(precision="sign", aggregate="majority_vote", link="owner"),
    ],
    ids=["demo", "random-sign", "demo-majority"],
)
def test_bytes_through_owners_do_not_grow_with_the_replicas(scheme):
    reductions = {}
    for replicas in (2, 4, 8):
        sent, foreseen, header, dense, handed = worlds.run(sends, replicas, 1, scheme)[0]
        assert sent == foreseen
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


OWN_SELECTION = {
    name: scheme for name, scheme in TALKING.items() if not scheme.codec.selection.shared and scheme.link == "auto"
}


def trained(communicator, scheme):
    """A digest of the weights after some steps on gradients that differ between replicas."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in ((65, 64), (70,))])
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator, scheme)
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
    return simulate_replicas(lambda communicator: trained(communicator, replace(scheme, link=link)), replicas)


@pytest.mark.parametrize("replicas", [3, 4, 5])
def test_auto_is_all_gather_bit_for_bit_for_a_selection_of_the_senders_own(replicas):
    """An owner would select the largest coefficients of the mean once more: another algorithm, and a worse one."""
    for name, scheme in OWN_SELECTION.items():
        assert ends(scheme, "auto", replicas) == ends(scheme, "all-gather", replicas), name


def test_auto_is_lawful_where_an_all_gather_would_send_more_than_dense():
    layout = dt.demo().codec.layout(SHAPES)
    for replicas in range(2, 200):
        traffic.require_below_dense(dt.demo(), layout, replicas)
    assert traffic.collective_for(dt.demo(), layout, 8) == "all-gather"
    assert traffic.collective_for(dt.demo(), layout, 64) == "owner"


@pytest.mark.parametrize("scheme", [dt.random(rate=1 / 4, aggregate="clipped_mean"), dt.sparseloco(every=2)])
def test_clipping_takes_the_norms_of_whole_messages(scheme):
    """An owner sees some rows of each message, and their norm is not that of the message."""
    assert ends(scheme, "auto", 4) == ends(scheme, "all-gather", 4)
    with pytest.raises(ValueError, match=r"link is 'owner'.*clipped_mean.*norm of the whole"):
        replace(scheme, link="owner")
