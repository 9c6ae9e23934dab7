"""The plan of a replica on several nodes: bytes, seconds and memory by hand, and what the verb shows."""

import io
import math

import pytest

from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, shard_costs
from detonation.report.terminal import shard_rows, show_plan
from detonation.train.verbs.plan import Question, plan

SIZE = 128 * 1000


def test_costs_are_those_by_hand():
    link = Network.of_link_speed(LinkSpeed.parse("1gbit,1ms"), 2, 2)
    shapes = [{"embed.weight": (1000, 64), "layers.0.weight": (500, 128)}] * 4
    assert math.prod(shapes[0]["embed.weight"]) + math.prod(shapes[0]["layers.0.weight"]) == SIZE
    plain, *_, coarse = shard_costs(shapes, 2, 1.0, link)
    # rings over four ranks: three shards cross a node's border, two gathers and a reduction in fp32
    assert plain.bytes_sent == 3 * SIZE * 12
    assert plain.transfer_s == pytest.approx(3 * SIZE * 12 * 8 / 1e9 + 2 * 3 * 0.001)  # two units
    assert (plain.memory_bytes, plain.wire_bytes) == (16 * SIZE, 0)
    # two ranks send a shard's differences and gradients, 66 bytes per block of 128
    assert coarse.bytes_sent == 2 * 2 * 66 * 1000
    assert coarse.transfer_s == pytest.approx(coarse.bytes_sent * 8 / 1e9 + 2 * 2 * 0.001)
    assert coarse.total_s == 1 + coarse.transfer_s
    assert coarse.wire_bytes == 2 * SIZE * 4 + SIZE * 4
    twice, *_, coarse_twice = shard_costs(shapes, 2, 1.0, link, accumulate=2)
    assert (twice.bytes_sent, twice.transfer_s) == (2 * plain.bytes_sent, pytest.approx(2 * plain.transfer_s))
    assert coarse_twice.bytes_sent == 1.5 * coarse.bytes_sent  # gradients of each micro-batch, weights of each step
    assert shard_costs(shapes, 2, 1.0, link, itemsize=2)[-1].wire_bytes == 2 * SIZE * 2 + SIZE * 4


def asked(**changed):
    return Question(parameters="7b", link="1gbit", step_time=10.0, **{"replicas": 1, "shards": 8, **changed})


def test_the_plan_of_a_7b_model_on_two_machines_is_that_of_the_page():
    found = plan(asked(shard_nodes=2))
    rows = {row[0]: row[1:] for row in shard_rows(found)}
    assert rows["FSDP2"] == ("598 s", "588 s", "73.5 GB", "0 B", "14.0 GB")
    assert rows["4bit, 4bit"] == ("38.9 s", "28.9 s", "3.6 GB", "10.5 GB", "24.5 GB")
    shown = io.StringIO()
    show_plan(found, shown)
    assert shown.getvalue().startswith("a copy on 2 nodes, 8 shards, 7,000,000,000 parameters\n")
    assert "demo" not in shown.getvalue()  # nobody to exchange gradients with


def test_copies_on_one_node_have_no_such_rows_and_mistakes_are_named():
    assert "shard_wires" not in plan(asked())
    with pytest.raises(ValueError, match=r"--shard-nodes is 3, but must be a divisor of the 8 shards"):
        plan(asked(shard_nodes=3))
    for nodes in (-1, 0, 16):
        with pytest.raises(ValueError, match=rf"--shard-nodes is {nodes}, but must be .*, from 1 to 8"):
            plan(asked(shard_nodes=nodes))
