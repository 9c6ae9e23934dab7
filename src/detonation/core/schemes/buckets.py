"""Cuts a flat into buckets, which are sent while backward still computes other gradients."""

import math
from dataclasses import replace

from detonation.core.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import BUCKETS, SMALL_BUCKETS, Bucket
from detonation.core.schemes.scheme import Scheme

SMALLEST = 2**20
"""Smallest size of a bucket in bytes of fp32."""


def aligned_rows(*codecs: Codec) -> int:
    """Messages of all `codecs` may be cut at multiples of this number of rows without changing a
    bit.

    It is at least 64, because a matrix product of fewer rows may round differently.
    """
    return math.lcm(*(codec.unit for codec in codecs), 64)


def rows_of_a_turn(scheme: Scheme, replicas: int) -> int:
    """Number of rows that one owner gets before the next owner gets rows. Messages and replies may
    be cut at multiples of it.
    """
    return aligned_rows(scheme.codec, scheme.reply_codec(replicas))


def cut_into_buckets(layout: Layout, scheme: Scheme, unit: int, few: bool = False) -> list[Bucket]:
    """The buckets of `layout` in the order of their rows. Together they need the same bytes as one
    whole message.

    Every bucket except the last has a multiple of `unit` rows (`traffic.buckets_of`). A layout in
    tiles has one bucket, because a multiple of `unit` would end inside a line of tiles.

    Args:
        layout: Of the whole flat.
        unit: Rows after which a message may be cut.
        few: See `block_rows`.
    """
    smallest = max(1, SMALLEST // (4 * layout.chunk * unit)) * unit
    rows = max(smallest, -(-block_rows(scheme, layout.rows, few) // unit) * unit)
    if layout.rows < 2 * smallest or layout.rows <= rows or layout.tiled:
        return [Bucket.whole(layout)]
    ends = [*range(rows, layout.rows - smallest, rows), layout.rows]
    return [Bucket.of(layout, first, end) for first, end in zip([0, *ends], ends, strict=False)]


def block_rows(scheme: Scheme, rows: int, few: bool = False) -> int:
    """Approximate number of rows of a bucket.

    Args:
        rows: Rows of the whole flat.
        few: True if there are at most `BUCKETS` buckets. Triton kernels need no temporaries, and
            each bucket costs them launches.
    """
    small = scheme.summable or scheme.signal == "parameters"
    if few:
        small = scheme.divides_messages
    buckets = BUCKETS
    if small:
        buckets = SMALL_BUCKETS
    return max(1, -(-rows // buckets))


def codec_of(bucket: Bucket, codec: Codec, rows: int) -> Codec:
    """`codec` for the rows of `bucket`, in a flat of `rows` rows."""
    return replace(codec, selection=codec.selection.for_rows(bucket.first, rows))
