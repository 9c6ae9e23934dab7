"""The division of a flat into buckets that are sent while backward still computes other gradients."""

import math
from dataclasses import replace

from detonation.core.codec.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import Bucket
from detonation.core.schemes.scheme import Scheme

BUCKETS = 8
SMALLEST, LARGEST = 2**20, 25 * 2**20
"""A bucket is an eighth of the flat, in bytes of fp32, within these limits."""


def aligned_rows(*codecs: Codec) -> int:
    """The number of rows after which messages of all `codecs` may be cut without a change of any bit.

    Whole blocks of the precision and whole bytes of packed numbers; 64 rows at least, because a matrix product
    of few rows may round differently.
    """
    blocks = (codec.precision.block // math.gcd(codec.precision.block, codec.selection.k) for codec in codecs)
    return math.lcm(*blocks, 64)


def rows_of_a_turn(scheme: Scheme, replicas: int) -> int:
    """The number of rows in which owners take turns: messages and replies may be cut after it."""
    return aligned_rows(scheme.codec, scheme.reply_codec(replicas))


def cut_into_buckets(layout: Layout, scheme: Scheme, unit: int) -> list[Bucket]:
    """The buckets of `layout`, in the order of their rows: together they send the bytes of the whole, bit for bit.

    Each but the last is a multiple of `unit` rows (`traffic.buckets_of`). There is one bucket for an aggregation that
    needs whole messages, and for a layout in tiles, because such a multiple ends within a line of tiles.
    """
    row_bytes = 4 * layout.chunk
    wanted = min(max(layout.rows * row_bytes // BUCKETS, SMALLEST), LARGEST)
    rows = max(1, wanted // (row_bytes * unit)) * unit
    count = max(1, layout.rows // rows) if scheme.aggregation.rowwise and not layout.tiled else 1
    if count == 1:
        return [Bucket.whole(layout)]
    ends = [*(rows * i for i in range(1, count)), layout.rows]  # the last takes the remainder
    return [Bucket.of(layout, first, end) for first, end in zip([0, *ends], ends, strict=False)]


def codec_of(bucket: Bucket, codec: Codec, rows: int) -> Codec:
    """`codec` for the rows of `bucket` among `rows` of the whole."""
    return replace(codec, selection=codec.selection.for_rows(bucket.first, rows))
