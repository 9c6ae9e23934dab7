"""Settings of the shard wire, the compressed communication between the nodes of one replica."""

from dataclasses import dataclass
from typing import get_type_hints

from detonation.choices import unknown
from detonation.link_speed import LinkSpeed

WIDTHS = {"fp32": 0, "8bit": 8, "4bit": 4}
"""Bits per number of each precision between nodes; 0 for numbers that are not quantized."""


@dataclass(frozen=True)
class ShardWire:
    """The settings of compressed communication between shards, which `shard_wire` makes."""

    weights: str = "4bit"
    gradients: str = "4bit"
    nodes: int | None = None
    resync_every: int = 0
    link: str = ""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(ShardWire).items():
            if not isinstance(value := getattr(self, name), kind) or (
                isinstance(value, bool) and kind is not bool
            ):
                raise TypeError(
                    f"{name} of the shard wire is {value!r}, must be"
                    f" {getattr(kind, '__name__', kind)}"
                )
        for name, value in (("weights", self.weights), ("gradients", self.gradients)):
            if value not in WIDTHS:
                raise unknown(f"precision of {name}", value, WIDTHS)
        if self.nodes is not None and self.nodes < 2:
            raise ValueError(
                f"nodes is {self.nodes}, must be at least 2: on one node leave the shard wire out"
            )
        if self.resync_every < 0:
            raise ValueError(
                f"resync_every is {self.resync_every}, must be at least 0 (0 = at the start only)"
            )
        if self.resync_every and self.weights == "fp32":
            raise ValueError(
                "resync_every is set, but weights='fp32' are exact at every exchange:"
                " leave resync_every out"
            )
        if self.link:
            LinkSpeed.parse(self.link)


def shard_wire(
    weights: str = "4bit",
    gradients: str = "4bit",
    nodes: int | None = None,
    resync_every: int = 0,
    link: str = "",
) -> ShardWire:
    """Makes the settings with which `shard` compresses the messages between the nodes of one
    replica, for a model that does not fit into one node.

    Weights: each node keeps a reference copy of the gathered weights, split over its ranks. Once
    after each step, a rank sends the quantized difference between its shard and the reference.
    Every rank adds the same differences to the reference, so gathered weights are bitwise equal on
    all ranks. A rounding error is part of the next difference and does not accumulate. Gathers
    without a step in between (backward, evaluation, further micro-batches) stay inside the node.

    Gradients are summed inside the node without quantization. Each sum is quantized and sent to the
    node that holds the shard of its parameters. Each rank adds the rounding error to its next
    gradients (error feedback).

    Args:
        weights: "4bit" or "8bit" differences in blocks of 128 with a bf16 scale, or "fp32":
            unquantized weights.
        gradients: "4bit" or "8bit" with error feedback, or "fp32": torch's own reduce-scatter.
        nodes: number of nodes over which a replica is sharded, at least 2; by default from the
            launcher.
        resync_every: exchanges of weights after which the reference becomes exact again; 0 means
            only at the start.
        link: emulated speed of the link between the nodes, such as "100mbit,5ms"; "" emulates
            nothing.

    Raises:
        TypeError: an argument has another type.
        ValueError: an unknown precision, a number out of range, or a setting that would be ignored.

    Memory per rank, for P parameters in S shards on N nodes of L ranks: the reference needs P / L
    numbers of the gathered dtype, the error feedback 4 P (N - 1) / S bytes.

    Example:
        >>> import detonation as dt
        >>> dt.shard_wire(weights="8bit", nodes=2).gradients
        '4bit'

    Reference:
        Jia et al., SDP4Bit (arXiv 2410.15526); Wang et al., ZeRO++ (arXiv 2306.10209).
    """
    return ShardWire(weights, gradients, nodes, resync_every, link)


BLOCK = 128
"""Number of values that share one scale."""
