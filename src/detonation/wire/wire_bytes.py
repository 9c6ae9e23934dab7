"""The bytes and the memory of a shard wire: arithmetic on sizes, so that they are known without a model in memory."""

from collections.abc import Sequence

from detonation.wire.wire import WIDTHS, ShardWire

BLOCK = 128
"""The numbers that share a scale."""


def quantized_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits, whole blocks of them, each with a scale in bf16.

    >>> quantized_bytes(256, 4), quantized_bytes(1, 8)
    (132, 130)
    """
    return -(-count // BLOCK) * (BLOCK * width // 8 + 2)


def weight_bytes(wire: ShardWire, sizes: Sequence[int], nodes: int, itemsize: int = 4, exact: bool = False) -> int:
    """Bytes that a rank sends to other nodes in one exchange of weights.

    Args:
        sizes: The numbers of a rank's shard of each FSDP unit, as FSDP2 pads them.
        itemsize: Bytes of a gathered weight.
        exact: The weights travel as they are: the first exchange, a resync.

    >>> weight_bytes(ShardWire(), [256], nodes=2), weight_bytes(ShardWire(), [256], nodes=2, exact=True)
    (132, 1024)
    """
    width = 0 if exact else WIDTHS[wire.weights]
    return (nodes - 1) * sum(quantized_bytes(size, width) if width else size * itemsize for size in sizes)


def gradient_bytes(wire: ShardWire, sizes: Sequence[int], nodes: int) -> int:
    """Bytes that a rank sends to other nodes in one reduce-scatter of all units; 0 where torch's own carries them.

    Args:
        sizes: The numbers of a rank's shard of the trained parameters of each FSDP unit, as FSDP2 pads them.

    >>> gradient_bytes(ShardWire(gradients="8bit"), [256], nodes=3)
    520
    """
    width = WIDTHS[wire.gradients]
    return (nodes - 1) * sum(quantized_bytes(size, width) for size in sizes) if width else 0


def wire_memory(wire: ShardWire, size: int, nodes: int, itemsize: int = 4) -> int:
    """Bytes that a rank holds for a shard wire between steps: the reference, and the residual of gradients.

    Args:
        size: The numbers of a rank's shard of all parameters.
        itemsize: Bytes of a gathered weight.

    >>> wire_memory(ShardWire(), 100, nodes=2), wire_memory(ShardWire(gradients="fp32"), 100, nodes=2, itemsize=2)
    (1200, 400)
    """
    return nodes * size * itemsize + (4 * (nodes - 1) * size if WIDTHS[wire.gradients] else 0)
