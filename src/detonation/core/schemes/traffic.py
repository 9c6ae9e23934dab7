"""Computes the bytes that a scheme sends, from the layout of the parameters, without a model in
memory.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import inf
from typing import Literal

from detonation.core.base_error import DetonationError
from detonation.core.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import Bucket
from detonation.core.integrity.message import DIGITS, HEADER_BYTES
from detonation.core.schemes.buckets import aligned_rows, cut_into_buckets, rows_of_a_turn
from detonation.core.schemes.scheme import Scheme

CollectiveKind = Literal["all-reduce", "all-gather", "owner"]

SMALL = 2**20
"""If the messages of all replicas together have at most this many bytes, an all-gather over gloo
sends each message to all replicas at the same time instead of along a ring."""
MANY_REPLICAS = 8
"""From this number of replicas on, the replies of owners (replicas that aggregate rows for all)
raise the loss by at most 0.7 %. Among four replicas they raise it by up to 1.0 % (research/log.md).
"""

WORTH_A_ROUND = 0.9
"""The exchange through owners is used only if it sends less than this share of an all-gather's
bytes, because it adds a second collective and a second rounding.
"""


class LargerThanDense(DetonationError, ValueError):
    """Raised if a scheme would send more bytes than the full synchronisation that it replaces."""


def collective_for(
    scheme: Scheme, layout: Layout, replicas: int, local_ranks: int = 1
) -> CollectiveKind:
    """Returns the collective that sends the messages of `scheme`. With the link "auto", the bytes
    of each collective and its effect on the loss decide.

    If an all-reduce can add the messages, it is used. Otherwise the choice is between an all-gather
    and a two-stage all-reduce, in which owners aggregate some of the rows for all. The two-stage
    all-reduce is used if it needs clearly fewer bytes (`WORTH_A_ROUND`). But if few replicas each
    select their own coefficients, the small replies of owners raise the loss. Owners are then used
    only if an all-gather would send more than full synchronisation.
    """
    if scheme.link != "auto":
        return scheme.link
    if scheme.summable:
        return "all-reduce"
    if replicas == 2 or not scheme.aggregation.rowwise:
        return "all-gather"
    sizes = layout.rows, replicas, local_ranks
    gathered, owned = (exchange_bytes(kind, scheme, *sizes) for kind in ("all-gather", "owner"))
    if owned >= WORTH_A_ROUND * gathered:
        return "all-gather"
    if scheme.codec.selection.shared or replicas >= MANY_REPLICAS:
        return "owner"
    dense = dense_bytes(layout.numel, replicas, local_ranks) * scheme.round.every
    if exchange_bytes("all-gather", scheme, *sizes, bare=True) > dense:
        return "owner"
    return "all-gather"


def exchange_bytes(
    kind: CollectiveKind,
    scheme: Scheme,
    rows: int,
    replicas: int,
    local_ranks: int = 1,
    bare: bool = False,
) -> int:
    """Bytes that one of `replicas` replicas sends in an exchange over a ring, if each message has
    `rows` rows.

    For n bytes and R replicas, an all-reduce sends 2 n (R - 1) / R bytes, and an all-gather
    n (R - 1) bytes. In an exchange through owners, a replica sends R - 1 slices of its message and
    R - 1 replies. If `local_ranks` ranks of a node share one message, n is the part of each rank.

    bare: True to leave out the header of a message, or the status numbers of an all-reduce.
    """
    codec = scheme.codec
    if kind == "owner":
        stages = codec, scheme.reply_codec(replicas)
        return sum(stage_bytes(each, rows, replicas, local_ranks, bare) for each in stages)
    if kind == "all-gather":
        return ring_bytes(
            kind, bytes_per_rank(codec.sent(rows, HEADER_BYTES * (not bare)), local_ranks), replicas
        )
    unit = codec.precision.nbytes(1, 1)
    nbytes = codec.nbytes(rows) + DIGITS * replicas * unit * (not bare)
    return ring_bytes(kind, bytes_per_rank(nbytes, local_ranks, unit), replicas)


def stage_bytes(
    codec: Codec, rows: int, replicas: int, local_ranks: int = 1, bare: bool = False
) -> int:
    """Bytes that one of `replicas` replicas sends in one of the two collectives of an exchange
    through owners (replicas that each aggregate some of the rows)."""
    nbytes = codec.sent(-(-rows // replicas), HEADER_BYTES * (not bare))
    return (replicas - 1) * bytes_per_rank(nbytes, local_ranks)


@lru_cache(maxsize=256)
def bytes_per_rank(nbytes: int, local_ranks: int, unit: int = 1) -> int:
    """Returns the bytes of a message that each rank sends if `local_ranks` ranks share the message.
    The result is a multiple of `unit`.

    >>> bytes_per_rank(10, 4), bytes_per_rank(12, 2, unit=4)
    (3, 8)
    """
    return unit * -(-nbytes // unit // local_ranks)


@lru_cache(maxsize=256)
def ring_bytes(kind: Literal["all-reduce", "all-gather"], nbytes: int, replicas: int) -> int:
    """Returns the bytes that one rank sends if `replicas` ranks exchange `nbytes` each in one
    collective.

    >>> ring_bytes("all-reduce", 1000, 4), ring_bytes("all-gather", 1000, 4)
    (1500, 3000)
    """
    copies = replicas
    if kind == "all-reduce":
        copies = 2
    return -(-copies * (replicas - 1) * nbytes // replicas)


def is_sent_at_once(nbytes: float, replicas: int) -> bool:
    """True if an all-gather over gloo sends a message of `nbytes` to all other replicas at the same
    time, instead of along a ring.

    Gloo's own all-gather is a ring, in which a message takes one latency for each other replica.
    Larger messages use the ring. Their latency is small against their transfer time, and sending to
    all replicas at the same time would need memory for copies.
    """
    return nbytes * replicas <= SMALL


def hops(kind: str, replicas: int, nbytes: float = inf) -> int:
    """Returns the number of transfers that follow one another in one exchange, in which each
    replica sends a message of `nbytes`. Each of these transfers costs one latency.

    On a ring of R replicas, an all-gather takes R - 1 transfers, and an all-reduce 2 (R - 1). An
    all-gather of a small message uses no ring and takes one transfer; see `is_sent_at_once`.

    >>> hops("all-reduce", 4), hops("all-gather", 4), hops("all-gather", 4, nbytes=25)
    (6, 3, 1)
    """
    if replicas == 1:
        return 0
    if kind == "all-to-all" or (kind == "all-gather" and is_sent_at_once(nbytes, replicas)):
        return 1
    return {"all-reduce": 2 * (replicas - 1), "all-gather": replicas - 1}[kind]


def dense_bytes(numel: int, replicas: int, local_ranks: int = 1) -> int:
    """Bytes that one rank sends in an all-reduce of `numel` fp32 gradients."""
    return ring_bytes("all-reduce", bytes_per_rank(4 * numel, local_ranks, unit=4), replicas)


def bytes_sent(
    scheme: Scheme,
    layout: Layout,
    replicas: int,
    step: int,
    local_ranks: int = 1,
    bare: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> int:
    """Bytes that one rank sends at `step` (from 0), exactly as its link counts them.

    layout: layout of all parameters of the rank. sizes: see `Scheme.divide`.
    """
    if scheme.signal == "nothing":
        return 0
    pairs = zip(scheme.divide(layout, sizes), scheme.rounds, strict=True)
    sent = [fragment for fragment, round in pairs if round.sends(step)]
    return sum(message_bytes(scheme, fragment, replicas, local_ranks, bare) for fragment in sent)


def message_bytes(
    scheme: Scheme, layout: Layout, replicas: int, local_ranks: int = 1, bare: bool = False
) -> int:
    """Bytes that one rank sends in one exchange of the parameters of `layout`: gradients as one
    message, movements of parameters bucket by bucket.
    """
    way = collective_for(scheme, layout, replicas, local_ranks)
    others: list[int] = []
    last = layout.rows
    if scheme.signal == "parameters":
        buckets = buckets_of(scheme, layout, replicas, local_ranks)
        last, *others = (bucket.layout.rows for bucket in buckets)
    found = exchange_bytes(way, scheme, last, replicas, local_ranks, bare)
    bare = bare or not scheme.divides_messages
    for rows in others:
        found += exchange_bytes(way, scheme, rows, replicas, local_ranks, bare)
    return found


def mean_bytes(
    scheme: Scheme, layout: Layout, replicas: int, local_ranks: int, bare: bool = False
) -> float:
    """Bytes per step that one rank sends, averaged over a round."""
    parts = scheme.divide(layout)
    return (
        sum(message_bytes(scheme, part, replicas, local_ranks, bare) for part in parts)
        / scheme.round.every
    )


def buckets_of(
    scheme: Scheme,
    layout: Layout,
    replicas: int,
    local_ranks: int = 1,
    few: bool = False,
    late: Collection[str] = (),
) -> list[Bucket]:
    """Returns the buckets in which `layout` is sent during backward, or at the end of a round.

    Every bucket except the last can be cut into equal parts for all (replicas x local ranks) ranks.
    So all owners get equally many rows, and the ranks of a node get equal shares of a message.

    Args:
        few: See `block_rows`.
        late: See `cut_into_buckets`.
    """
    owned = collective_for(scheme, layout, replicas, local_ranks) == "owner"
    if owned:
        unit = rows_of_a_turn(scheme, replicas)
    else:
        unit = aligned_rows(scheme.codec)
    return cut_into_buckets(layout, scheme, unit * replicas * local_ranks, few, late)


def overlapped_bytes(scheme: Scheme, layout: Layout, replicas: int, local_ranks: int = 1) -> int:
    """Returns the bytes that one rank sends in one exchange of gradients, if the buckets are sent
    during backward. The result equals `message_bytes` except for rounding, because all buckets
    share one header.
    """
    way = collective_for(scheme, layout, replicas, local_ranks)
    last, *others = [
        bucket.layout.rows for bucket in buckets_of(scheme, layout, replicas, local_ranks)
    ]
    if way != "owner":
        bare = sum(
            exchange_bytes(way, scheme, rows, replicas, local_ranks, bare=True) for rows in others
        )
        return bare + exchange_bytes(way, scheme, last, replicas, local_ranks)
    bare = sum(stage_bytes(scheme.codec, rows, replicas, local_ranks, bare=True) for rows in others)
    # owners answer all buckets in one reply
    answer = stage_bytes(scheme.reply_codec(replicas), layout.rows, replicas, local_ranks)
    return bare + stage_bytes(scheme.codec, last, replicas, local_ranks) + answer


def require_below_dense(
    scheme: Scheme, layout: Layout, replicas: int, local_ranks: int = 1
) -> None:
    """Raises `LargerThanDense`, which states both numbers of bytes, if `scheme` would send more
    than full synchronisation.

    Headers are not counted, because their bytes matter only for models of a few hundred parameters.
    """
    ours = mean_bytes(scheme, layout, replicas, local_ranks, bare=True)
    dense = dense_bytes(layout.numel, replicas, local_ranks)
    if ours > dense:
        raise LargerThanDense(
            f"{scheme.name} with {arguments_text(scheme)} would send {ours:,.0f} bytes per step"
            f" over {replicas} replicas, full synchronisation sends {dense:,}: choose a smaller"
            " topk or rate, a precision with fewer bits, or the scheme full"
        )


def arguments_text(scheme: Scheme) -> str:
    return ", ".join(f"{name}={value}" for name, value in scheme.arguments.items())
