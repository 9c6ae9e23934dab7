"""Traffic: how many bytes a scheme sends. Arithmetic on layouts, so that it is known without a model in memory."""

from typing import Literal

from detonation.core.flat import Layout
from detonation.core.schemes import Scheme

Kind = Literal["all-reduce", "all-gather"]


class LargerThanDense(ValueError):
    """A scheme would send more than the full synchronisation that it replaces."""


def kind(scheme: Scheme) -> Kind:
    """The collective that carries the scheme's message: an all-reduce where the network may add messages up."""
    return "all-reduce" if scheme.codec.summable and scheme.combine == "replicas" else "all-gather"


def sent(kind: Kind, nbytes: int, replicas: int) -> int:
    """Bytes that one rank sends when `replicas` of them exchange `nbytes` each, on a ring.

    >>> sent("all-reduce", 1000, 4), sent("all-gather", 1000, 4)
    (1500, 3000)
    """
    copies = 2 * (replicas - 1) if kind == "all-reduce" else (replicas - 1) * replicas
    return -(-copies * nbytes // replicas)


def dense_bytes(numel: int, replicas: int) -> int:
    """Bytes that one rank sends in an all-reduce of `numel` fp32 gradients."""
    return sent("all-reduce", 4 * numel, replicas)


def bytes_sent(scheme: Scheme, layout: Layout, replicas: int, step: int) -> int:
    """Bytes that one rank sends at `step` (from 0): exactly what its link will count."""
    if scheme.signal == "nothing" or not scheme.round.ends(step):
        return 0
    return sent(kind(scheme), scheme.codec.nbytes(layout.rows), replicas)


def check(scheme: Scheme, layout: Layout, replicas: int) -> None:
    """Raises `LargerThanDense`, with both numbers, where `scheme` would send more than full synchronisation."""
    ours = bytes_sent(scheme, layout, replicas, scheme.round.every - 1) / scheme.round.every
    dense = dense_bytes(layout.numel, replicas)
    if ours > dense:
        raise LargerThanDense(
            f"{scheme.name} with {spelled(scheme)} would send {ours:,.0f} bytes a step over {replicas} replicas, full "
            f"synchronisation sends {dense:,}: choose a smaller topk or rate, or scheme full"
        )


def spelled(scheme: Scheme) -> str:
    return ", ".join(f"{name}={value}" for name, value in scheme.arguments.items())
