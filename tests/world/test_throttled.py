"""A throttled link: the time of exchanges, by a clock of the test's own, and the same training as without it."""

import gc
import os
from pathlib import Path

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.core.link.link import Link
from detonation.link_speed import LinkSpeed
from limits import Clock


def exchanges(mesh):
    """The end times of two gathers that start together, and of a reduce after them, by this rank's clock."""
    clock = Clock()
    link = Link(ThrottledCommunicator(mesh["replicate"], LinkSpeed(8e3, 0.5), clock, clock.sleep))
    mine = torch.full((1000,), mesh.get_rank(), dtype=torch.uint8)
    first, second = link.all_gather(mine), link.all_gather(mine)
    torch.distributed.barrier()  # clocks differ: the node's other rank must not find its link taken by a later message
    senders = [int(message[0]) for message in first()]
    times = [clock.now - 100]
    second()
    times.append(clock.now - 100)
    torch.distributed.barrier()
    clock.now = 200.0  # busy for longer than the link
    total = link.all_reduce(torch.full((250,), float(mesh.get_rank())))()
    return senders, float(total[0]), times, clock.now - 200


@pytest.mark.long  # no branch of its own
def test_exchanges_take_as_long_as_on_a_real_link_that_the_node_shares():
    """2 nodes of 2 ranks at 1000 bytes/s, half a second per hop: gathers and reduces send 1000 bytes per rank."""
    outcomes = worlds.run(exchanges, 2, 2)
    for rank, (senders, total, (first, second), reduced) in enumerate(outcomes):
        assert senders == [rank % 2, rank % 2 + 2] and total == sum(senders)
        # either of a node's two ranks may go first, but four messages of one second leave the node in four seconds
        assert 1.5 <= first <= 3.5 and first + 1 <= second <= 4.5
        assert 1 + 2 * 0.5 <= reduced <= 2 + 2 * 0.5
    assert max(second for _, _, (_, second), _ in outcomes) == pytest.approx(4.5)


def trained(mesh, speed):
    torch.manual_seed(mesh.get_local_rank("replicate"))
    model = torch.nn.Linear(64, 64)
    dt.shard(model, mesh)
    axis = ThrottledCommunicator(mesh["replicate"], speed) if speed else mesh["replicate"]
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, axis, dt.demo())
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dt.fingerprint(model, mesh), optimizer.stats.bytes_sent


def test_training_over_a_throttled_link_is_the_same_training():
    assert worlds.run(trained, 2, 2, LinkSpeed(1e9)) == worlds.run(trained, 2, 2, None)


def descriptors_after(mesh):
    """The names of the open files of emulated links that nobody has any more."""
    for _ in range(3):
        ThrottledCommunicator(mesh["replicate"], LinkSpeed(1e9))
    gc.collect()
    names = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return [name for name in names if "detonation-link" in name]


def test_a_link_that_nobody_has_any_more_has_no_file_open():
    assert worlds.run_alone(descriptors_after, 1, 1) == [[]]


@pytest.mark.parametrize(
    "text",
    ["100", "", "100mbit,5", "-1mbit", "0mbit", "100mbit;5ms", "fast", "1.2.3mbit", "1mbit,-2s"],
)
def test_a_link_without_units_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"must be a rate above 0 .*100mbit,5ms") as error:
        LinkSpeed.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("100mbit,5ms", 1e8, 5e-3),
        ("1Gbit", 1e9, 0.0),
        ("56 kbit, 0.2s", 56e3, 0.2),
        ("2.5gbit,40us", 2.5e9, 40e-6),
    ],
)
def test_links_are_spelled_as_rate_and_latency(text, rate, latency):
    assert LinkSpeed.parse(text) == LinkSpeed(rate, latency)
    assert LinkSpeed.parse(str(LinkSpeed.parse(text))) == LinkSpeed(rate, latency)
