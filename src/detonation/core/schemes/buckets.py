"""The division of a flat into buckets that are sent while backward still computes other gradients."""

import math
from dataclasses import replace

from detonation.core.codec.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import BUCKETS, SMALL_BUCKETS, Bucket
from detonation.core.schemes.scheme import Scheme

SMALLEST = 2**20
"""The least bytes of a bucket in fp32."""


def aligned_rows(*codecs: Codec) -> int:
    """The number of rows after which messages of all `codecs` may be cut without a change of any
    bit.

    64 rows at least, because a matrix product of few rows may round differently.
    """
    return math.lcm(*(codec.unit for codec in codecs), 64)


def rows_of_a_turn(scheme: Scheme, replicas: int) -> int:
    """The number of rows in which owners take turns: messages and replies may be cut after it."""
    return aligned_rows(scheme.codec, scheme.reply_codec(replicas))


def cut_into_buckets(layout: Layout, scheme: Scheme, unit: int, few: bool = False) -> list[Bucket]:
    """The buckets of `layout`, in the order of their rows: together they send the bytes of the
    whole, bit for bit.

    Each but the last is a multiple of `unit` rows (`traffic.buckets_of`). There is one bucket for a
    layout in tiles, because such a multiple ends within a line of tiles.

    Args:
        few: See `block_rows`.
    """
    smallest = max(1, SMALLEST // (4 * layout.chunk * unit)) * unit
    rows = max(smallest, -(-block_rows(scheme, layout.rows, few) // unit) * unit)
    if layout.rows < 2 * smallest or layout.rows <= rows or layout.tiled:
        return [Bucket.whole(layout)]
    ends = [*range(rows, layout.rows - smallest, rows), layout.rows]
    return [Bucket.of(layout, first, end) for first, end in zip([0, *ends], ends, strict=False)]


def block_rows(scheme: Scheme, rows: int, few: bool = False) -> int:
    """About the rows of a bucket.

    Args:
        few: Whether all but messages of their own leave in `BUCKETS`: Triton kernels need no
            temporaries, each bucket costs them as much as any other, and they read a message in so
            many parts at most.
    """
    small = scheme.divides_messages if few else scheme.summable or scheme.signal == "parameters"
    return max(1, -(-rows // (SMALL_BUCKETS if small else BUCKETS)))


def codec_of(bucket: Bucket, codec: Codec, rows: int) -> Codec:
    """`codec` for the rows of `bucket` among `rows` of the whole."""
    return replace(codec, selection=codec.selection.for_rows(bucket.first, rows))
