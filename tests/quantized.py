"""The size of a shard wire's messages."""

from detonation.wire.wire import BLOCK


def quantized_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits, whole blocks of them, each with a scale in bf16."""
    return -(-count // BLOCK) * (BLOCK * width // 8 + 2)
