"""Traffic: how many bytes a scheme sends. Arithmetic on layouts, so that it is known without a model in memory."""

from typing import Literal

from detonation.core.codec.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.integrity.header import DIGITS, HEADER_BYTES
from detonation.core.schemes.buckets import cut
from detonation.core.schemes.scheme import Scheme

Kind = Literal["all-reduce", "all-gather", "owner"]


class LargerThanDense(ValueError):
    """A scheme would send more than the full synchronisation that it replaces."""


def kind(scheme: Scheme, rows: int, replicas: int, lanes: int = 1) -> Kind:
    """The exchange that the scheme asks for or, where it leaves it open, the one that sends least.

    An all-reduce where the network may add messages up. Otherwise everyone's message to everyone, or, once that is
    more, through the owners of rows.
    """
    if scheme.link != "auto":
        return scheme.link
    if scheme.codec.summable and scheme.combine == "replicas":
        return "all-reduce"
    gathered, owned = (exchanged(k, scheme.codec, rows, replicas, lanes) for k in ("all-gather", "owner"))
    return "owner" if owned < gathered else "all-gather"


def exchanged(kind: Kind, codec: Codec, rows: int, replicas: int, lanes: int = 1, bare: bool = False) -> int:
    """Bytes that one of `replicas` sends when all tell of `rows` rows, on a ring.

    all-reduce 2 n (R - 1) / R and all-gather n (R - 1) of n bytes; through owners twice R - 1 slices of rows / R.
    Where the ranks of a node are `lanes` of one message, n is the share of each. bare: without the header of a message,
    or what stands for it where the network adds messages up.
    """
    if kind == "owner":
        return 2 * (replicas - 1) * share(codec.nbytes(-(-rows // replicas)) + HEADER_BYTES * (not bare), lanes)
    unit = codec.precision.nbytes(1, 1) if kind == "all-reduce" else 1
    header = DIGITS * replicas * unit if kind == "all-reduce" else HEADER_BYTES
    return sent(kind, share(codec.nbytes(rows) + header * (not bare), lanes, unit), replicas)


def share(nbytes: int, lanes: int, unit: int = 1) -> int:
    """Bytes of a message that each of its `lanes` carries, in whole numbers of `unit` bytes.

    >>> share(10, 4), share(12, 2, unit=4)
    (3, 8)
    """
    return unit * -(-nbytes // unit // lanes)


def sent(kind: Literal["all-reduce", "all-gather"], nbytes: int, replicas: int) -> int:
    """Bytes that one rank sends when `replicas` of them exchange `nbytes` each in one collective.

    >>> sent("all-reduce", 1000, 4), sent("all-gather", 1000, 4)
    (1500, 3000)
    """
    copies = 2 * (replicas - 1) if kind == "all-reduce" else (replicas - 1) * replicas
    return -(-copies * nbytes // replicas)


def dense_bytes(numel: int, replicas: int, lanes: int = 1) -> int:
    """Bytes that one rank sends in an all-reduce of `numel` fp32 gradients."""
    return sent("all-reduce", share(4 * numel, lanes, unit=4), replicas)


def bytes_sent(scheme: Scheme, layout: Layout, replicas: int, step: int, lanes: int = 1, bare: bool = False) -> int:
    """Bytes that one rank sends at `step` (from 0): exactly what its link will count. `layout` is of all parameters."""
    if scheme.signal == "nothing":
        return 0
    ending = [i for i, round in enumerate(scheme.rounds) if round.ends(step)]
    return sum(message_bytes(scheme, layout.fragment(i, scheme.fragments), replicas, lanes, bare) for i in ending)


def message_bytes(scheme: Scheme, layout: Layout, replicas: int, lanes: int = 1, bare: bool = False) -> int:
    """Bytes that one rank sends in one exchange of the parameters of `layout`."""
    return exchanged(kind(scheme, layout.rows, replicas, lanes), scheme.codec, layout.rows, replicas, lanes, bare)


def overlapped_bytes(scheme: Scheme, layout: Layout, replicas: int, lanes: int = 1) -> int:
    """The same where it overlaps with backward: each bucket has a header of its own."""
    way = kind(scheme, layout.rows, replicas, lanes)
    rows = [bucket.layout.rows for bucket in cut(layout, scheme, replicas * lanes)]
    return sum(exchanged(way, scheme.codec, count, replicas, lanes) for count in rows)


def check(scheme: Scheme, layout: Layout, replicas: int, lanes: int = 1) -> None:
    """Raises `LargerThanDense`, with both numbers, where `scheme` would send more than full synchronisation.

    Headers do not count: they decide nothing but for models of a few hundred parameters.
    """
    fragments = [layout.fragment(i, scheme.fragments) for i in range(scheme.fragments)]
    ours = (
        sum(message_bytes(scheme, fragment, replicas, lanes, bare=True) for fragment in fragments) / scheme.round.every
    )
    dense = dense_bytes(layout.numel, replicas, lanes)
    if ours > dense:
        raise LargerThanDense(
            f"{scheme.name} with {spelled(scheme)} would send {ours:,.0f} bytes a step over {replicas} replicas, full "
            f"synchronisation sends {dense:,}: choose a smaller topk or rate, or scheme full"
        )


def spelled(scheme: Scheme) -> str:
    return ", ".join(f"{name}={value}" for name, value in scheme.arguments.items())
