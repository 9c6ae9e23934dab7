"""Predicted cost of a shard axis over several nodes: FSDP2 as it is, and shard wires."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from detonation.plan.cost import Network, Shapes
from detonation.wire.wire import ShardWire, gradient_bytes, weight_bytes, wire_memory

FSDP2 = "FSDP2"
WIRES = {
    FSDP2: None,
    "8bit, 8bit": ShardWire("8bit", "8bit"),
    "4bit, 8bit": ShardWire("4bit", "8bit"),
    "4bit, 4bit": ShardWire("4bit", "4bit"),
}
"""The precisions of weights and gradients that a plan compares."""

SHARD_NODE = "shard_node"
"""The axis between the nodes of one replica, in a mesh and in a profile."""

TRAINING_BYTES = 16
"""Weight, gradient and the two moments of AdamW in fp32, per parameter."""


@dataclass(frozen=True)
class ShardCost:
    """Predicted cost of one step of a replica on several nodes.

    Args:
        precisions: Of weights and gradients between nodes, or `FSDP2`.
        bytes_sent: By a node, over all its ranks, to the other nodes of its replica.
        transfer_s: Seconds that they take.
        total_s: Seconds of a step in which no transfer is hidden behind computation.
        memory_bytes: Of a rank: weights, gradients and AdamW in fp32, and what the shard wire holds.
        wire_bytes: The part of it that the shard wire holds.
    """

    precisions: str
    bytes_sent: int
    transfer_s: float
    total_s: float
    memory_bytes: int
    wire_bytes: int


def shard_costs(
    shards: Sequence[Shapes], nodes: int, compute_s: float, link: Network, itemsize: int = 4, accumulate: int = 1
) -> list[ShardCost]:
    """The cost of FSDP2 and of each shard wire, for one replica whose `shards` lie on `nodes` nodes.

    For each micro-batch FSDP2 gathers twice and reduces once, in rings over all ranks, whose border between two nodes
    is crossed by all shards but one. A library that has no ring for one of them sends more. A shard wire gathers
    between nodes once per step, and reduces for each micro-batch.

    Args:
        shards: Local parameter shapes on each rank of the replica.
        compute_s: Seconds of forward and backward.
        link: Between the nodes.
        itemsize: Bytes of a gathered weight: 2 where mixed precision computes in bf16.
        accumulate: Micro-batches per step.
    """
    size = max(sum(map(prod, shapes.values())) for shapes in shards)
    ranks, units = len(shards) // nodes, unit_count(shards[0])
    found = []
    for name, wire in WIRES.items():
        if wire is None:
            # one rank of each node sends to the next node; `seconds` shares the link among all its ranks
            sent = accumulate * (len(shards) - 1) * size * (2 * itemsize + 4)
            seconds = _seconds(link, "all-gather", sent // ranks, accumulate * 3 * units)
            held = 0
        else:
            gathered = weight_bytes(wire, [size], nodes, itemsize)
            reduced = accumulate * gradient_bytes(wire, [size], nodes)
            seconds = _seconds(link, "all-gather", gathered, units)
            seconds += _seconds(link, "all-to-all", reduced, accumulate * units)
            sent, held = ranks * (gathered + reduced), wire_memory(wire, size, nodes, itemsize)
        found.append(ShardCost(name, sent, seconds, compute_s + seconds, TRAINING_BYTES * size + held, held))
    return found


def unit_count(shapes: Shapes) -> int:
    """The number of FSDP units that `detonation.shard` makes: one for each element of a list of layers, and the rest.

    >>> unit_count({"embed.weight": (9, 4), "layers.0.weight": (4, 4), "layers.1.weight": (4, 4)})
    3
    """
    layers = {found[0] for name in shapes if (found := re.match(r".*?\.\d+\.", name))}
    return len(layers) + 1


def _seconds(link: Network, operation: str, nbytes: int, units: int) -> float:
    """Seconds of `units` collectives in which a rank sends `nbytes` in all."""
    each = link.operations[operation]
    return units * each.seconds(0) + each.seconds(nbytes) - each.seconds(0)
