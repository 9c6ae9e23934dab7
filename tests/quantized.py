"""The size of a shard wire's messages."""

from detonation.wire.wire import BLOCK


def quantized_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits, whole blocks of them, each with a scale in bf16.

    >>> quantized_bytes(256, 4), quantized_bytes(1, 8)
    (132, 130)
    """
    return -(-count // BLOCK) * (BLOCK * width // 8 + 2)
