"""An emulated link: when exchanges are over, told by a clock of the test's own, and that they say the same."""

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.throttled import Emulated
from detonation.core.link.link import Link
from detonation.core.link.link_speed import Pace


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def exchanges(mesh):
    """When two gathers that were started together, and a reduce after them, are over; by this rank's clock."""
    clock = Clock()
    link = Link(Emulated(mesh["replicate"], Pace(8e3, 0.5), clock, clock.sleep))
    mine = torch.full((1000,), mesh.get_rank(), dtype=torch.uint8)
    first, second = link.gather([mine]), link.gather([mine])
    torch.distributed.barrier()  # clocks differ: the node's other rank must not find its wire taken by a later message
    heard = [int(parts[0][0]) for parts in first().parts]
    times = [clock.now - 100]
    second()
    times.append(clock.now - 100)
    torch.distributed.barrier()
    clock.now = 200.0  # busy for longer than the link was
    total = link.reduce(torch.full((250,), float(mesh.get_rank())))()
    return heard, float(total[0]), times, clock.now - 200


def test_exchanges_take_as_long_as_a_real_link_of_that_pace_shared_by_the_node():
    """2 nodes of 2 ranks at 1000 bytes/s, half a second a hop: each gather sends 1000 bytes a rank, a reduce 1000."""
    outcomes = worlds.run(exchanges, 2, 2)
    for rank, (heard, total, (first, second), reduced) in enumerate(outcomes):
        assert heard == [rank % 2, rank % 2 + 2] and total == sum(heard)
        # which of a node's two ranks goes first is open, but four messages of one second leave it in four seconds
        assert 1.5 <= first <= 3.5 and first + 1 <= second <= 4.5
        assert 1 + 2 * 0.5 <= reduced <= 2 + 2 * 0.5
    assert max(second for _, _, (_, second), _ in outcomes) == pytest.approx(4.5)


def trained(mesh, pace):
    torch.manual_seed(mesh.get_local_rank("replicate"))
    model = torch.nn.Linear(64, 64)
    dt.shard(model, mesh)
    axis = Emulated(mesh["replicate"], pace) if pace else mesh["replicate"]
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, axis, dt.demo())
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dt.fingerprint(model, mesh), optimizer.bytes_sent


def test_training_over_an_emulated_link_is_the_same_training():
    assert worlds.run(trained, 2, 2, Pace(1e9)) == worlds.run(trained, 2, 2, None)


@pytest.mark.parametrize(
    "text", ["100", "", "100mbit,5", "-1mbit", "0mbit", "100mbit;5ms", "fast", "1.2.3mbit", "1mbit,-2s"]
)
def test_a_link_without_units_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"must be a rate above 0 .*100mbit,5ms") as error:
        Pace.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [("100mbit,5ms", 1e8, 5e-3), ("1Gbit", 1e9, 0.0), ("56 kbit, 0.2s", 56e3, 0.2), ("2.5gbit,40us", 2.5e9, 40e-6)],
)
def test_links_are_spelled_as_rate_and_latency(text, rate, latency):
    assert Pace.parse(text) == Pace(rate, latency)
    assert Pace.parse(str(Pace.parse(text))) == Pace(rate, latency)
